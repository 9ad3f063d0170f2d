"""Loss, gradient and weights do not depend on micro-batches, packing or the number of processes (fp32, 1e-5)."""

from pathlib import Path

import pytest
import torch

CASES = [
    "sft",
    "sft_small_micro_batches",
    "sft_sequence",
    "sft_fewer_sequences_than_ranks",
    "sft_three_steps",
    "grpo_token",
    "grpo_sequence",
    "grpo_constant",
    "dpo_small_micro_batches",
    "dpo_fewer_pairs_than_ranks",
    "dpo_precomputed",
    "orpo",
    "kto",
    "rm",
    "rm_fewer_pairs_than_ranks",
]


@pytest.fixture(scope="module")
def outcomes(run_on, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """Of all cases, by number of processes."""
    directory = tmp_path_factory.mktemp("outcomes")
    for n in (1, 2, 4):
        run_on(n, Path(__file__).with_name("cases.py"), tiny_model, directory / f"{n}.pt")
    return {n: torch.load(directory / f"{n}.pt", weights_only=True) for n in (1, 2, 4)}


def largest_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any parameter, relative to that parameter's largest entry."""
    assert ours.keys() == reference.keys()
    return max(float((ours[n] - x).abs().max() / x.abs().max().clamp(min=1e-12)) for n, x in reference.items())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_processes_do_not_change_loss_and_gradient(outcomes: dict, case: str, world_size: int) -> None:
    one, many = outcomes[1][case], outcomes[world_size][case]
    assert largest_difference(many["gradients"], one["gradients"]) < 1e-5
    torch.testing.assert_close(many["metrics"]["train/loss"], one["metrics"]["train/loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(many["metrics"]["train/grad_norm"], one["metrics"]["train/grad_norm"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_micro_batches_do_not_change_the_gradient(outcomes: dict, world_size: int) -> None:
    # 32 tokens a micro-batch against all in one; on 4 processes 8 sequences leave some micro-batches empty
    small, whole = outcomes[world_size]["sft_small_micro_batches"], outcomes[1]["sft"]
    assert largest_difference(small["gradients"], whole["gradients"]) < 1e-5


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", ["sft_replicated", "sft_reduced_each_micro_batch"])
def test_when_and_where_gradients_are_reduced_does_not_change_them(outcomes: dict, case: str, world_size: int) -> None:
    assert largest_difference(outcomes[world_size][case]["gradients"], outcomes[1]["sft"]["gradients"]) < 1e-5


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mesh", ["", "_tensor", "_tensor_sequence", "_context"])
def test_three_steps_lead_to_the_same_weights(outcomes: dict, mesh: str, world_size: int) -> None:
    # four processes are two of the named axis and two that shard
    ours, reference = outcomes[world_size][f"sft_three_steps{mesh}"], outcomes[1]["sft_three_steps"]
    assert largest_difference(ours["weights"], reference["weights"]) < 1e-4


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mesh", ["", "_replicated", "_tensor", "_context"])
def test_a_reward_model_learns_the_same_from_pairs_on_any_mesh(outcomes: dict, mesh: str, world_size: int) -> None:
    ours, reference = outcomes[world_size][f"rm{mesh}"], outcomes[1]["rm"]
    assert largest_difference(ours["gradients"], reference["gradients"]) < 1e-5
    assert largest_difference(ours["weights"], reference["weights"]) < 1e-5  # after two steps
    for step in (0, 1):
        for name in ("loss", "grad_norm", "accuracy", "margin", "chosen_reward", "rejected_reward"):
            expected = reference["steps"][step][f"train/{name}"]
            assert ours["steps"][step][f"train/{name}"] == pytest.approx(expected, rel=5e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [(n, mesh) for n in (2, 4) for mesh in ("", "_replicated", "_tensor", "_context")],
)
def test_two_models_with_two_optimizers_learn_the_same_on_any_mesh(outcomes: dict, mesh: str, world_size: int) -> None:
    # four processes are two of the named axis and two that shard; without a name all of them shard
    reference, ours = outcomes[1]["ppo"], outcomes[world_size][f"ppo{mesh}"]
    for step in (0, 1):
        gradients = reference["gradients_of_steps"][step]
        assert {name.partition(".")[0] for name in gradients} == {"policy", "critic"}
        assert largest_difference(ours["gradients_of_steps"][step], gradients) < 1e-5
        for name in ("loss", "grad_norm", "critic_loss", "critic_grad_norm", "approx_kl", "explained_variance"):
            expected = reference["steps"][step][f"train/{name}"]
            assert ours["steps"][step][f"train/{name}"] == pytest.approx(expected, rel=2e-5, abs=1e-6), name
    assert largest_difference(ours["weights"], reference["weights"]) < 1e-5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_pair_weighs_the_same_in_any_micro_batch(outcomes: dict, world_size: int) -> None:
    small, whole = outcomes[world_size]["dpo_small_micro_batches"], outcomes[1]["dpo"]
    assert largest_difference(small["gradients"], whole["gradients"]) < 1e-5
    for name in ("loss", "nll", "margin", "pair_accuracy"):
        expected = float(whole["metrics"][f"train/{name}"])
        assert float(small["metrics"][f"train/{name}"]) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mesh", ["replicated", "tensor", "context"])
def test_pairs_teach_the_same_on_any_mesh(outcomes: dict, mesh: str, world_size: int) -> None:
    # four processes are two of the named axis and two that shard
    ours, reference = outcomes[world_size][f"dpo_{mesh}"], outcomes[1]["dpo"]
    assert largest_difference(ours["gradients"], reference["gradients"]) < 1e-5
    torch.testing.assert_close(ours["metrics"]["train/loss"], reference["metrics"]["train/loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_reference_point_of_kto_is_that_of_the_whole_step_on_any_mesh(outcomes: dict, world_size: int) -> None:
    ours, reference = outcomes[world_size]["kto_context"], outcomes[1]["kto"]
    assert float(reference["metrics"]["train/kl"]) > 0.1
    assert float(ours["metrics"]["train/kl"]) == pytest.approx(float(reference["metrics"]["train/kl"]), rel=1e-5)
    assert largest_difference(ours["gradients"], reference["gradients"]) < 1e-5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_reference_is_scored_once_by_all_and_written_by_one_process(outcomes: dict, world_size: int) -> None:
    ours, live = outcomes[world_size]["dpo_precomputed"], outcomes[1]["dpo"]
    assert ours["num_files"] == 1
    assert largest_difference(ours["gradients"], live["gradients"]) < 1e-5
    assert torch.equal(ours["second_loss"], ours["metrics"]["train/loss"])
