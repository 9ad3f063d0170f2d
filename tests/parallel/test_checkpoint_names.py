"""What a checkpoint of another model is refused with."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rl2lightning.parallel.checkpoint import _check_names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights(rank: int | None) -> dict[str, Tensor]:
    """Of a policy with one layer [6, 4], as checkpoints have them."""
    if rank is None:
        return {"policy.lm.q_proj.weight": torch.zeros(6, 4)}
    return {
        "policy.lm.q_proj.lora_A.default.weight": torch.zeros(rank, 4),
        "policy.lm.q_proj.lora_B.default.weight": torch.zeros(6, rank),
    }


RANKS = [
    (8, 4, r"holds adapters of rank 8 .* here they are of rank 4: set model\.init_args\.lora\.rank to 8"),
    (8, None, r"holds adapters of rank 8 .* model\.init_args\.lora is not set: set model\.init_args\.lora\.rank to 8"),
    (None, 4, r"without adapters, and model\.init_args\.lora\.rank is 4: leave model\.init_args\.lora out"),
]


@pytest.mark.parametrize(("stored", "here", "message"), RANKS)
def test_adapters_of_another_rank_or_none_are_named(
    tmp_path: Path, stored: int | None, here: int | None, message: str
) -> None:
    dcp.save({"state_dict": weights(stored)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _check_names(weights(stored), tmp_path)
    with pytest.raises(ValueError, match=message):
        _check_names(weights(here), tmp_path)
