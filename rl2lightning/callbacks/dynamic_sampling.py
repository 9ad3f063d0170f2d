"""Dynamic sampling: groups that teach nothing are replaced by those of other prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from rl2lightning.callbacks.rollout_metrics import RolloutMetrics
from rl2lightning.rollout.partial import Carried
from rl2lightning.types import Row, Trajectory


def refill(
    trainer: Any,
    trajectories: list[Trajectory],
    metrics: RolloutMetrics,
    *,
    num_prompts: int,
    max_refills: int,
    collect: Callable[[list[Row], list[int]], list[Trajectory]],
    keep: Callable[[list[Trajectory]], bool],
    before: Sequence[Carried],
    carried: Callable[[], Sequence[Carried]],
) -> list[Trajectory]:
    """What is kept of a rollout, and of new prompts for the groups that were filtered; all processes draw together.

    Groups that partial rollouts have cut off in this rollout are not replaced: their turn comes. Where nothing is found
    the run is stopped.

    Args:
        trainer: of the run.
        trajectories: of this process's prompts.
        metrics: count what is filtered.
        num_prompts: of this process.
        max_refills: how often to draw again before going on with fewer groups.
        collect: plays this process's share of new prompts.
        keep: whether a group is worth learning from.
        before: what partial rollouts had carried over to this one, of the whole run.
        carried: what they carry on now, likewise.
    """
    strategy = trainer.strategy
    wanted = sum(strategy.gather_objects(num_prompts))
    kept = _filtered(trajectories, keep, metrics)

    def count() -> tuple[int, int]:
        found = sum(strategy.gather_objects(_num_groups(kept)))
        return found, wanted - found - (_num_in_flight(carried()) - _num_in_flight(before))

    for _ in range(max_refills):
        found, missing = count()
        if missing <= 0 and (found or not carried()):
            break
        rows, indices = trainer.datamodule.draw(max(0, missing))
        mine = torch.arange(len(rows)).tensor_split(strategy.data_size)[strategy.data_rank].tolist()
        kept += _filtered(collect([rows[i] for i in mine], [indices[i] for i in mine]), keep, metrics)
    found, missing = count()
    while not found and carried():  # what is in flight may be worth something
        kept += _filtered(collect([], []), keep, metrics)
        found, missing = count()
    if found == 0:
        rank_zero_info(
            f"every group of {wanted} prompts and {max_refills} refills had equal rewards: nothing is left to learn "
            "(or nothing can be reached), and the run ends here"
        )
        trainer.should_stop = True
    elif missing > 0:
        rank_zero_warn(f"dynamic sampling found {found} of {found + missing} groups in {max_refills} refills")
    return kept


def _filtered(
    trajectories: list[Trajectory], keep: Callable[[list[Trajectory]], bool], metrics: RolloutMetrics
) -> list[Trajectory]:
    """Those of the groups that are kept; the others are counted."""
    groups: dict[int, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(t)
    kept = [group for group in groups.values() if keep(group)]
    metrics.count("filtered_groups", len(groups) - len(kept))
    return [t for group in kept for t in group]


def _num_groups(trajectories: Sequence[Trajectory]) -> int:
    return len({t.group_id for t in trajectories})


def _num_in_flight(carried: Sequence[Carried]) -> int:
    return _num_groups([c.trajectory for c in carried])
