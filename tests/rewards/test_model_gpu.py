"""A reward model that visits the GPU; needs one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl2lightning.rewards.model import RewardModel
from rl2lightning.types import Trajectory

pytestmark = pytest.mark.gpu
MODEL = "configs/quickstart/model"


def test_an_offloaded_model_scores_as_one_that_stays_and_leaves_nothing_on_the_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    device = torch.device("cuda", torch.cuda.current_device())
    offloaded = RewardModel(str(tmp_path), token_in=True, offload=True)
    stays = RewardModel(str(tmp_path), token_in=True)
    before = torch.cuda.memory_allocated(device)
    offloaded.prepare(device)
    assert torch.cuda.memory_allocated(device) - before <= 4096  # buffers: the positions' frequencies
    stays.prepare(device)
    trajectories = [Trajectory(row={}, group_id=0, token_ids=list(range(3, 9 + i))) for i in range(5)]
    expected = [stays(t) for t in trajectories]
    assert torch.tensor(expected).std() > 0
    resting = torch.cuda.memory_allocated(device)
    for _ in range(2):
        assert [offloaded(t) for t in trajectories] == expected
        assert torch.cuda.memory_allocated(device) > resting
        offloaded.sleep()
        assert torch.cuda.memory_allocated(device) == resting
