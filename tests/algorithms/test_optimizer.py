import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rl2lightning import OptimizerConfig
from rl2lightning.algorithms.optimizer import follow_schedules


def schedule(num_steps: int) -> LambdaLR:
    config = OptimizerConfig(lr=0.8, schedule="linear", warmup_ratio=0.0)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=config.lr)
    return LambdaLR(optimizer, lambda step: config.lr_at(step, num_steps))


def test_a_longer_run_goes_on_by_its_own_schedule() -> None:
    short, longer = schedule(2), schedule(4)
    for _ in range(2):
        short.optimizer.step()
        short.step()
    longer.optimizer.load_state_dict(short.optimizer.state_dict())
    longer.load_state_dict(short.state_dict())
    (group,) = longer.optimizer.param_groups
    assert group["lr"] == 0  # the end of the short one's
    follow_schedules([longer])
    assert group["lr"] == pytest.approx(0.4)  # the middle of its own
    assert longer.get_last_lr() == [group["lr"]]
    follow_schedules([object(), longer])
    assert group["lr"] == pytest.approx(0.4)
