"""DPO and its relatives: one step against plain PyTorch, one sequence at a time; held-out metrics; wrong data."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import cases
import lightning as L
import pytest
import torch
from files import write_rows
from plain import plain_logps
from quiet import quiet_trainer
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM

from rl2lightning import DPO, ChatDataModule, OptimizerConfig, PreferenceDataModule, UnpairedDataModule
from rl2lightning.models.lora import LoRAConfig
from rl2lightning.parallel.checkpoint import load_full_weights
from rl2lightning.preference_losses import IPO, ORPO, Hinge, PreferenceLoss, Robust, Sigmoid, SimPO


def other_reference(path: str):
    torch.manual_seed(cases.REFERENCE_SEED)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


def sums(answers: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.sum() for x in answers])


def means(answers: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.mean() for x in answers])


def margins(of, policy, reference) -> torch.Tensor:
    gap = of(policy) - of(reference)
    return gap[::2] - gap[1::2]


def log_odds(logps: torch.Tensor) -> torch.Tensor:
    p = logps.double().exp()
    return (p / (1 - p)).log().float()


def nll(policy) -> torch.Tensor:
    return -torch.cat(policy[::2]).mean()


LOSSES: dict[str, tuple[PreferenceLoss, Callable]] = {
    "sigmoid": (Sigmoid(beta=0.3), lambda p, r: -logsigmoid(0.3 * margins(sums, p, r)).mean()),
    "rpo": (
        Sigmoid(beta=0.3, label_smoothing=0.1, nll_coef=0.5),
        lambda p, r: (-0.9 * logsigmoid(h := 0.3 * margins(sums, p, r)) - 0.1 * logsigmoid(-h)).mean() + 0.5 * nll(p),
    ),
    "length_normalised": (
        Sigmoid(beta=2.0, length_normalised=True),
        lambda p, r: -logsigmoid(2 * margins(means, p, r)).mean(),
    ),
    "robust": (
        Robust(beta=0.3, flip_rate=0.2),
        lambda p, r: ((-0.8 * logsigmoid(h := 0.3 * margins(sums, p, r)) + 0.2 * logsigmoid(-h)) / 0.6).mean(),
    ),
    "hinge": (Hinge(beta=0.1), lambda p, r: (1 - 0.1 * margins(sums, p, r)).relu().mean()),
    "ipo": (IPO(per_token_beta=0.5), lambda p, r: (margins(means, p, r) - 1).square().mean()),
    "simpo": (
        SimPO(per_token_beta=2.0, gamma=1.0, nll_coef=0.1),
        lambda p, r: -logsigmoid(2 * (means(p)[::2] - means(p)[1::2]) - 1).mean() + 0.1 * nll(p),
    ),
    "orpo": (
        ORPO(lam=0.5),
        lambda p, r: nll(p) - 0.5 * logsigmoid(log_odds(means(p)[::2]) - log_odds(means(p)[1::2])).mean(),
    ),
}


PINNED = {  # loss and gradient norm of the step below
    "sigmoid": (1.219413, 9.474881),
    "rpo": (3.775678, 10.43686),
    "length_normalised": (2.582417, 16.99137),
    "robust": (1.436153, 13.98946),
    "hinge": (1.216740, 4.820529),
    "ipo": (5.478139, 46.65238),
    "simpo": (2.448876, 15.24438),
    "orpo": (5.704710, 7.306047),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_has_the_loss_and_the_gradients_of_plain_models(tiny_model: str, name: str) -> None:
    loss, plain = LOSSES[name]
    seqs = cases.labelled(cases.LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        reference = plain_logps(other_reference(tiny_model), seqs)
    expected = plain(plain_logps(model, seqs), reference)
    expected.backward()
    outcome = cases.dpo(tiny_model, 40, loss)  # several micro-batches
    torch.testing.assert_close(float(outcome["metrics"]["train/loss"]), float(expected.detach()), rtol=1e-5, atol=1e-6)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert outcome["gradients"].keys() == gradients.keys()
    for n, g in gradients.items():
        assert float((outcome["gradients"][n] - g).abs().max() / g.abs().max()) < 1e-5, n
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    assert float(outcome["metrics"]["train/grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert (float(expected.detach()), norm) == pytest.approx(PINNED[name], rel=1e-3)


def test_what_is_logged_are_the_means_over_pairs_and_chosen_tokens(tiny_model: str) -> None:
    seqs = cases.labelled(cases.LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        policy, reference = plain_logps(model, seqs), plain_logps(other_reference(tiny_model), seqs)
    rewards = 0.3 * (sums(policy) - sums(reference))
    expected = {
        "chosen_reward": rewards[::2].mean(),
        "rejected_reward": rewards[1::2].mean(),
        "margin": (rewards[::2] - rewards[1::2]).mean(),
        "pair_accuracy": (rewards[::2] > rewards[1::2]).float().mean(),
        "chosen_logps": sums(policy)[::2].mean(),
        "rejected_logps": sums(policy)[1::2].mean(),
        "nll": nll(policy),
    }
    assert 0 < expected["pair_accuracy"] < 1
    logged = cases.dpo(tiny_model, 40)["metrics"]
    for name, value in expected.items():
        assert float(logged[f"train/{name}"]) == pytest.approx(float(value), rel=1e-5), name


def kept(reference: str, cache: Path) -> dict:
    return {"reference": reference} | ({"reference_cache": str(cache)} if reference == "precomputed" else {})


@pytest.mark.parametrize("reference", ["live", "precomputed"])
@pytest.mark.parametrize("loss", [Sigmoid(), Sigmoid(label_smoothing=0.2), Robust()])
def test_the_first_loss_is_ln_2(tiny_model: str, tmp_path: Path, loss: PreferenceLoss, reference: str) -> None:
    settings = {"preference_loss": loss, **kept(reference, tmp_path)}
    metrics = cases.preference(DPO, tiny_model, 40, **settings)["metrics"]
    assert float(metrics["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(metrics["train/margin"]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("reference", ["live", "precomputed"])
def test_the_frozen_model_under_adapters_is_the_reference(tiny_model: str, tmp_path: Path, reference: str) -> None:
    class Watched(DPO):
        def build_policy(self, *, trainable: bool):
            assert trainable, "no second model is wanted"
            return super().build_policy(trainable=trainable)

        def on_train_end(self) -> None:
            assert self.policy is not None
            self.after = self.evaluate(self.with_reference(cases.labelled(cases.LENGTHS)), self.loss)

    settings = kept(reference, tmp_path) | {"lora": LoRAConfig(rank=4)}
    module = Watched(tiny_model, optimizer=cases.OPTIMIZER, max_tokens_per_device=40, **settings)

    class First(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 0:
                self.loss = float(trainer.callback_metrics["train/loss"])

    first = First()
    data = cases.Share(cases.labelled(cases.LENGTHS), cases.ChatBatch, steps=3)
    quiet_trainer(tmp_path, first, max_steps=3).fit(module, datamodule=data)
    assert first.loss == pytest.approx(math.log(2), abs=1e-6)
    assert float(module.after["margin"]) > 0.1  # the policy has moved, its reference has not


def test_losses_without_reference_load_none(tiny_model: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where log-probs would be kept
    for loss in (SimPO(), ORPO()):
        for kind in ("live", "precomputed"):
            module = DPO(tiny_model, preference_loss=loss, reference=kind)  # type: ignore[arg-type]
            cases.fit(module, cases.labelled([8, 6]), cases.ChatBatch)
            assert module.reference is None
    assert not list(tmp_path.iterdir())


# ---- a data module of its own, as a user has it


def pair_rows(num: int = 24) -> list[dict]:
    return [{"messages": f"{i}+1=", "chosen": str(i + 1), "rejected": "no" if i % 2 else "7" * 5} for i in range(num)]


QUICK = OptimizerConfig(lr=1e-3, schedule="constant", warmup_ratio=0.0)


def test_held_out_means_do_not_depend_on_the_batches(tiny_model: str, tmp_path: Path, capsys) -> None:
    """Pairs and chosen tokens are not in the same proportion in each of them."""
    path = write_rows(tmp_path / "pairs.jsonl", pair_rows())
    loss = Sigmoid(nll_coef=1.0)
    results = []
    for size in (8, 3):
        data = PreferenceDataModule(path, val_ratio=1 / 3, val_batch_size=size, batch_size=4)
        module = cases.OtherDPO(tiny_model, preference_loss=loss)
        trainer = quiet_trainer(tmp_path, enable_progress_bar=True)
        results.append(trainer.validate(module, datamodule=data)[0])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert set(results[0]) == {
        f"val/{name}"
        for name in (
            "loss", "preference_loss", "nll", "margin", "pair_accuracy", "chosen_reward", "rejected_reward",
            "chosen_logps", "rejected_logps", "dropped_samples",
        )
    }  # fmt: skip
    assert results[0]["val/loss"] == pytest.approx(results[0]["val/preference_loss"] + results[0]["val/nll"], rel=1e-5)
    assert "val/margin" in capsys.readouterr().out  # the table


def test_training_raises_the_margin_of_the_pairs_it_sees(tiny_model: str, tmp_path: Path) -> None:
    data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", pair_rows()), val_ratio=0.0, batch_size=24)
    trainer = quiet_trainer(tmp_path, max_steps=6)
    trainer.fit(DPO(tiny_model, optimizer=QUICK), datamodule=data)
    assert float(trainer.callback_metrics["train/pair_accuracy"]) == 1
    assert float(trainer.callback_metrics["train/loss"]) < 0.6


class Weights(L.Callback):
    def on_train_end(self, trainer, pl_module) -> None:
        self.weights = {n: w.clone() for n, w in pl_module.policy_weights()}


@pytest.mark.parametrize("reference", ["live", "precomputed"])
def test_a_run_that_goes_on_is_the_same_bit_for_bit(tiny_model, tmp_path: Path, reference: str) -> None:
    def fit(steps: int, ckpt: str | None = None) -> dict[str, torch.Tensor]:
        weights = Weights()
        trainer = quiet_trainer(tmp_path, weights, max_steps=steps)
        data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", pair_rows()), val_ratio=0.0, batch_size=8)
        module = DPO(tiny_model, optimizer=QUICK, reference=reference)  # type: ignore[arg-type]
        trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=False)
        if steps == 2:
            trainer.save_checkpoint(tmp_path / "two.ckpt")
            with pytest.raises(ValueError, match="holds no weights"):  # it is found again, not saved
                load_full_weights(tmp_path / "two.ckpt", "reference.")
        return weights.weights

    whole, _ = fit(4), fit(2)
    for path in tmp_path.glob("reference_logps/*/*.pt"):
        path.unlink()  # it is scored anew, by the reference and not by the policy of the checkpoint
    resumed = fit(4, str(tmp_path / "two.ckpt"))
    assert all(torch.equal(resumed[name], x) for name, x in whole.items())


def test_pairs_that_teach_nothing_are_dropped_and_counted(tiny_model: str, tmp_path: Path) -> None:
    rows = pair_rows(4)
    rows[1]["rejected"] = rows[1]["chosen"]
    rows[2]["chosen"] = ""
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(DPO(tiny_model), datamodule=PreferenceDataModule(path, val_ratio=0.0, batch_size=4))
    assert float(trainer.callback_metrics["train/dropped_samples"]) == 2
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)
    trainer = quiet_trainer(tmp_path, max_epochs=1, max_steps=-1)
    with pytest.warns(UserWarning, match="every sample of this step was dropped"):
        trainer.fit(DPO(tiny_model), datamodule=PreferenceDataModule(path, val_ratio=0.0, batch_size=1))
    assert trainer.global_step == 4  # two of which were in vain


def test_what_is_no_pair_is_refused(tiny_model: str, tmp_path: Path) -> None:
    labelled = [{"messages": f"{i}+1=", "completion": str(i + 1), "label": i > 0} for i in range(4)]
    chats = [{"prompt": f"{i}+1=", "reply": str(i + 1)} for i in range(4)]
    chat_data = {"prompt_key": "prompt", "response_key": "reply", "val_ratio": 0.0, "batch_size": 4}
    for data, message in (
        (
            UnpairedDataModule(write_rows(tmp_path / "u.jsonl", labelled), val_ratio=0.0, batch_size=4),
            "0 and 1 of the batch are none",
        ),
        (ChatDataModule(write_rows(tmp_path / "c.jsonl", chats), **chat_data), "say nothing of which answer is better"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*set data to rl2lightning.PreferenceDataModule"):
            quiet_trainer(tmp_path).fit(DPO(tiny_model, reference="live"), datamodule=data)


def test_a_sampled_validation_and_predictions_come_from_the_prompts(tiny_model: str, tmp_path: Path) -> None:
    from rl2lightning import HFEngine, RolloutCallback
    from rl2lightning.rewards import ExactMatch
    from rl2lightning.types import SamplingParams

    rows = [{**row, "answer": row["chosen"]} for row in pair_rows()]
    data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", rows), val_ratio=0.25, batch_size=4)
    module = DPO(tiny_model, eval_sampling=SamplingParams(max_tokens=4, temperature=0.0))
    trainer = quiet_trainer(tmp_path, RolloutCallback(HFEngine(), rewards=[ExactMatch()]))
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/accuracy"] == 0  # of what a model of random weights says
    assert metrics["val/response_length"] > 0
    assert metrics["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer = quiet_trainer(tmp_path, RolloutCallback(HFEngine(), rewards=[ExactMatch()]))
    predictions = trainer.predict(module, datamodule=data)
    assert sum(len(batch) for batch in predictions) == 6
    with (tmp_path / "completions.jsonl").open() as file:
        assert [json.loads(line)["messages"][-1]["role"] for line in file] == ["assistant"] * 6
