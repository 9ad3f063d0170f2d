"""Adapters in whole runs of one process: what learns, what is saved, resumed and exported; against peft alone.

Gradients on every mesh are held to peft's in tests/distributed/test_parity.py.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl2lightning import (
    DPO,
    GRPO,
    PPO,
    RM,
    SFT,
    ChatDataModule,
    FSDP2TPStrategy,
    LoRAConfig,
    OptimizerConfig,
    PreferenceDataModule,
    PromptDataModule,
    RolloutCallback,
    SamplingParams,
)
from rl2lightning.export import export
from rl2lightning.models.build import full_weights
from rl2lightning.models.lora import FrozenBase, merged_weights
from rl2lightning.models.lora_files import fingerprint
from rl2lightning.parallel.checkpoint import load_full_weights
from rl2lightning.policy_losses import KLPenalty

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run writes elsewhere
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]
OPTIMIZER = OptimizerConfig(lr=2e-2, schedule="constant", warmup_ratio=0.0, weight_decay=0.0)
LORA = LoRAConfig(rank=4, alpha=6.0)
IDS = torch.tensor([[7, 31, 50, 12, 90, 44]])


class Record(L.Callback):
    """What each step logged, and the gradients before it."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        named = pl_module.primary.model.lm.named_parameters()
        self.gradients.append({name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items() if "train/" in name})


def fit(module, data, root: Path, *callbacks: L.Callback, steps: int = 3, ckpt_path: Path | None = None, **settings):
    """A run with a checkpoint after every step in `root`."""
    record = Record()
    checkpoints = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(
        strategy=settings.pop("strategy", None) or FSDP2TPStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        callbacks=[record, checkpoints, *callbacks],
        default_root_dir=root,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return record


def grpo(model: str, task: str, **settings: Any) -> tuple[GRPO, PromptDataModule, RolloutCallback]:
    defaults = {"optimizer": OPTIMIZER, "lora": LORA, "samples_per_prompt": 4, "init_seed": 0}
    module = GRPO(model, sampling=SamplingParams(max_tokens=6), **{**defaults, **settings})
    return (
        module,
        PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, seed=0),
        RolloutCallback(environment=task, seed=0),
    )


def sft(model: str, **settings: Any) -> SFT:
    return SFT(model, **{"optimizer": OPTIMIZER, "lora": LORA, "init_seed": 0, **settings})


def conversations(task: str) -> ChatDataModule:
    return ChatDataModule(f"conversations@{task}", batch_size=8, seed=0)


@dataclasses.dataclass
class Run:
    """A GRPO run with adapters that are dropped out, and a KL term to the model without them."""

    module: GRPO
    record: Record
    root: Path


SETTINGS = {"lora": dataclasses.replace(LORA, dropout=0.2), "kl": KLPenalty(coef=0.1), "updates_per_rollout": 2}


