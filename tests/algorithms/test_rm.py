"""The reward model: one step against plain Hugging Face models, what is held out, what is refused, what is exported."""

import json
import math
from pathlib import Path

import cases
import pytest
import torch
from files import write_rows
from quiet import quiet_trainer
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl2lightning import (
    DPO,
    RM,
    ChatDataModule,
    OptimizerConfig,
    PreferenceDataModule,
    PromptDataModule,
    RolloutCallback,
)
from rl2lightning.cli import Trainer, main
from rl2lightning.export import export
from rl2lightning.models.build import load_config, scalar_config
from rl2lightning.models.serving import load_scalar_model
from rl2lightning.parallel.checkpoint import load_full_weights
from rl2lightning.types import ChatBatch, Sequences

PAIRS = [
    {"messages": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(4) for b in range(4)
]


def plain_model(directory: str):
    """transformers' model for sequence classification, with the head that is drawn with the cases' seed."""
    config = scalar_config(load_config(directory))
    model = AutoModelForSequenceClassification.from_pretrained(directory, config=config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(cases.HEAD_SEED)
    model.score.weight.data = config.initializer_range * torch.randn(1, config.hidden_size, generator=generator)
    return model.train()


def plain_rewards(model, seqs: Sequences) -> torch.Tensor:
    return torch.stack([model(input_ids=seqs.select([i]).input_ids[None]).logits[0, 0] for i in range(len(seqs))])


@pytest.mark.filterwarnings("ignore:Some weights of")
@pytest.mark.parametrize("max_tokens", [40, 1000])
def test_a_step_is_that_of_plain_models_one_sequence_at_a_time(tiny_model: str, max_tokens: int) -> None:
    seqs, model = cases.pairs(cases.LENGTHS), plain_model(tiny_model)
    rewards = plain_rewards(model, seqs)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = torch.tensor([0.4, 0.1, 0.4, 0.1])  # the second and the last pair have none: the setting's
    losses = torch.log1p(torch.exp(-(chosen - rejected - margins))) + 0.2 * (chosen + rejected) ** 2
    losses.mean().backward()
    outcome = cases.rm(tiny_model, max_tokens)
    metrics = {name: float(x) for name, x in outcome["metrics"].items()}
    assert metrics["train/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    gradients = dict(model.named_parameters())
    assert outcome["gradients"].keys() == gradients.keys()
    for name, p in gradients.items():
        assert float((outcome["gradients"][name] - p.grad).abs().max() / p.grad.abs().max()) < 1e-5, name
    assert metrics["train/accuracy"] == (chosen > rejected).float().mean().item()
    assert metrics["train/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-5)
    assert metrics["train/chosen_reward"] == pytest.approx(chosen.mean().item(), rel=1e-5)
    assert metrics["train/rejected_reward"] == pytest.approx(rejected.mean().item(), rel=1e-5)


def test_the_first_step_is_what_it_was(tiny_model: str) -> None:
    """Pinned: a change of loss, head, data or their order shows here."""
    metrics = cases.rm(tiny_model, 40)["metrics"]
    assert float(metrics["train/loss"]) == pytest.approx(3.015246, rel=1e-4)
    assert float(metrics["train/grad_norm"]) == pytest.approx(20.65628, rel=1e-4)


class Indifferent(RM):
    """Its head is 0 at first, and so are all rewards; it keeps the group ids of its micro-batches."""

    def build_models(self) -> None:
        super().build_models()
        self.groups: list[list[int]] = []
        with torch.no_grad():
            self.reward_model.lm.score.weight.zero_()

    def loss(self, seqs: Sequences):
        self.groups.append(seqs.group_ids.tolist())
        return super().loss(seqs)


def test_without_an_opinion_the_loss_is_ln_2_and_no_micro_batch_splits_a_pair(tiny_model: str) -> None:
    module = Indifferent(tiny_model, optimizer=cases.OPTIMIZER, max_tokens_per_device=40)
    outcome = cases.fit(module, cases.pairs(cases.LENGTHS).replace(margins=None), ChatBatch)
    assert float(outcome["metrics"]["train/loss"]) == pytest.approx(math.log(2), abs=1e-7)
    assert float(outcome["metrics"]["train/accuracy"]) == 0.0  # a draw is not right
    assert len(module.groups) > 1
    assert sorted(g for groups in module.groups for g in groups) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(groups[0::2] == groups[1::2] for groups in module.groups)


def test_a_pair_over_the_budget_names_the_setting(tiny_model: str) -> None:
    with pytest.raises(ValueError, match=r"belong together and have 38 tokens.*raise max_tokens_per_device"):
        cases.rm(tiny_model, 31)


# ---- from rows to metrics


def trainer_for(root: Path, **settings) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return Trainer(accelerator="cpu", default_root_dir=root, **{"max_steps": 1, **quiet, **settings})


@pytest.fixture(autouse=True)
def _no_cache_but_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def reward_model(model: str, **settings) -> RM:
    return RM(
        model, optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_device=100, init_seed=cases.HEAD_SEED, **settings
    )


def test_pairs_that_teach_nothing_are_dropped_counted_and_spoken_of_once(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = "1" * 40
    useless = [
        {"messages": "a", "chosen": "1", "rejected": "1"},
        {"messages": "b", "chosen": "1", "rejected": " "},
        {"messages": "c", "chosen": "", "rejected": "2"},
        {"messages": "d", "chosen": f"{long}1", "rejected": f"{long}2"},  # the same once cut
        {"messages": long, "chosen": "1", "rejected": "2"},  # no answer is left
    ]
    path = write_rows(
        tmp_path / "pairs.jsonl", [*useless, PAIRS[0], {"messages": "e", "chosen": long, "rejected": "1"}]
    )
    trainer = trainer_for(tmp_path, max_steps=3)
    data = PreferenceDataModule(path, batch_size=7, max_length=16, val_path=path)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer.fit(reward_model(tiny_model), datamodule=data)
    reports = [record.getMessage() for record in caplog.records if "in this step" in record.getMessage()]
    assert [report.split(";")[0] for report in reports] == [
        "5 samples dropped in this step, as empty, the same twice or cut off by data.max_length",
        "1 sample cut off in this step, at data.max_length",
    ]
    metrics = trainer.callback_metrics
    assert float(metrics["train/dropped_samples"]) == float(metrics["val/dropped_samples"]) == 5
    assert float(metrics["train/truncated_samples"]) == 1
    assert float(metrics["train/grad_norm"]) > 0


def test_a_run_whose_pairs_were_all_dropped_changes_nothing_and_ends_in_an_error(
    tiny_model: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", [{"messages": "a", "chosen": "1", "rejected": "1"}] * 2)
    trainer, module = trainer_for(tmp_path), reward_model(tiny_model)
    with (
        pytest.warns(UserWarning, match="every sample of this step was dropped"),
        pytest.raises(
            ValueError, match="nothing was learned; so it was in every step since training began .1.: look at"
        ),
    ):
        trainer.fit(module, datamodule=PreferenceDataModule(path, batch_size=2, val_path=path))
    start = dict(plain_model(tiny_model).named_parameters())
    for name, p in module.reward_model.lm.named_parameters():
        assert torch.equal(p.full_tensor(), start[name])
    with pytest.warns(UserWarning, match="every held-out sample was dropped"):
        trainer_for(tmp_path).validate(module, PreferenceDataModule(path, batch_size=2, val_path=path), verbose=False)


@pytest.mark.parametrize("val_batch_size", [16, 5])
def test_held_out_metrics_are_those_of_all_pairs_together(tiny_model: str, tmp_path: Path, val_batch_size: int) -> None:
    rows = [{**row, **({"margin": 0.5} if i % 3 == 0 else {})} for i, row in enumerate(PAIRS)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model, scores = plain_model(tiny_model).eval(), []
    with torch.no_grad():
        for row in rows:
            for answer in (row["chosen"], row["rejected"]):
                ids = tokenizer.encode(f"<|user|>{row['messages']}<|end|><|assistant|>{answer}<|end|>")
                scores.append(model(input_ids=torch.tensor([ids])).logits[0, 0])
    rewards = torch.stack(scores).double()
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = torch.tensor([row.get("margin", 0.2) for row in rows])
    expected = {
        "loss": torch.log1p(torch.exp(-(chosen - rejected - margins))).mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(unbiased=False),
        "dropped_samples": torch.zeros(()),
    }
    assert 0 < expected["accuracy"] < 1
    module = reward_model(tiny_model, margin=0.2)
    data = PreferenceDataModule(path, val_path=path, val_batch_size=val_batch_size)
    for verb, prefix in (("validate", "val"), ("test", "test")):
        (found,) = getattr(trainer_for(tmp_path), verb)(module, datamodule=data, verbose=False)
        assert found == pytest.approx({f"{prefix}/{k}": float(x) for k, x in expected.items()}, rel=2e-5, abs=1e-6)
    records = [r for batch in trainer_for(tmp_path).predict(module, datamodule=data) for r in batch]
    assert [r["row"] for r in records] == list(range(16))
    assert [r["chosen_reward"] for r in records] == pytest.approx(chosen.tolist(), abs=1e-5)
    assert [r["rejected_reward"] for r in records] == pytest.approx(rejected.tolist(), abs=1e-5)
    (file,) = tmp_path.glob("version_*/scores.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == records


def held_out(monkeypatch: pytest.MonkeyPatch, *batches: list[float]) -> dict[str, float]:
    """Means of an evaluation that gives these rewards, of chosen and rejected answers in turn."""
    module, rewards = RM("some/model"), iter(batches)
    monkeypatch.setattr(module, "gather", lambda batch: (cases.pairs([4] * batch.num_dropped), 0))
    monkeypatch.setattr(module, "rewards", lambda seqs: torch.tensor(next(rewards)))
    for batch in batches:
        module._evaluate(ChatBatch(None, [], num_dropped=len(batch)))
    means = {name: total / weight for name, (total, weight) in module._held_out.items()}
    return {name: float(x) for name, x in module.finish(means).items()}


def test_held_out_metrics_by_hand_over_batches_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RM, "pair_loss", lambda self, seqs, rewards: rewards[::2] / 4)
    assert held_out(monkeypatch, [3.0, 1.0, 0.0, 4.0], [9.0, 1.0]) == pytest.approx(  # pairs (3, 1), (0, 4); (9, 1)
        {
            "loss": 1.0,
            "accuracy": 2 / 3,
            "margin": 2.0,  # (2 - 4 + 8) / 3
            "chosen_reward": 4.0,
            "rejected_reward": 2.0,
            "reward_mean": 3.0,
            "reward_std": 3.0,  # deviations 0, -2, -3, 1, 6, -2: 54 / 6 squared
        }
    )
    # far from 0, and hardly apart
    assert held_out(monkeypatch, [1000.001, 1000.0])["reward_std"] == pytest.approx(0.0005, rel=0.05)


# ---- what is refused


def test_other_data_than_pairs_is_refused(tiny_model: str, task: str, tmp_path: Path) -> None:
    chat = ChatDataModule(f"conversations@{task}", batch_size=4, val_ratio=0.0)
    with pytest.raises(ValueError, match="say nothing of which answer is better.*set data to .*PreferenceDataModule"):
        trainer_for(tmp_path).fit(reward_model(tiny_model), datamodule=chat)
    prompts = PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.0)
    with pytest.raises(ValueError, match="RM learns from answers .*: use PreferenceDataModule"):
        trainer_for(tmp_path).fit(reward_model(tiny_model), datamodule=prompts)


@pytest.mark.parametrize(
    ("order", "message"),
    [([1, 0, 2, 3], "answers 0 and 1 of the batch are none: set data to"), ([0, 1, 2], "3 answers")],
)
def test_wrong_pairing_is_refused(tiny_model: str, order: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.fit(reward_model(tiny_model), cases.pairs([5, 6, 7, 8]).select(order), ChatBatch)


def test_a_reward_model_generates_nothing(tiny_model: str, task: str, tmp_path: Path) -> None:
    data = PreferenceDataModule(f"pairs@{task}", batch_size=4)
    trainer = trainer_for(tmp_path, callbacks=[RolloutCallback(environment=task)])
    with pytest.raises(ValueError, match=r"RM has no policy .*: take RolloutCallback out of trainer\.callbacks"):
        trainer.fit(reward_model(tiny_model), datamodule=data)
    with pytest.raises(ValueError, match=r"centering=-1\.0 must not be negative"):
        reward_model(tiny_model, centering=-1.0)


# ---- from a checkpoint


@pytest.fixture(scope="module")
def checkpoint(tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a few steps."""
    root = tmp_path_factory.mktemp("trained")
    trainer = quiet_trainer(root, max_steps=3)
    trainer.fit(reward_model(tiny_model), datamodule=PreferenceDataModule(f"pairs@{task}", batch_size=8))
    trainer.save_checkpoint(root / "rm.ckpt")
    return root / "rm.ckpt"


def test_a_module_with_other_models_than_the_checkpoint_s_names_both(
    checkpoint: Path, tiny_model: str, task: str, tmp_path: Path
) -> None:
    data = PreferenceDataModule(f"pairs@{task}", batch_size=8, val_ratio=0.1)
    with pytest.raises(ValueError, match=r"holds a reward_model, and this module needs a policy: .*model\.class_path"):
        quiet_trainer(tmp_path).validate(DPO(tiny_model), datamodule=data, ckpt_path=checkpoint)


def test_an_export_of_what_the_checkpoint_does_not_hold_names_what_it_holds(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no 'critic': set --submodule to what it holds, reward_model"):
        export(str(checkpoint), str(tmp_path / "export"), submodule="critic")


def test_an_export_in_bfloat16_keeps_the_head_in_which_scores_were_trained(checkpoint: Path, tmp_path: Path) -> None:
    directory = export(str(checkpoint), str(tmp_path / "export"))
    (trained,) = load_full_weights(checkpoint, "reward_model.lm.score.").values()
    assert not torch.equal(trained, trained.bfloat16().float())
    stored = load_file(directory / "model.safetensors")
    assert {name for name, x in stored.items() if x.dtype != torch.bfloat16} == {"score.weight"}
    assert torch.equal(stored["score.weight"], trained)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    # by us it is computed as it was trained; transformers loads all of it in the type it is asked for
    ours = load_scalar_model(str(directory), torch.device("cpu"), torch.bfloat16).lm
    assert torch.equal(ours.score.weight, trained)
    assert ours.model.norm.weight.dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):
        theirs = AutoModelForSequenceClassification.from_pretrained(directory, dtype=dtype)
        assert torch.equal(theirs.score.weight, trained.to(dtype))


def test_an_export_scores_alike_in_transformers_alone_and_in_batches(
    checkpoint: Path, tiny_model: str, tmp_path: Path
) -> None:
    directory = export(str(checkpoint), str(tmp_path / "export"), dtype="float32")  # the only model there is
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["problem_type"] == "regression"
    assert not (directory / "generation_config.json").exists()
    path = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    data = PreferenceDataModule(path, batch_size=8, val_path=path, val_batch_size=16)
    (records,) = trainer_for(tmp_path).predict(reward_model(tiny_model), datamodule=data, ckpt_path=str(checkpoint))
    ours = torch.tensor([record[f"{half}_reward"] for record in records for half in ("chosen", "rejected")])
    assert ours.std() > 0.1
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = [
        f"<|user|>{row['messages']}<|end|><|assistant|>{row[half]}<|end|>"
        for row in PAIRS
        for half in ("chosen", "rejected")
    ]
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        single = [model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, 0] for text in texts]
        torch.testing.assert_close(torch.stack(single), ours, rtol=1e-5, atol=1e-5)
        for side in ("right", "left"):
            padded = tokenizer(
                [*texts, texts[0][:-7] + "12345<|end|>"],  # a longer one
                return_tensors="pt",
                padding=True,
                padding_side=side,
                return_token_type_ids=False,
            )
            assert not padded["attention_mask"].all()
            torch.testing.assert_close(model(**padded).logits[:-1, 0], ours, rtol=1e-5, atol=1e-5)


def test_validate_on_a_checkpoint_prints_a_table(
    checkpoint: Path, tiny_model: str, task: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rl2lightning"])
    arguments = {
        "model": "rl2lightning.RM",
        "model.model": tiny_model,
        "data": "rl2lightning.PreferenceDataModule",
        "data.path": f"pairs@{task}",
        "data.batch_size": "8",
        "data.val_ratio": "0.2",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": str(tmp_path),
        "ckpt_path": str(checkpoint),
    }
    main(["validate", *(f"--{name}={value}" for name, value in arguments.items())])
    table = capsys.readouterr().out
    for name in ("loss", "accuracy", "margin", "reward_mean", "reward_std", "dropped_samples"):
        assert f"val/{name} " in table
