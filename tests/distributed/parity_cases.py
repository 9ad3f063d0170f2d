"""One optimizer step of many kinds, on every mesh and for every family, against plain Hugging Face models.

The test process writes tiny models and what plain PyTorch makes of them (`write_reference`); run under torchrun, this
file repeats it on all meshes of a world size and writes how far each outcome is off. Models are built once per family
and mesh: the steps of one fit are the kinds, at learning rate 0.
"""

import argparse
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file

from rl2lightning import GRPO, RingAttention
from rl2lightning.algorithms.base import LossLevel
from rl2lightning.algorithms.optimizer import OptimizerConfig
from rl2lightning.algorithms.pairs import on_both_halves, pair_units, split_pairs
from rl2lightning.functional.losses import reward_model_loss, sft_loss
from rl2lightning.models.attention import keep_attention
from rl2lightning.models.build import (
    decoder_blocks,
    full_weights,
    gathered_weights,
    init_weights,
    load_config,
    own_part,
)
from rl2lightning.models.lora import LoRAConfig, merged_weights
from rl2lightning.models.lora_files import file_name
from rl2lightning.parallel.checkpoint import load_full_weights
from rl2lightning.parallel.ring.attention import TransportName
from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.policy_losses import GSPO, PPOClip
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
    "initializer_range": 0.05,  # at 0.2 float32 itself is 3e-6 off, here 2e-6
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 7  # shorter than most of the sequences
TIED, ONE_KEY_HEAD = (
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1},
)  # fewer than the tensor axis has processes
WINDOWED = {"sliding_window": WINDOW}
EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {**TIED, **WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", TIED),
    "llama": ("Llama", {**ONE_KEY_HEAD, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", WINDOWED),
    "gemma2": ("Gemma2", {**TIED, **WINDOWED, **EVERY_OTHER}),
    "gemma3": ("Gemma3Text", {**TIED, **ONE_KEY_HEAD, **WINDOWED, **EVERY_OTHER}),
    "phi3": ("Phi3", WINDOWED),
    "olmo2": ("Olmo2", {}),
}


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


# ---------------------------------------------------------------- meshes


@dataclass(frozen=True)
class Mesh:
    """How the processes are arranged, and how sequences are spread where they are."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    tensor_sequence: bool = False
    transport: TransportName = "ring"

    def trainer(self, *callbacks: L.Callback, steps: int) -> L.Trainer:
        axes = {name: getattr(self, name) for name in ("replicate", "shard", "context", "tensor", "tensor_sequence")}
        return L.Trainer(
            strategy=FSDP2TPStrategy(timeout_seconds=120, **axes),
            plugins=[RingAttention(transport=self.transport, split_from=0)],  # every sequence is cut
            accelerator="cpu",
            devices=self.replicate * self.shard * self.context * self.tensor,
            max_steps=steps,
            limit_val_batches=0,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


EVERY_FAMILY = tuple(FAMILIES)
MESHES: dict[int, dict[str, tuple[Mesh, tuple[str, ...]]]] = {  # world size: name: mesh, and the families it runs
    2: {
        "shard": (Mesh(shard=2), EVERY_FAMILY),
        "ring": (Mesh(context=2), EVERY_FAMILY),
        "gather": (Mesh(context=2, transport="gather"), EVERY_FAMILY),
        "tensor": (Mesh(tensor=2), EVERY_FAMILY),
        "tensor_sequence": (Mesh(tensor=2, tensor_sequence=True), EVERY_FAMILY),
    },
    4: {
        "replicate_shard": (Mesh(replicate=2, shard=2), EVERY_FAMILY),
        "shard_tensor": (Mesh(shard=2, tensor=2), EVERY_FAMILY),
        "ring_tensor": (Mesh(context=2, tensor=2), EVERY_FAMILY),
        "shard_tensor_sequence": (Mesh(shard=2, tensor=2, tensor_sequence=True), ("gemma3",)),
        "gather_tensor_sequence": (Mesh(context=2, tensor=2, tensor_sequence=True, transport="gather"), ("gemma2",)),
        "replicate_tensor": (Mesh(replicate=2, tensor=2), ("qwen2",)),
        "shard_ring": (Mesh(shard=2, context=2), ("qwen3",)),
        "ring": (Mesh(context=4), ("gemma2",)),
        "tensor": (Mesh(tensor=4), ("qwen3", "olmo2")),  # with two key-value heads
    },
}
SCALAR_FAMILIES = ("qwen3", "gemma3")
# between them all ways in which tensor parallelism cuts a matrix: by outputs, gathered or not, by inputs, split or not,
# and one key-value head for several processes
ADAPTED_FAMILIES = ("llama", "phi3")

# ---------------------------------------------------------------- kinds of step

TEMPERATURE, ENTROPY, MAX_NORM = 0.7, 0.05, 0.1
STILL = OptimizerConfig(lr=0.0, schedule="constant")  # every step starts from the same weights
LENGTHS = [9, 4, 17, 6, 12, 5, 30, 8, 14, 21, 11, 7]  # two micro-batches of 31 on each of four processes


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer step."""

    loss: str  # "ppo", "sft" or "gspo"; "values", "rewards" or "pairs" of a scalar model
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
SCALAR_KINDS = {
    "values": Kind("values", max_tokens=31),
    "rewards": Kind("rewards", "sequence", max_tokens=31),
    "pairs": Kind("pairs", max_tokens=40),
}
MARGIN, CENTERING = 0.3, 0.2
ADAPTED_KINDS = {
    "adapters": Kind("ppo", max_tokens=31),
    "adapters_checkpointing": Kind("ppo", checkpointing="full"),
}
HEAD_SEED = 5


def new_head() -> torch.Tensor:
    """What a scalar head drawn with that seed has to be, on any mesh."""
    generator = torch.Generator().manual_seed(HEAD_SEED)
    return COMMON["initializer_range"] * torch.randn(1, COMMON["hidden_size"], generator=generator)


def batch() -> Sequences:
    """Random tokens, the last half of each sequence actions; an advantage for each sequence."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, COMMON["vocab_size"], (n,), generator=g).tolist() for n in LENGTHS]
    masks = [[False] * (n - n // 2) + [True] * (n // 2) for n in LENGTHS]
    seqs = Sequences.from_lists(ids, masks, temperature=TEMPERATURE)
    advantages = 1.5 + torch.randn(len(seqs), generator=g)[seqs.sequence_ids]  # so that the loss is not near 0
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
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def plain_scalar_step(model: Any, head: torch.Tensor, seqs: Sequences, kind: Kind) -> tuple[float, dict[str, Any]]:
    """Half the squared distance of values, or of the reward, to the advantages; the loss of a reward model on pairs."""
    total, num_actions = torch.zeros((), dtype=head.dtype), int(seqs.action_mask.sum())
    last = []
    for i in range(len(seqs)):
        one = seqs.select([i])
        mask = one.action_mask[1:]
        assert one.advantages is not None
        target = one.advantages[1:][mask].to(head.dtype)
        numbers = model.model(input_ids=one.input_ids[None], use_cache=False).last_hidden_state[0] @ head[0]
        if kind.loss == "values":
            total = total + 0.5 * (numbers[:-1][mask] - target).square().sum() / num_actions
        elif kind.loss == "rewards":
            total = total + 0.5 * (numbers[-1] - target[0]).square() / len(seqs)
        last.append(numbers[-1])
    if kind.loss == "pairs":
        chosen, rejected = torch.stack(last).view(-1, 2).unbind(1)
        loss = (1 + (rejected - chosen + MARGIN).exp()).log() + CENTERING * (chosen + rejected) ** 2
        total = loss.mean()
    names = [name for name, _ in model.model.named_parameters(prefix="model")]
    gradients = torch.autograd.grad(total, [*model.model.parameters(), head])
    return float(total.detach()), dict(zip([*names, "score.weight"], gradients, strict=True))


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
    computed: dict[Kind, Any] = {}
    steps = {}
    for name, kind in KINDS.items():
        same = Kind(kind.loss, kind.level)  # checkpointing and micro-batches are nothing to the reference
        computed[same] = steps[name] = computed.get(same) or plain_step(model, seqs, same)
    head = new_head().to(dtype)
    for name, kind in SCALAR_KINDS.items():
        steps[name] = plain_scalar_step(model, head.requires_grad_(), seqs, kind)
    if family in ADAPTED_FAMILIES:
        steps |= write_adapted_reference(model, seqs, directory)
    torch.save({"batch": vars(seqs), "steps": steps}, directory / "reference.pt")


def write_adapted_reference(model: Any, seqs: Sequences, directory: Path) -> dict[str, Any]:
    """An adapter with random weights beside the model, what its steps come to by peft, and the merged model."""
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", use_rslora=True, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        adapted = peft.get_peft_model(model, config)
        for p in adapted.parameters():
            if p.requires_grad:
                p.data.copy_((0.1 * torch.randn(p.shape)).to(p.dtype))  # numbers that float32 has as well
    adapted.save_pretrained(directory / "adapter")
    total, gradients = plain_step(adapted.train(), seqs, Kind("ppo"))
    gradients = {name.removeprefix("base_model.model."): x for name, x in gradients.items()}
    with torch.no_grad(), adapted.disable_adapter():
        frozen = torch.zeros(seqs.num_tokens, dtype=torch.float64)
        for start, end in zip(seqs.cu_seqlens[:-1], seqs.cu_seqlens[1:], strict=True):
            frozen[start + 1 : end] = plain_logps(adapted, seqs.input_ids[start:end])[0]
    merged = {name: x.float() for name, x in adapted.merge_and_unload().named_parameters()}
    torch.save({"merged": merged, "frozen": frozen * seqs.action_mask}, directory / "adapted.pt")
    return dict.fromkeys(ADAPTED_KINDS, (total, gradients))


# ---------------------------------------------------------------- ours


class Steps(L.LightningDataModule):
    """As many steps as there are kinds; the module knows the batch."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps

    def train_dataloader(self) -> Any:
        return self

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Any:
        return iter(range(self.num_steps))


class Parity(GRPO):
    """Takes a step of each kind in turn, and counts what a step ran."""

    kinds = KINDS

    def __init__(self, directory: Path, seqs: Sequences, **settings: Any) -> None:
        super().__init__(str(directory), optimizer=STILL, max_grad_norm=MAX_NORM, samples_per_prompt=1, **settings)
        self.seqs = seqs
        self.micro_batch_tokens: list[int] = []
        self.block_passes = 0

    def configure_model(self) -> None:
        super().configure_model()
        assert self.policy is not None
        decoder_blocks(self.policy.lm)[0].mlp.register_forward_pre_hook(self._count)  # type: ignore[operator]

    def _count(self, module: Any, args: Any) -> None:
        self.block_passes += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        kind = list(self.kinds.values())[batch_idx]
        assert self.policy is not None
        set_checkpointing(self.policy.lm, kind.checkpointing)
        self.max_tokens_per_device = -(-kind.max_tokens // self.strategy.context)
        self.policy_loss = GSPO() if kind.loss == "gspo" else PPOClip()
        self.entropy_coef = ENTROPY if kind.loss == "ppo" else 0.0
        self.micro_batch_tokens, self.block_passes = [], 0

        def loss(micro: Sequences) -> Any:
            self.micro_batch_tokens.append(micro.num_tokens)
            return self.step_loss(micro, kind)

        self.update(self.seqs, loss, level=kind.level)

    def step_loss(self, micro: Sequences, kind: Kind) -> Any:
        return (sft_loss(self.logps(micro)[0]), {}) if kind.loss == "sft" else self.loss(micro)

    def write_model_files(self, directory: Path) -> None:
        """The tiny models have no tokenizer."""


class ScalarParity(Parity):
    """The same of a scalar model."""

    kinds = SCALAR_KINDS
    paired = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.paired = list(self.kinds.values())[batch_idx].loss == "pairs"
        super().training_step(batch, batch_idx)

    def units(self, seqs: Sequences) -> list[list[int]] | None:
        return pair_units(seqs) if self.paired else None

    def build_policy(self, *, trainable: bool) -> Any:
        return self.strategy.build_scalar_model(self.local_model_path(), random_init=False, seed=HEAD_SEED)

    def step_loss(self, micro: Sequences, kind: Kind) -> Any:
        model: Any = self.policy
        if kind.loss == "pairs":
            chosen, rejected = split_pairs(model(micro, at="last"))
            return on_both_halves(reward_model_loss(chosen, rejected, margin=MARGIN, centering=CENTERING)), {}
        assert micro.advantages is not None
        if kind.loss == "values":
            return 0.5 * (model(micro, at="actions") - micro.advantages).square() * micro.action_mask, {}
        rewards = model(micro, at="last")[micro.sequence_ids]
        return 0.5 * (rewards - micro.advantages).square() * micro.action_mask, {}


class AdaptedParity(Parity):
    """The same with adapters, from a directory; with KL of coefficient 0, for its reference's sake."""

    kinds = ADAPTED_KINDS

    def __init__(self, directory: Path, seqs: Sequences) -> None:
        super().__init__(directory, seqs, lora=LoRAConfig(path=str(directory / "adapter")))

    def on_train_end(self) -> None:
        assert self.policy is not None
        expected = torch.load(Path(self.model_path) / "adapted.pt", weights_only=True)
        frozen, merged = expected["frozen"], dict(merged_weights(self.policy))
        names = set(merged) == set(expected["merged"])
        gaps = [float((x - expected["merged"][name]).abs().max()) for name, x in merged.items() if names]
        scored = self.score(self.build_reference(), self.seqs)
        self.adapted = {
            "frozen": float((scored - frozen).abs().max() / frozen.abs().max()),
            "merged_names": names,
            "merged": max(gaps, default=torch.inf),
            "not_as_drawn": self._not_as_drawn(),
        }

    def _not_as_drawn(self) -> list[str]:
        """Which weights of a new adapter, put together from all processes, are not those of one generator."""
        assert self.policy is not None
        assert self.policy.adapters is not None
        self.policy.adapters.start(seed=3, path=None)
        generator, odd = torch.Generator().manual_seed(3), []
        for name, p in gathered_weights(self.policy.adapters.trained()):
            expected = torch.zeros(p.shape)
            if name.endswith("lora_A.weight"):
                expected.uniform_(-(p.shape[1] ** -0.5), p.shape[1] ** -0.5, generator=generator)
            odd += [] if torch.equal(p, expected) else [name]
        return odd


def set_checkpointing(lm: Any, kind: str) -> None:
    """As the strategy does before it shards; transformers asks at every forward pass."""
    lm.gradient_checkpointing_disable()
    if kind != "none":
        settings: dict[str, Any] = {"use_reentrant": False}
        if kind == "selective":
            settings["context_fn"] = keep_attention
        lm.gradient_checkpointing_enable(settings)


class Compare(L.Callback):
    """How far loss, gradients and gradient norm of each step are off, relative to the reference's."""

    def __init__(self, steps: dict[str, Any], kinds: list[str]) -> None:
        self.steps, self.kinds = steps, kinds
        self.outcomes: dict[str, dict[str, Any]] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        kind = self.kinds[trainer.global_step]
        _, reference = self.steps[kind]
        clip = MAX_NORM / total_norm(reference)  # the gradients come after clipping
        assert clip < 1
        gaps = {}
        for name, p in pl_module.policy.lm.named_parameters():
            if not p.requires_grad:
                continue
            # every process looks at its own part: gathering each gradient would take most of the time
            ours, largest = own_part(reference[name], p), reference[name].abs().max()
            off = (p.grad.to_local() - clip * ours).abs() / (clip * largest)
            gaps[name] = off.max() if off.numel() else torch.zeros(())
        worst = torch.stack([x.float() for x in gaps.values()]).nan_to_num(nan=torch.inf)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        everything = set(gaps) == set(reference)
        name = list(gaps)[int(worst.argmax())]
        self.outcomes[kind] = {"gradient": float(worst.max()), "worst": name, "every_parameter": everything}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kind, metrics = self.kinds[batch_idx], trainer.callback_metrics
        loss, gradients = self.steps[kind]
        self.outcomes[kind] |= {
            "loss": abs(float(metrics["train/loss"]) - loss) / abs(loss),
            "norm": abs(float(metrics["train/grad_norm"]) / float(total_norm(gradients)) - 1),
            "micro_batch_tokens": pl_module.micro_batch_tokens,
            "block_passes": pl_module.block_passes,
        }


def total_norm(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.norm() for g in gradients.values()]).norm()


def check_weights(lm: Any, directory: Path) -> dict[str, Any]:
    """Which weights, put together from all processes, are not bit for bit those of the file, or of a random draw."""
    from transformers import AutoModelForCausalLM

    stored = load_file(directory / "model.safetensors")
    loaded = {name: x.clone() for name, x in full_weights(lm)}
    init_weights(lm, load_config(str(directory)), seed=3)
    drawn = {name: x.clone() for name, x in full_weights(lm)}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        random = dict(AutoModelForCausalLM.from_config(load_config(str(directory))).named_parameters())
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    return {
        "names": set(loaded) == set(stored) == set(random),
        "not_as_stored": [name for name, x in loaded.items() if not torch.equal(x, stored[name])],
        "not_as_drawn": [name for name, x in drawn.items() if not torch.equal(x, random[name])],
        "tied": head.weight is embedding.weight,
        # what this process holds of the matrices: one part in as many as share them
        "share": sum(p.to_local().numel() for p in lm.parameters()) / sum(p.numel() for p in lm.parameters()),
    }


class Save(L.Callback):
    """A checkpoint at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def not_as_saved(path: Path, directory: Path) -> list[str]:
    """Which weights of a checkpoint, read by one process alone, are not those that training never changed."""
    stored = load_file(directory / "model.safetensors")
    stored["score.weight"] = new_head()
    saved = load_full_weights(path, "policy.lm.")
    # tied weights are there under both their names
    expected = {name: stored.get(name, stored["model.embed_tokens.weight"]) for name in saved}
    odd = set(saved) - set(stored) - {"lm_head.weight"}
    return sorted(odd | {name for name, x in saved.items() if not torch.equal(x, expected[name])})


def adapter_not_as_saved(path: Path, directory: Path) -> list[str]:
    """Which weights of a checkpoint are not those of the adapter, which is all it is to hold."""
    stored, saved = load_file(directory / "adapter/adapter_model.safetensors"), load_full_weights(path, "policy.lm.")
    saved = {file_name(name): x for name, x in saved.items()}
    return sorted(set(saved) ^ set(stored) | {name for name, x in saved.items() if not torch.equal(x, stored[name])})


def run_family(mesh: Mesh, directory: Path) -> dict[str, Any]:
    """Outcomes of one family on one mesh."""
    reference = torch.load(directory / "reference.pt", weights_only=True)
    seqs, outcomes = Sequences(**reference["batch"]), {}
    for kind in (Parity, ScalarParity) if directory.name in SCALAR_FAMILIES else (Parity,):
        module = kind(directory, seqs)
        compare, saved = Compare(reference["steps"], list(module.kinds)), directory / f"{kind.__name__}.ckpt"
        callbacks = [compare, Save(saved)] if directory.name in SCALAR_FAMILIES else [compare]
        mesh.trainer(*callbacks, steps=len(module.kinds)).fit(module, datamodule=Steps(len(module.kinds)))
        outcomes |= compare.outcomes
        if directory.name in SCALAR_FAMILIES and torch.distributed.get_rank() == 0:
            outcomes[f"{kind.__name__}_not_as_saved"] = not_as_saved(saved, directory)
        if kind is Parity:
            assert module.policy is not None
            outcomes["weights"] = check_weights(module.policy.lm, directory)
    if directory.name in ADAPTED_FAMILIES:
        module, saved = AdaptedParity(directory, seqs), directory / "Adapted.ckpt"
        compare = Compare(reference["steps"], list(ADAPTED_KINDS))
        mesh.trainer(compare, Save(saved), steps=len(ADAPTED_KINDS)).fit(module, datamodule=Steps(len(ADAPTED_KINDS)))
        outcomes |= compare.outcomes | {"adapted": module.adapted}
        if torch.distributed.get_rank() == 0:
            outcomes["adapted"]["not_as_saved"] = adapter_not_as_saved(saved, directory)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mesh", action="append", help="only this one")
    parser.add_argument("--family", action="append", help="only this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {}
    for name, (mesh, families) in MESHES[int(os.environ["WORLD_SIZE"])].items():
        for family in families:
            if name in (args.mesh or [name]) and family in (args.family or [family]):
                results[f"{name}-{family}"] = run_family(mesh, args.models / family)
    if torch.distributed.get_rank() == 0:
        torch.save(results, args.out)


if __name__ == "__main__":
    main()
