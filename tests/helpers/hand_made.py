"""Sequences small enough to work out by hand what becomes of them."""

import torch

from rl2lightning.types import Sequences

t = torch.tensor
torch_close = torch.testing.assert_close


def sequences(mask_rows, group_ids=None, **fields):
    """Sequences whose tokens are their positions; fields are given per row, like the masks (1 on actions)."""
    masks = [[bool(x) for x in row] for row in mask_rows]
    return Sequences.from_lists([list(range(len(row))) for row in masks], masks, group_ids, **fields)


def rollout(seed=0):
    """Two groups of two trajectories; the first trajectory has two turns."""
    masks = [[0, 1, 1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 0]]
    generator = torch.Generator().manual_seed(seed)
    seqs = sequences(masks, [0, 0, 1, 1])
    names = ("rewards", "values", "old_logps", "rollout_logps")
    return seqs.replace(**{name: torch.randn(14, generator=generator) * seqs.action_mask for name in names})
