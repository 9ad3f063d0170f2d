import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rl2lightning import OptimizerConfig
from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.algorithms.optimizer import Trained, adamw, follow_config

SHORT = OptimizerConfig(lr=0.8, schedule="linear", warmup_ratio=0.0)


def schedule(config: OptimizerConfig, num_steps: int) -> LambdaLR:
    model = nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
    return adamw(Trained(model, config, NonFiniteGuard(1)), num_steps)  # type: ignore[arg-type]


def resumed(config: OptimizerConfig, num_steps: int) -> LambdaLR:
    """A schedule that goes on from the end of two steps by `SHORT`."""
    before, after = schedule(SHORT, 2), schedule(config, num_steps)
    for _ in range(2):
        before.optimizer.step()
        before.step()
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.load_state_dict(before.state_dict())
    return after


def test_a_longer_run_goes_on_by_its_own_schedule() -> None:
    longer = resumed(SHORT, 4)
    assert [group["lr"] for group in longer.optimizer.param_groups] == [0, 0]  # the end of the short one's
    follow_config(longer, SHORT)
    assert longer.get_last_lr() == pytest.approx([0.4, 0.4])  # the middle of its own
    assert longer.get_last_lr() == [group["lr"] for group in longer.optimizer.param_groups]


def test_a_run_goes_on_with_its_own_settings() -> None:
    config = OptimizerConfig(lr=0.2, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3, schedule="constant", warmup_ratio=0)
    other = resumed(config, 4)
    follow_config(other, config)
    expected = {"lr": 0.2, "initial_lr": 0.2, "betas": (0.5, 0.6), "eps": 1e-3}
    for group, weight_decay in zip(other.optimizer.param_groups, (0.3, 0.0), strict=True):
        assert {name: group[name] for name in [*expected, "weight_decay"]} == expected | {"weight_decay": weight_decay}
    other.optimizer.step()
    other.step()
    assert other.get_last_lr() == [0.2, 0.2]
