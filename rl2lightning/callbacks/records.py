"""Trajectories as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl2lightning.types import Trajectory


def trajectory_record(t: Trajectory) -> dict[str, Any]:
    """A trajectory as one JSON object: conversation, rewards, and how it ended."""
    return {
        "messages": t.messages,
        "answer": t.row.get("answer"),
        "reward": t.reward,
        "scores": t.scores,
        "num_tokens": t.num_actions,
        "num_turns": t.num_turns,
        "truncated": t.truncated,
        "group_id": t.group_id,
        "sample_id": t.sample_id,
        "weight_version": t.weight_version,
    }


def write_records(path: Path, records: Iterable[dict[str, Any]], *, append: bool = False) -> None:
    """One line each; the directory is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(record, default=str) + "\n" for record in records)
