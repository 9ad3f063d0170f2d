"""Where adapters are handed over; needs no vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl2lightning.rollout.vllm_backend import weights


def test_adapters_are_kept_in_memory_where_there_is_room_for_those_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    room = shutil.disk_usage(tmp_path)._replace(free=800)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    assert weights.place_for(100, tmp_path) == tmp_path
    assert weights.place_for(101, tmp_path) is None
    assert weights.place_for(1, tmp_path / "missing") is None