@pytest.fixture(scope="module")
def run(tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("run")
    module, data, rollouts = grpo(tiny_model, task, **SETTINGS)
    return Run(module, fit(module, data, root, rollouts, steps=4), root)


# ---- in a run


def test_before_the_first_step_a_policy_with_adapters_is_its_model(tiny_model: str, task: str, tmp_path: Path) -> None:
    with_adapters = fit(sft(tiny_model), conversations(task), tmp_path / "a", steps=2)
    without = fit(sft(tiny_model, lora=None), conversations(task), tmp_path / "b", steps=2)
    losses = [[metrics["train/loss"] for metrics in record.metrics] for record in (with_adapters, without)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert abs(losses[0][1] - losses[1][1]) > 1e-3
    # B = 0: so A cannot learn yet, and B can
    sizes = [{name: float(x.abs().max()) for name, x in step.items()} for step in with_adapters.gradients]
    assert {name for name, x in sizes[0].items() if x == 0} == {name for name in sizes[0] if "lora_A" in name}
    assert min(sizes[1].values()) > 0
    assert len(sizes[1]) == 2 * 2 * 7  # A and B of seven matrices in two layers, and nothing else


def test_the_reference_is_the_model_without_adapters(run: Run, tiny_model: str) -> None:
    kls = [metrics["train/kl"] for metrics in run.record.metrics]
    assert kls[0] < kls[1]
    assert kls[-1] > 1e-3
    module = run.module
    frozen = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    assert module.policy is not None
    assert module.policy.adapters is not None
    for name, p in module.policy.adapters.frozen().items():
        assert torch.equal(p.full_tensor(), frozen.pop(name)), name  # training did not touch it
    assert not frozen
    reference = module.reference
    assert not list(reference.parameters())
    assert not list(reference.buffers())


@pytest.mark.parametrize("training", [True, False])
def test_scoring_by_the_reference_drops_nothing_out_and_leaves_the_policy_in_its_mode(run: Run, training: bool) -> None:
    policy = run.module.policy
    assert policy is not None
    before = policy.training
    policy.train(training)
    with run.module.strategy.scoring(FrozenBase(policy)):
        assert not any(module.training for module in policy.modules())
    assert all(module.training == training for module in policy.modules())
    policy.train(before)


def test_a_checkpoint_holds_the_adapters_and_nothing_of_the_model(run: Run) -> None:
    saved = load_full_weights(run.root / "step=4.ckpt", "policy.lm.")
    assert len(saved) == 2 * 2 * 7
    assert all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert run.module.policy is not None
    for name, p in run.module.policy.lm.named_parameters():
        assert (name in saved) is p.requires_grad
        if name in saved:
            assert torch.equal(saved[name], p.full_tensor())


@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(run: Run, tiny_model: str, task: str, tmp_path: Path, step: int) -> None:
    module, data, rollouts = grpo(tiny_model, task, **SETTINGS)
    fit(module, data, tmp_path, rollouts, steps=4, ckpt_path=run.root / f"step={step}.ckpt")
    assert module.policy is not None
    assert run.module.policy is not None
    theirs = dict(run.module.policy.lm.named_parameters())
    for name, p in module.policy.lm.named_parameters():
        assert torch.equal(p.full_tensor(), theirs[name].full_tensor()), name


def test_both_exports_have_the_logits_of_the_policy(run: Run, tiny_model: str, tmp_path: Path) -> None:
    checkpoint = str(run.root / "step=4.ckpt")
    export(checkpoint, str(tmp_path / "merged"), dtype="float32")
    export(checkpoint, str(tmp_path / "adapter"), dtype="float32", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        plain = base(IDS).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits
    torch.testing.assert_close(logits, theirs, rtol=0, atol=2e-5)
    assert float((logits - plain).abs().max()) > 0.1
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert run.module.policy is not None
    for name, x in merged_weights(run.module.policy):
        torch.testing.assert_close(x, merged[name], rtol=0, atol=1e-7)
    for name in ("merged", "adapter"):
        with pytest.raises(ValueError, match="holds a model already"):
            export(checkpoint, str(tmp_path / name))


def test_an_export_in_bfloat16_is_what_an_engine_was_pushed(run: Run, tmp_path: Path) -> None:
    stored = load_file(export(str(run.root / "step=4.ckpt"), str(tmp_path / "merged")) / "model.safetensors")
    assert run.module.policy is not None
    pushed = dict(merged_weights(run.module.policy, torch.bfloat16))
    assert pushed.keys() == stored.keys()
    assert all(torch.equal(x, stored[name]) for name, x in pushed.items())


def test_a_model_that_has_moved_is_named_to_export(run: Run, tiny_model: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "moved.ckpt"
    checkpoint.mkdir()
    for part in run.root.joinpath("step=4.ckpt").iterdir():
        if part.name != "model":
            (checkpoint / part.name).symlink_to(part)
    (checkpoint / "model").mkdir()
    for part in run.root.joinpath("step=4.ckpt/model").iterdir():
        if part.name != "adapters":
            (checkpoint / "model" / part.name).symlink_to(part)
    config = json.loads((run.root / "step=4.ckpt/model/adapters/policy/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny_model
    (checkpoint / "model/adapters/policy").mkdir(parents=True)
    (checkpoint / "model/adapters/policy/base_fingerprint.txt").symlink_to(
        run.root / "step=4.ckpt/model/adapters/policy/base_fingerprint.txt"
    )
    moved = json.dumps({**config, "base_model_name_or_path": "/nowhere/model"})
    (checkpoint / "model/adapters/policy/adapter_config.json").write_text(moved)
    with pytest.raises(ValueError, match="'/nowhere/model' .* set --base to where it is now"):
        export(str(checkpoint), str(tmp_path / "a"))
    export(str(checkpoint), str(tmp_path / "b"), base=tiny_model)
    export(str(run.root / "step=4.ckpt"), str(tmp_path / "c"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("b", "c"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_training_goes_on_from_an_exported_adapter(
    run: Run, tiny_model: str, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = export(str(run.root / "step=4.ckpt"), str(tmp_path / "adapter"), dtype="float32", adapter=True)
    still = OptimizerConfig(lr=0.0)
    module = sft(tiny_model, lora=LoRAConfig(path=str(adapter)), optimizer=still)
    with caplog.at_level(logging.INFO):
        fit(module, conversations(task), tmp_path, steps=1)
    # those of the adapter, not the defaults
    assert [text for text in caplog.messages if "adapters of" in text] == [f"adapters of '{adapter}': rank 4, alpha 6"]
    assert module.policy is not None
    assert run.module.policy is not None
    ours, theirs = dict(merged_weights(module.policy)), dict(merged_weights(run.module.policy))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


# ---- other algorithms, other modules


def test_dpo_scores_the_same_reference_beforehand_and_live(tiny_model: str, task: str, tmp_path: Path) -> None:
    losses = []
    for reference in ("precomputed", "live"):
        module = DPO(tiny_model, optimizer=OPTIMIZER, lora=LORA, init_seed=0, reference=reference)
        data = PreferenceDataModule(f"pairs@{task}", batch_size=8, max_length=32, seed=0)
        record = fit(module, data, tmp_path / reference)
        losses.append([metrics["train/loss"] for metrics in record.metrics])
    assert losses[0][0] == pytest.approx(0.6931472, abs=1e-6)  # ln 2: the policy is the reference
    assert abs(losses[0][-1] - losses[0][0]) > 1e-4  # as it would be if adapters were on
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_reward_model_learns_its_head_besides(make_model: Callable[..., str], task: str, tmp_path: Path) -> None:
    base = make_model(tie_word_embeddings=False)  # whose output layer a reward model has no place for
    module = RM(base, optimizer=OPTIMIZER, lora=LORA, init_seed=0)
    record = fit(module, PreferenceDataModule(f"pairs@{task}", batch_size=8, max_length=32, seed=0), tmp_path)
    assert "score.weight" in record.gradients[0]
    heads = [load_full_weights(tmp_path / f"step={i}.ckpt", "reward_model.lm.")["score.weight"] for i in (1, 3)]
    assert not torch.equal(*heads)
    checkpoint = str(tmp_path / "step=3.ckpt")
    assert len(load_full_weights(tmp_path / "step=3.ckpt", "reward_model.lm.")) == 2 * 2 * 7 + 1
    export(checkpoint, str(tmp_path / "merged"), dtype="float32")
    export(checkpoint, str(tmp_path / "adapter"), dtype="float32", adapter=True)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32, pad_token_id=0)
    with torch.no_grad():
        score = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")(IDS).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(adapted(IDS).logits, score, rtol=1e-5, atol=1e-5)
    weight = dict(full_weights(module.reward_model.lm))["score.weight"]  # type: ignore[union-attr]
    torch.testing.assert_close(load_file(tmp_path / "merged/model.safetensors")["score.weight"], weight)


def test_policy_and_critic_of_ppo_have_adapters_of_their_own(tiny_model: str, task: str, tmp_path: Path) -> None:
    module = PPO(
        tiny_model, optimizer=OPTIMIZER, lora=LORA, sampling=SamplingParams(max_tokens=6), kl=KLPenalty(coef=0.1)
    )
    fit(
        module,
        PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, seed=0),
        tmp_path,
        RolloutCallback(environment=task, seed=0),
    )
    policy, critic = (load_full_weights(tmp_path / "step=3.ckpt", f"{name}.lm.") for name in ("policy", "critic"))
    assert set(critic) == {*policy, "score.weight"}
    assert all(float(x.abs().max()) > 0 for x in (*policy.values(), *critic.values()))
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_input_embeddings().weight
    for name in ("policy", "critic"):
        merged = export(str(tmp_path / "step=3.ckpt"), str(tmp_path / name), dtype="float32", submodule=name)
        assert torch.equal(load_file(merged / "model.safetensors")["model.embed_tokens.weight"], start)


def test_modules_trained_whole_have_the_gradients_that_peft_gives_them(
    make_model: Callable[..., str], task: str, tmp_path: Path
) -> None:
    base = make_model(tie_word_embeddings=False)
    lora = LoRAConfig(rank=2, alpha=2.0, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "norm"])
    module, data = sft(base, lora=lora, max_grad_norm=None), conversations(task)
    batches: list[Any] = []
    module.on_train_batch_start = lambda batch, batch_idx: batches.append(batch)  # type: ignore[method-assign]
    record = fit(module, data, tmp_path, steps=2)
    checkpoint = str(tmp_path / "step=1.ckpt")
    adapter = export(checkpoint, str(tmp_path / "adapter"), dtype="float32", adapter=True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True)
    seqs = batches[1].sequences
    for i in range(len(seqs)):
        one = seqs.select([i])
        logps = model(one.input_ids[None]).logits[0, :-1].log_softmax(-1).gather(1, one.input_ids[1:, None])[:, 0]
        (-logps[one.action_mask[1:]].sum() / seqs.action_mask.sum()).backward()
    theirs = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = record.gradients[1]
    assert ours.keys() == theirs.keys()
    assert {"lm_head.modules_to_save.default.weight", "model.norm.modules_to_save.default.weight"} < ours.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5 * float(theirs[name].abs().max()))
    merged = export(str(tmp_path / "step=2.ckpt"), str(tmp_path / "merged"), dtype="float32")
    assert module.policy is not None
    stored = load_file(merged / "model.safetensors")
    pushed = dict(merged_weights(module.policy))
    assert pushed.keys() == stored.keys()
    assert all(torch.allclose(x, stored[name], rtol=0, atol=1e-7) for name, x in pushed.items())
    start = load_file(Path(base) / "model.safetensors")
    assert {name for name, x in stored.items() if not torch.equal(x, start[name])} == {
        *(f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")),
        "lm_head.weight",
        "model.norm.weight",
    }


def test_the_frozen_model_is_kept_in_the_compute_type_and_adapters_in_fp32(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    module, data, rollouts = grpo(tiny_model, task, kl=KLPenalty(coef=0.1))
    record = fit(module, data, tmp_path, rollouts, precision="bf16-mixed")
    assert module.policy is not None
    assert {(p.dtype, p.requires_grad) for p in module.policy.lm.parameters()} == {
        (torch.float32, True),
        (torch.bfloat16, False),
    }
    state = module.trainer.optimizers[0].state
    assert {id(p) for p in state} == {id(p) for p in module.policy.lm.parameters() if p.requires_grad}
    assert {x.dtype for name, x in module.policy_weights()} == {torch.bfloat16}
    assert record.metrics[-1]["train/kl"] > 0


@pytest.mark.slow  # compiles for a minute
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_switch_their_adapters_too(run: Run, tiny_model: str, task: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "lora": LORA}
    outcomes = []
    for compile in (False, True):
        module, data, rollouts = grpo(tiny_model, task, **settings)
        strategy = FSDP2TPStrategy(compile=compile, activation_checkpointing="full")
        outcomes.append(fit(module, data, tmp_path / str(compile), rollouts, strategy=strategy).metrics)
    for ours, theirs in zip(*outcomes, strict=True):
        assert ours["train/kl"] == pytest.approx(theirs["train/kl"], rel=1e-3, abs=1e-6)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)


# ---- what is refused


def test_other_frozen_weights_than_the_adapters_are_refused(
    run: Run, tiny_model: str, task: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    weights = model.model.layers[0].mlp.up_proj.weight
    model.save_pretrained(tmp_path / "copy", max_shard_size="20kB")
    with torch.no_grad():
        weights.mul_(1.001)
    model.save_pretrained(tmp_path / "other")
    assert fingerprint(str(tmp_path / "copy")) == fingerprint(tiny_model) != fingerprint(str(tmp_path / "other"))
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    checkpoint = run.root / "step=4.ckpt"
    with pytest.raises(ValueError, match="other' holds other weights than those .* set --base to where these are"):
        export(str(checkpoint), str(tmp_path / "exported"), base=str(tmp_path / "other"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for name in ("other", "copy"):
        tokenizer.save_pretrained(tmp_path / name)
    export(str(checkpoint), str(tmp_path / "exported"), base=str(tmp_path / "copy"))
    module, data, rollouts = grpo(str(tmp_path / "other"), task, **{**SETTINGS, "lora": LORA})
    with pytest.raises(ValueError, match="adapters of the policy for other weights than it has here: start from"):
        fit(module, data, tmp_path, rollouts, steps=5, ckpt_path=checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 3.0}, r"'policy' counted 1\.5-fold in the checkpoint, 0\.75-fold here"),
        ({"target_modules": ["q_proj"]}, r"holds 24 weights that this model has no place for, such as 'policy\.lm\."),
        ({"rank": 3}, r"holds adapters of rank 4 .* of rank 3: set model\.init_args\.lora\.rank to 4"),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(
    run: Run, changes: dict[str, Any], message: str, tiny_model: str, task: str, tmp_path: Path
) -> None:
    lora = dataclasses.replace(LORA, dropout=0.1, **changes)  # another dropout is fine
    module, data, rollouts = grpo(tiny_model, task, **{**SETTINGS, "lora": lora})
    with pytest.raises(ValueError, match=message):
        fit(module, data, tmp_path, rollouts, steps=5, ckpt_path=run.root / "step=4.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"lora\.rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0 above 0"),
        ({"dropout": 1.0}, r"lora\.dropout=1\.0"),
        ({"target_modules": []}, "is empty"),
    ],
)
def test_numbers_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_porj"]}, r"'q_porj', which is no matrix of .*there are down_proj, gate_proj, k_proj"),
        ({"target_modules": ["lm_head"]}, "an output layer can be trained whole"),
        ({"target_modules": "all"}, "neither 'all-linear' nor a list"),
        ({"modules_to_save": ["lm_haed"]}, "'lm_haed', which is no module"),
        ({"modules_to_save": ["embed_tokens"]}, "tied to another layer's"),
        ({"modules_to_save": ["mlp"]}, r"'model\.layers\.0\.mlp', and 'model\.layers\.0\.mlp\.\w+' learns already"),
        ({"modules_to_save": ["q_proj"]}, r"names '(\S+q_proj)', and '\1' learns already"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["mlp", "gate_proj"]},
            r"0\.mlp', and '\S+0\.mlp\.gate_proj' learns already",
        ),
        ({"path": "/nowhere/adapter"}, "'/nowhere/adapter' is no directory with adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str, tiny_model: str, task: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(sft(tiny_model, lora=LoRAConfig(**settings)), conversations(task), tmp_path, steps=1)


@pytest.mark.parametrize(("given", "own"), [({"rank": 8}, 4), ({"rank": 4, "alpha": 7.0}, 6)])
def test_another_rank_or_alpha_than_that_of_the_adapter_to_go_on_from_is_refused(
    given: dict[str, Any], own: int, tiny_model: str, task: str, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=6)
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    lora = LoRAConfig(path=str(tmp_path / "adapter"), **given)
    name, value = list(given.items())[-1]
    with pytest.raises(ValueError, match=rf"lora\.{name}={value} is not that of the .* set it to {own}, which"):
        fit(sft(tiny_model, lora=lora), conversations(task), tmp_path / "run", steps=1)


def test_an_adapter_of_another_kind_or_shape_is_refused(tiny_model: str, task: str, tmp_path: Path) -> None:
    def go_on(config: peft.LoraConfig, **changes: Any) -> None:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        peft.get_peft_model(plain, config).save_pretrained(path)
        stored = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**stored, **changes}))
        fit(sft(tiny_model, lora=LoRAConfig(path=str(path))), conversations(task), tmp_path / "run", steps=1)

    with pytest.raises(ValueError, match="made with use_dora=True, which is not supported: merge it"):
        go_on(peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match=r"has the shape \[8, 32\] in adapter .* and \[4, 32\]"):
        go_on(peft.LoraConfig(target_modules=["q_proj"], r=8), r=4)
    with pytest.raises(ValueError, match=r"lacks 4 weights of this model's, such as '.*k_proj"):
        go_on(peft.LoraConfig(target_modules=["q_proj"]), target_modules=["q_proj", "k_proj"])
    with pytest.raises(ValueError, match=r"holds '.*k_proj.*', which this model has no place for"):
        go_on(peft.LoraConfig(target_modules=["q_proj", "k_proj"]), target_modules=["q_proj"])


def test_settings_that_contradict_adapters_are_refused(tiny_model: str) -> None:
    with pytest.raises(ValueError, match="lora adapts a model that knows something"):
        SFT(tiny_model, lora=LORA, random_init=True)
    with pytest.raises(ValueError, match="reference_every=2 does not go with lora"):
        GRPO(tiny_model, lora=LORA, kl=KLPenalty(coef=0.1), reference_every=2)


def test_a_missing_peft_is_named(tiny_model: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'pip install "rl2lightning\[lora\]"'):
        fit(sft(tiny_model), conversations(task), tmp_path, steps=1)


def test_a_checkpoint_without_adapters_has_none_to_export(tiny_model: str, task: str, tmp_path: Path) -> None:
    fit(sft(tiny_model, lora=None), conversations(task), tmp_path, steps=1)
    with pytest.raises(ValueError, match="was trained without LoRA: leave --adapter out"):
        export(str(tmp_path / "step=1.ckpt"), str(tmp_path / "out"), adapter=True)
