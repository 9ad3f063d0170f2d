"""What a loss may return and log, and what it is told otherwise."""

import pytest
import torch
from torch import Tensor

from rl2lightning.algorithms.base import PostTrainingModule
from rl2lightning.algorithms.grpo import GRPO
from rl2lightning.algorithms.metrics import StepMetrics
from rl2lightning.policy_losses import Reinforce
from rl2lightning.types import Sequences


def micro_batch() -> Sequences:
    """Two sequences of three tokens and of two, of which three are actions."""
    seqs = Sequences.from_lists([[5, 6, 7], [5, 8]], [[False, True, True], [False, True]], [0, 0])
    return seqs.replace(weights=seqs.action_mask / 3, sequence_weights=torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (torch.ones(5), "a Tensor"),
        (torch.ones(2), "a Tensor"),  # which would come apart into two numbers
        ((torch.ones(5), torch.ones(2)), "a tuple of Tensor, Tensor"),
        ((torch.ones(5),), "a tuple of Tensor"),
        (None, "a NoneType"),
    ],
)
def test_a_loss_that_returns_no_pair_is_told_what_to_return(returned: object, what: str) -> None:
    def my_loss(seqs: Sequences) -> object:
        return returned

    with pytest.raises(ValueError, match=rf"my_loss returned {what}: it must return a pair \(values, logged\), a tens"):
        PostTrainingModule._share(micro_batch(), my_loss)  # type: ignore[arg-type]


def test_a_policy_loss_that_returns_no_pair_is_named() -> None:
    class Mine(Reinforce):
        def __call__(self, logps: Tensor, seqs: Sequences) -> Tensor:  # type: ignore[override]
            return -logps

    class WithoutModel(GRPO):
        def logps(self, seqs: Sequences, **kwargs: object) -> tuple[Tensor, None]:  # type: ignore[override]
            return torch.zeros(5), None

    with pytest.raises(ValueError, match=r"^Mine returned a Tensor: it must return a pair \(values, logged\)"):
        WithoutModel("some/model", policy_loss=Mine()).loss(micro_batch())


def test_terms_of_a_policy_loss_are_a_pair_too_and_may_log_a_plain_number() -> None:
    class Mine(Reinforce):
        returned: object = torch.ones(5)

        def terms(self, *args: object) -> object:  # type: ignore[override]
            return self.returned

    seqs = micro_batch().replace(advantages=torch.ones(5))
    with pytest.raises(ValueError, match=r"^Mine\.terms returned a Tensor: it must return a pair \(loss, logged\)"):
        Mine()(torch.zeros(5), seqs)
    Mine.returned = torch.ones(5), {"coefficient": 0.5}
    assert Mine()(torch.zeros(5), seqs)[1]["coefficient"] == 0.5


def test_a_plain_number_is_logged_like_a_scalar_by_its_maximum() -> None:
    class OneProcess:
        def sum_over_data(self, x: Tensor) -> Tensor:
            return x

        max_over_processes = sum_over_data

    metrics = StepMetrics()
    for coefficient, count in ((0.5, 7), (0.25, 9)):
        logged = {
            "coefficient": coefficient,
            "count": count,
            "scalar": torch.tensor(coefficient),
            "mean": torch.ones(5),
        }
        metrics.add(torch.tensor(1.5), micro_batch(), logged)
    reduced = {name: float(x) for name, x in metrics.reduce(OneProcess()).items()}  # type: ignore[arg-type]
    assert reduced == {"loss": 3.0, "coefficient": 0.5, "count": 9.0, "scalar": 0.5, "mean": 1.0}


def test_what_is_no_number_cannot_be_logged() -> None:
    with pytest.raises(ValueError, match="a loss logs name='much': it must be a tensor or a number"):
        StepMetrics().add(torch.tensor(1.5), micro_batch(), {"name": "much"})  # type: ignore[dict-item]
