"""One optimizer step of many kinds, on every mesh and for every family, against plain Hugging Face models.

The test process writes tiny models and what plain PyTorch makes of them (`write_reference`); run under torchrun, this
file repeats it on all meshes of a world size and writes how far each outcome is off. Models are built once per family
and mesh: the steps of one fit are the kinds, at learning rate 0.
"""

import argparse
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rl2lightning import GRPO
from rl2lightning.algorithms.base import LossLevel, OptimizerConfig
from rl2lightning.functional.losses import sft_loss
from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.policy_losses import GSPO, PolicyLoss, PPOClip
from rl2lightning.types import Sequences

# ---------------------------------------------------------------- families

COMMON = {
    "vocab_size": 101,  # a prime, so that every cut by words is uneven
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 7  # shorter than most of the sequences
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {"tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip


def write_model(family: str, directory: Path, **changes: Any) -> str:
    import transformers

    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.ndim == 1:  # norms and biases, which start as ones and zeros
                p.data.add_(0.1 * torch.randn_like(p))
        model.save_pretrained(directory)
    return str(directory)


# ---------------------------------------------------------------- kinds of step

TEMPERATURE, ENTROPY, MAX_NORM = 0.7, 0.05, 0.1
LENGTHS = [9, 4, 17, 6, 12, 5, 30, 8]


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer step."""

    loss: str  # "ppo", "sft" or "gspo"
    level: LossLevel = "token"
    max_tokens: int = 1000  # of a micro-batch on all processes that share it
    checkpointing: str = "none"


KINDS = {
    "packed": Kind("ppo"),
    "checkpointing_full": Kind("ppo", checkpointing="full"),
    "checkpointing_selective": Kind("ppo", checkpointing="selective"),
    "micro_batches": Kind("ppo", max_tokens=31),
    "sequence_level": Kind("sft", "sequence", max_tokens=31),
    "gspo": Kind("gspo", "sequence", max_tokens=31),
}


def batch() -> Sequences:
    """Random tokens, the last half of each sequence actions; an advantage for each sequence."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, COMMON["vocab_size"], (n,), generator=g).tolist() for n in LENGTHS]
    masks = [[False] * (n - n // 2) + [True] * (n // 2) for n in LENGTHS]
    seqs = Sequences.from_lists(ids, masks, temperature=TEMPERATURE)
    advantages = torch.randn(len(seqs), generator=g)[seqs.sequence_ids]
    return seqs.replace(advantages=advantages * seqs.action_mask)


# ---------------------------------------------------------------- the reference


def plain_logps(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [n - 1] of what follows each token but the last, from full logits."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_step(model: Any, seqs: Sequences, kind: Kind) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, one sequence at a time."""
    model.zero_grad(set_to_none=True)
    num_actions = int(seqs.action_mask.sum())
    total = 0.0
    for i in range(len(seqs)):
        one = seqs.select([i])
        mask = one.action_mask[1:]
        logps, entropy = (x[mask] for x in plain_logps(model, one.input_ids))
        assert one.advantages is not None
        advantages = one.advantages[1:][mask].to(logps.dtype)
        if kind.loss == "sft":
            loss = -logps
        else:
            assert one.old_logps is not None
            log_ratio = logps - one.old_logps[1:][mask].to(logps.dtype)
            low, high = (0.2, 0.2) if kind.loss == "ppo" else (3e-4, 4e-4)
            ratio = log_ratio.exp() if kind.loss == "ppo" else log_ratio.mean().exp().expand_as(logps)
            loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
            if kind.loss == "ppo":
                loss = loss - ENTROPY * entropy
        share = loss.sum() / num_actions if kind.level == "token" else loss.mean() / len(seqs)
        share.backward()
        total += float(share.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def write_reference(family: str, directory: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> None:
    """A model and, beside it, the batch and what each kind of step should come to."""
    from transformers import AutoModelForCausalLM

    path = write_model(family, directory, **changes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").train()
    seqs = batch()
    g = torch.Generator().manual_seed(1)
    old = torch.zeros(seqs.num_tokens)
    with torch.no_grad():
        for i, (start, end) in enumerate(zip(seqs.cu_seqlens[:-1], seqs.cu_seqlens[1:], strict=True)):
            logps, _ = plain_logps(model, seqs.input_ids[start:end])
            noise = torch.randn(len(logps), generator=g) * (1e-3 if i % 2 else 0.3)
            old[start + 1 : end] = logps.float() + noise - (noise.mean() if i % 2 else 0)  # some clipped, some not
    seqs = seqs.replace(old_logps=old * seqs.action_mask)
    unlike = {kind: Kind(k.loss, k.level) for kind, k in KINDS.items()}
    steps = {key: plain_step(model, seqs, key) for key in set(unlike.values())}
    torch.save({"batch": vars(seqs), "steps": {kind: steps[key] for kind, key in unlike.items()}}, directory / "ref.pt")


# ---------------------------------------------------------------- the meshes


@dataclass
class Steps(L.LightningDataModule):
    """The same batch once for every kind."""

    num_steps: int

    def __post_init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> "Steps":
        return self

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Any:
        return iter(range(self.num_steps))


class Parity(GRPO):
    """Takes a step of each kind in turn."""

    kinds: list[str]
    seqs: Sequences

    def training_step(self, batch: Any, batch_idx: int) -> None:
        kind = KINDS[self.kinds[batch_idx]]
        assert self.policy is not None
        set_checkpointing(self.policy.lm, kind.checkpointing)
        self.max_tokens_per_device = -(-kind.max_tokens // self.strategy.context)
        self.policy_loss: PolicyLoss = GSPO() if kind.loss == "gspo" else PPOClip()
        self.entropy_coef = ENTROPY if kind.loss == "ppo" else 0.0
        self.update(self.seqs, self.sft_loss if kind.loss == "sft" else self.loss, level=kind.level)

    def sft_loss(self, seqs: Sequences) -> Any:
        return sft_loss(self.logps(seqs)[0]), {}


def set_checkpointing(lm: Any, kind: str) -> None:
    if kind == "none":
        lm.gradient_checkpointing_disable()
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        from rl2lightning.models.attention import keep_attention

        settings["context_fn"] = keep_attention
    lm.gradient_checkpointing_enable(settings)


@dataclass
class Compare(L.Callback):
    """How far loss, gradients and gradient norm of each step are off, relative to the reference's."""

    steps: dict[str, Any]
    kinds: list[str]
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        kind = self.kinds[trainer.global_step]
        _, reference = self.steps[kind]
        norm = torch.stack([g.norm() for g in reference.values()]).norm()
        clipped = MAX_NORM / norm  # the gradients come after clipping
        assert clipped < 1
        gaps = {}
        for name, p in pl_module.policy.lm.named_parameters():
            expected = clipped * reference[name]
            gap = (p.grad.full_tensor() - expected).abs().max() / expected.abs().max()
            gaps[name] = float(gap)
        worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"))
        self.outcomes[kind] = {
            "gradient": gaps[worst],
            "worst": worst,
            "num_bad": sum(not g < 5e-6 for g in gaps.values()),
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kind = self.kinds[batch_idx]
        loss, gradients = self.steps[kind]
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        metrics = trainer.callback_metrics
        self.outcomes[kind]["loss"] = abs(float(metrics["train/loss"]) - loss) / abs(loss)
        self.outcomes[kind]["norm"] = abs(float(metrics["train/grad_norm"] - norm) / float(norm))


def run_mesh(directory: Path, mesh: dict[str, Any], kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Outcome of each kind for one family on one mesh."""
    reference = torch.load(directory / "ref.pt", weights_only=True)
    module = Parity(
        str(directory),
        optimizer=OptimizerConfig(lr=0.0, schedule="constant"),
        max_grad_norm=MAX_NORM,
        samples_per_prompt=1,
    )
    module.kinds, module.seqs = kinds, Sequences(**reference["batch"])
    compare = Compare(reference["steps"], kinds)
    options = dict(mesh)
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(timeout_seconds=120, **options),
        accelerator="cpu",
        devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else world_size(),
        max_steps=len(kinds),
        limit_val_batches=0,
        callbacks=[compare],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Steps(len(kinds)))
    return compare.outcomes


def world_size() -> int:
    import os

    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--mesh", action="append", default=[])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--kind", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for text in args.mesh:
        mesh = {
            k: (v == "True" if v in ("True", "False") else int(v)) for k, v in (x.split("=") for x in text.split(","))
        }
        for family in args.family or FAMILIES:
            start = time.time()
            try:
                out = run_mesh(args.models / family, mesh, args.kind or list(KINDS))
            except Exception as e:
                import traceback

                if torch.distributed.get_rank() == 0:
                    traceback.print_exc()
                out = {"error": {"e": str(e)[:300]}}
            if torch.distributed.get_rank() == 0:
                print(text, family, f"{time.time() - start:.2f}s", flush=True)
                for kind, o in out.items():
                    print("   ", kind, {k: f"{v:.1e}" if isinstance(v, float) else v for k, v in o.items()}, flush=True)


if __name__ == "__main__":
    main()
