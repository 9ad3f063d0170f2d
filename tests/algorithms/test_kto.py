"""KTO: one step against plain PyTorch, the reference point, and samples that are not what it needs."""

from pathlib import Path

import cases
import pytest
import torch
from files import write_rows
from plain import plain_logps
from quiet import quiet_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from rl2lightning import KTO, ChatDataModule, OptimizerConfig, PreferenceDataModule, UnpairedDataModule
from rl2lightning.algorithms.kto import mismatched
from rl2lightning.preference_losses import KTOLoss
from rl2lightning.types import Sequences


def samples(token_ids, starts, labels=None) -> Sequences:
    """Sequences whose answers begin at `starts`."""
    masks = [[i >= start for i in range(len(ids))] for ids, start in zip(token_ids, starts, strict=True)]
    return Sequences.from_lists(token_ids, masks, labels=None if labels is None else torch.tensor(labels))


def rows(seqs: Sequences) -> list[tuple[list[int], list[bool]]]:
    lengths = seqs.lengths.tolist()
    return [
        (ids.tolist(), mask.tolist())
        for ids, mask in zip(seqs.input_ids.split(lengths), seqs.action_mask.split(lengths), strict=True)
    ]


def test_each_prompt_gets_the_answer_of_the_next_sample() -> None:
    seqs = samples([[1, 2, 10, 11], [3, 20], [4, 5, 6, 30, 31, 32]], [2, 1, 3])
    assert rows(mismatched(seqs)) == [
        ([1, 2, 20], [False, False, True]),
        ([3, 30, 31, 32], [False, True, True, True]),
        ([4, 5, 6, 10, 11], [False, False, False, True, True]),
    ]


def test_an_answer_to_the_same_prompt_is_no_mismatch() -> None:
    seqs = samples([[1, 2, 10], [1, 2, 11], [3, 20]], [2, 2, 1])
    assert [ids for ids, _ in rows(mismatched(seqs))] == [[1, 2, 20], [1, 2, 20], [3, 10]]
    assert mismatched(seqs.select([0, 1])) is None
    assert mismatched(seqs.select([0])) is None


def test_of_pairs_chosen_and_rejected_answers_count() -> None:
    seqs = samples([[1, 2, 10], [1, 2, 11], [3, 20], [3, 21], [4, 30], [4, 31]], [2, 2, 1, 1, 1, 1])
    assert [ids for ids, _ in rows(mismatched(seqs))] == [[1, 2, 20], [1, 2, 21], [3, 30], [3, 31], [4, 10], [4, 11]]


def test_no_combination_is_longer_than_the_longest_sample() -> None:
    seqs = samples([[1, 2, 3, 4, 10], [5, 20, 21, 22]], [4, 1])
    assert rows(mismatched(seqs)) == [([1, 2, 3, 4, 20], [False] * 4 + [True]), ([5, 10], [False, True])]


def test_what_an_answer_does_not_train_on_is_not_counted_behind_another_prompt_either() -> None:
    seqs = samples([[1, 10, 11, 12], [2, 20]], [1, 1])
    seqs.action_mask[2] = False  # an environment's
    assert rows(mismatched(seqs))[1] == ([2, 10, 11, 12], [False, True, False, True])


def plain_sums(model, seqs: Sequences) -> torch.Tensor:
    return torch.stack([logps.sum() for logps in plain_logps(model, seqs)])


def plain_models(path: str):
    torch.manual_seed(cases.REFERENCE_SEED)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), reference


