"""Trajectories that take several rollouts: when one is cut off, and what is kept of it until it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rl2lightning.types import Row, Trajectory


@dataclass(frozen=True)
class PartialRollouts:
    """Rollouts end before their longest trajectories do, which go on in the next one, under its weights.

    A trajectory is gone on with token by token where it was cut off, each token with the log-prob it was drawn with.
    A group is learned from once all of its samples have ended, so a step's number of groups varies; it is
    `prompts_per_rollout` on average. (Kimi k1.5, arXiv:2501.12599, cuts by `tokens`.)

    Args:
        share: an engine ends its rollout once this share of the trajectories that it plays has ended; null: never.
            Where environments or tools answer, how long they take has a say in what that cuts off.
        tokens: most tokens that a trajectory gets in one rollout; null: as many as it likes. With this alone, results
            do not depend on the number of processes, nor on the time that tools take.
        max_age: a trajectory that began so many optimizer steps ago, or more, is not cut off any more.
    """

    share: float | None = None
    tokens: int | None = None
    max_age: int = 4

    def __post_init__(self) -> None:
        if self.share is None and self.tokens is None:
            raise ValueError("partial rollouts need an end: set partial.share or partial.tokens")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"partial.share={self.share} must lie between 0 and 1, both excluded (null: no such end)")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"partial.tokens={self.tokens} must be at least 1")
        if self.max_age < 1:
            raise ValueError(f"partial.max_age={self.max_age} must be at least 1")

    def enough(self, num_ended: int, num_played: int) -> bool:
        """Whether a rollout of `num_played` trajectories ends, as far as `share` says."""
        return self.share is not None and num_ended >= math.ceil(self.share * num_played)


@dataclass
class Carried:
    """A trajectory between two rollouts: cut off, or at its end and waiting for others of its group."""

    trajectory: Trajectory  # complete turns only
    began: int  # optimizer step of the weights of its first rollout
    ended: bool = False
    reply: list[int] = field(default_factory=list)  # what the environment said last and nobody has answered yet
    token_ids: list[int] = field(default_factory=list)  # of the turn that was cut off, with log-probs and versions
    logps: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.trajectory.group_id, self.trajectory.sample_id

    def copy(self) -> Carried:
        """One that can be gone on with while this one stays as it is."""
        t = self.trajectory
        lists = {f.name: list(x) for f in fields(t) if isinstance(x := getattr(t, f.name), list)}
        lists["messages"] = [dict(message) for message in t.messages]
        own = {f.name: list(x) for f in fields(self) if isinstance(x := getattr(self, f.name), list)}
        return replace(self, trajectory=replace(t, scores=dict(t.scores), **lists), **own)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, and the row as it is."""
        return asdict(self)

    @staticmethod
    def of(state: dict[str, Any]) -> Carried:
        return Carried(**{**state, "trajectory": Trajectory(**state["trajectory"])})


def check_rows(rows: Iterable[Row]) -> None:
    """Raises ValueError where a checkpoint could not hold a row, which may have to be carried in one."""
    for row in rows:
        for name, value in row.items():
            if not _plain(value):
                raise ValueError(
                    f"column '{name}' of a prompt holds a {type(value).__name__}, which checkpoints cannot hold: with "
                    "partial rollouts rows need plain columns (texts, numbers, lists and mappings of them)"
                )


def check_messages(carried: Iterable[Carried]) -> None:
    """The same of what an environment has said or put into a row."""
    for c in carried:
        check_rows([c.trajectory.row])
        for message in c.trajectory.messages:
            for name, value in message.items():
                if not _plain(value):
                    raise ValueError(
                        f"'{name}' of a message of the environment is a {type(value).__name__}, which checkpoints "
                        "cannot hold: with partial rollouts messages need plain fields"
                    )


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(x) for pair in value.items() for x in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool, bytes)


def whole_groups(played: Sequence[Carried]) -> tuple[list[Trajectory], list[Carried]]:
    """The trajectories of groups all of whose samples have ended, and what is carried on; both in order."""
    cut_off = {c.trajectory.group_id for c in played if not c.ended}
    played = sorted(played, key=lambda c: c.key)
    whole = [c.trajectory for c in played if c.trajectory.group_id not in cut_off]
    return whole, [c for c in played if c.trajectory.group_id in cut_off]
