"""DPO and KTO learn from answers alone: what is stated here was measured with room to spare (README.md)."""

import math

import pytest


def short(num_steps: int) -> list[str]:
    return [f"--trainer.max_steps={num_steps}", f"--trainer.val_check_interval={num_steps}"]


def test_30_steps_of_dpo_raise_the_margin_and_the_accuracy_of_what_is_generated(fit) -> None:
    logged = fit("quickstart/dpo", *short(30))
    assert logged["train/loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert logged["train/grad_norm"][0] == pytest.approx(1.638, rel=1e-3)
    assert logged["val/margin"][-1] > 0.2
    assert logged["val/pair_accuracy"][-1] > 0.85
    assert logged["val/accuracy"][-1] >= logged["val/accuracy"][0] + 0.05


def test_40_steps_of_kto_raise_the_margin_and_the_accuracy_of_what_is_generated(fit) -> None:
    logged = fit("quickstart/kto", *short(40))
    assert logged["train/loss"][0] == pytest.approx(0.5, abs=1e-6)
    assert logged["train/grad_norm"][0] == pytest.approx(6.882, rel=1e-3)
    assert logged["val/margin"][-1] > 2
    assert logged["val/label_accuracy"][-1] > 0.75
    assert logged["val/accuracy"][-1] >= logged["val/accuracy"][0] + 0.1  # 0.50 -> 0.72 when it was measured


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("config", ["dpo", "kto"])
def test_greedy_accuracy_rises_by_at_least_0_2(fit, config: str, seed: str) -> None:
    logged = fit(f"quickstart/{config}", "--seed_everything", seed)
    accuracies, margins = logged["val/accuracy"], logged["val/margin"]
    print("measured", config, seed, accuracies, margins)
    assert accuracies[-1] >= accuracies[0] + 0.2
    assert margins[-1] > margins[0] > 0