def by_hand(seqs: Sequences) -> Sequences:
    """Each prompt with the next answer; the last half of each sequence is its answer."""
    parts = [(ids[: len(ids) - len(ids) // 2], ids[len(ids) - len(ids) // 2 :]) for ids, _ in rows(seqs)]
    longest = max(cases.LENGTHS)
    combined = [
        (*prompt, *parts[(i + 1) % len(parts)][1][: longest - len(prompt)]) for i, (prompt, _) in enumerate(parts)
    ]
    return samples(combined, [len(prompt) for prompt, _ in parts])


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_a_step_has_the_loss_and_the_gradients_of_plain_models(tiny_model: str, max_tokens: int) -> None:
    seqs = cases.labelled(cases.LENGTHS)
    labels = seqs.labels
    model, reference = plain_models(tiny_model)
    others = by_hand(seqs)
    with torch.no_grad():
        ref = plain_sums(reference, seqs)
        z = (plain_sums(model, others) - plain_sums(reference, others)).mean().clamp(min=0)
    assert z > 1
    sums = plain_sums(model, seqs)
    v = torch.where(
        labels, 1.5 * (1 - (0.3 * (sums - ref - z)).sigmoid()), 0.5 * (1 - (0.3 * (z - sums + ref)).sigmoid())
    )
    v.mean().backward()
    loss = KTOLoss(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    outcome = cases.preference(cases.OtherKTO, tiny_model, max_tokens, kto_loss=loss)
    metrics = {name: float(x) for name, x in outcome["metrics"].items()}
    assert metrics["train/loss"] == pytest.approx(float(v.detach().mean()), rel=1e-5)
    for name, p in model.named_parameters():
        assert float((outcome["gradients"][name] - p.grad).abs().max() / p.grad.abs().max()) < 1e-5, name
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (metrics["train/loss"], metrics["train/grad_norm"]) == pytest.approx((0.5603186, 2.167593), rel=1e-3)
    rewards = 0.3 * (sums.detach() - ref)
    expected = {
        "kl": z,
        "desirable_reward": rewards[labels].mean(),
        "undesirable_reward": rewards[~labels].mean(),
        "margin": rewards[labels].mean() - rewards[~labels].mean(),
        "desirable_logps": sums.detach()[labels].mean(),
        "undesirable_logps": sums.detach()[~labels].mean(),
        "label_accuracy": ((rewards > 0.3 * z) == labels).float().mean(),
    }
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(float(value), rel=1e-5), name


def test_the_first_loss_is_one_half_and_a_step_of_one_kind_logs_only_that(tiny_model: str) -> None:
    """sigmoid(0) on both sides, as the reference point of a policy that is its reference is 0."""
    metrics = cases.preference(KTO, tiny_model)["metrics"]
    assert float(metrics["train/loss"]) == pytest.approx(0.5, abs=1e-6)
    assert float(metrics["train/kl"]) == pytest.approx(0.0, abs=1e-5)
    one_kind = cases.labelled([9, 12]).replace(labels=torch.tensor([True, True]))
    metrics = cases.fit(KTO(tiny_model, optimizer=cases.OPTIMIZER), one_kind, cases.ChatBatch)["metrics"]
    assert "train/desirable_reward" in metrics
    assert not {"train/undesirable_reward", "train/margin"} & set(metrics)


def test_a_held_out_batch_without_a_finite_loss_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module, losses = KTO("some/model"), iter([torch.tensor(torch.nan), torch.tensor(0.5)])
    monkeypatch.setattr(module, "gather", lambda batch: (cases.labelled([4, 5]), 0))
    monkeypatch.setattr(module, "measure", lambda seqs: {"loss": next(losses)})
    for _ in range(2):
        module._evaluate(cases.ChatBatch(None, []))
    assert module._held_out["loss"][0].isnan()


# ---- data modules


LABELLED = [{"messages": f"{i}+1=", "completion": str(i + i % 2), "label": i % 2 == 1} for i in range(16)]
QUICK = OptimizerConfig(lr=1e-3, schedule="constant", warmup_ratio=0.0)


def test_training_parts_desirable_from_undesirable(tiny_model: str, tmp_path: Path) -> None:
    data = UnpairedDataModule(write_rows(tmp_path / "rows.jsonl", LABELLED), val_ratio=0.25, batch_size=12)
    trainer = quiet_trainer(tmp_path, max_steps=8)
    module = KTO(tiny_model, optimizer=QUICK, kto_loss=KTOLoss(beta=0.5))
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["train/margin"]) > 1
    held_out = quiet_trainer(tmp_path).validate(module, datamodule=data, verbose=False)[0]
    names = ("loss", "margin", "label_accuracy", "kl", "desirable_reward", "undesirable_reward")
    assert {f"val/{name}" for name in names} <= set(held_out)


def test_pairs_are_two_labelled_samples_each(tiny_model: str, tmp_path: Path) -> None:
    pairs = [{"messages": f"{i}+1=", "chosen": str(i + 1), "rejected": "no", "margin": i} for i in range(4)]
    pairs[3]["rejected"] = pairs[3]["chosen"]
    data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", pairs), val_ratio=0.0, batch_size=4)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(KTO(tiny_model), datamodule=data)
    assert float(trainer.callback_metrics["train/dropped_samples"]) == 1  # a pair
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(0.5, abs=1e-6)


def test_conversations_without_labels_are_refused(tiny_model: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [{"prompt": "1+1=", "reply": "2"}] * 4)
    data = ChatDataModule(path, prompt_key="prompt", response_key="reply", val_ratio=0.0, batch_size=4)
    with pytest.raises(ValueError, match="say nothing of which is desirable: use UnpairedDataModule"):
        quiet_trainer(tmp_path).fit(KTO(tiny_model), datamodule=data)
