"""Run under torchrun: one optimizer step per case, on as many processes as there are; rank 0 writes what came out.

Every case is a function of the same global batch; the tests compare the outcomes over world sizes and with a plain
computation of their own.
"""

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch

from rl2lightning import DPO, GRPO, KTO, PPO, RM, SFT
from rl2lightning.algorithms.optimizer import OptimizerConfig
from rl2lightning.estimators import GAE
from rl2lightning.models.build import full_weights
from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.policy_losses import KLPenalty
from rl2lightning.preference_losses import ORPO, KTOLoss, PreferenceLoss, Sigmoid
from rl2lightning.types import ChatBatch, PromptBatch, Sequences

LAUNCHED = torch.distributed.is_torchelastic_launched()  # by torchrun, as one of several processes


def batch(lengths: list[int], seed: int = 0) -> Sequences:
    """Random tokens; the last half of each sequence are actions, with rewards, in groups of two."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(6, 100, (n,), generator=g).tolist() for n in lengths]
    masks = [[False] * (n - n // 2) + [True] * (n // 2) for n in lengths]
    rewards = [[0.0] * (n - 1) + [float(torch.rand((), generator=g))] for n in lengths]
    logps = [(-torch.rand(n, generator=g)).tolist() for n in lengths]
    logps = [[x * m for x, m in zip(row, mask, strict=True)] for row, mask in zip(logps, masks, strict=True)]
    groups = [i // 2 for i in range(len(lengths))]
    return Sequences.from_lists(ids, masks, groups, rewards=rewards, rollout_logps=logps)


class Steps:
    """A sized loader of batches that are there already."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Share(L.LightningDataModule):
    """One global batch a step, of which each data rank gets a contiguous share, possibly empty."""

    def __init__(self, seqs: Sequences, kind: type, steps: int = 1) -> None:
        super().__init__()
        self.seqs, self.kind, self.steps = seqs, kind, steps

    def train_dataloader(self):
        rank, size = self.trainer.strategy.data_rank, self.trainer.strategy.data_size
        mine = torch.arange(len(self.seqs)).tensor_split(size)[rank]
        seqs = self.seqs.select(mine) if len(mine) else None
        if self.kind is ChatBatch:
            return Steps([ChatBatch(seqs, [])] * self.steps)
        positions = [i % self.trainer.lightning_module.updates_per_rollout for i in range(self.steps)]
        return Steps([PromptBatch([], [], step_of_rollout=p, rollout=None if p else seqs) for p in positions])

    def read_ahead(self, *, training: bool):
        return [self.train_dataloader()]


class Record(L.Callback):
    """Full gradients before the first optimizer step and full weights after the last."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 0:
            named = pl_module.primary.model.lm.named_parameters()
            self.gradients = {n: p.grad.full_tensor().clone() for n, p in named}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps = [*getattr(self, "steps", []), {n: float(x) for n, x in trainer.callback_metrics.items()}]

    def on_train_end(self, trainer, pl_module):
        self.weights = {n: w.clone() for n, w in full_weights(pl_module.primary.model.lm)}
        self.metrics = {n: x.clone() for n, x in trainer.callback_metrics.items()}


def fit(module, seqs: Sequences, kind: type, strategy: FSDP2TPStrategy | None = None, steps: int = 1) -> dict:
    record = Record()
    trainer = L.Trainer(
        strategy=strategy or FSDP2TPStrategy(timeout_seconds=120),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=steps,
        limit_val_batches=0,
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Share(seqs, kind, steps))
    return {
        "gradients": record.gradients,
        "weights": record.weights,
        "metrics": record.metrics,
        "steps": record.steps,
    }


LENGTHS = [9, 4, 17, 6, 12, 4, 30, 8]
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0)


def sft(
    model: str, max_tokens: int, level: str = "token", lengths: list[int] = LENGTHS, strategy=None, steps=1
) -> dict:
    module = SFT(model, optimizer=OPTIMIZER, max_tokens_per_device=max_tokens, max_grad_norm=None, loss_level=level)
    return fit(module, batch(list(lengths)), ChatBatch, strategy, steps)


def grpo(model: str, max_tokens: int, level: str, **settings) -> dict:
    module = GRPO(
        model,
        optimizer=OPTIMIZER,
        max_tokens_per_device=max_tokens,
        max_grad_norm=None,
        loss_level=level,
        loss_length=20,
        kl=KLPenalty(coef=0.1),
        samples_per_prompt=2,
        **settings,
    )
    return fit(module, batch(LENGTHS), PromptBatch)


# with a denominator that keeps Adam from making steps of the rounding of tiny gradients
SMOOTH = {"eps": 1.0, "schedule": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0}
POLICY_STEPS, CRITIC_STEPS = OptimizerConfig(lr=0.05, **SMOOTH), OptimizerConfig(lr=0.02, **SMOOTH)
REFERENCE_SEED, HEAD_SEED = 3, 5
PPO_SETTINGS = {"kl": KLPenalty(0.1, "k1", "reward"), "advantage": GAE(gamma=0.98, lam=0.9), "value_clip": 0.05}


class RecordedPPO(PPO):
    """Keeps the gradients of every step of both models; its reference is not what the policy started from."""

    def build_policy(self, *, trainable: bool):
        if trainable:
            return super().build_policy(trainable=True)
        path = self.local_model_path()
        return self.strategy.build_policy(path, random_init=True, seed=REFERENCE_SEED, trainable=False)

    def _step(self, trained, optimizer, scheduler, finite=None) -> None:
        name = next(n for n, t in self.trained.items() if t is trained)
        named = trained.model.lm.named_parameters()
        self.recorded[name].append({f"{name}.{n}": p.grad.full_tensor().clone() for n, p in named})
        super()._step(trained, optimizer, scheduler, finite)


def turns(lengths: list[int]) -> Sequences:
    """The batch above, with a token of an environment among the actions of the longer sequences."""
    seqs = batch(lengths)
    mask = seqs.action_mask.clone()
    for start, length in zip(seqs.cu_seqlens[:-1].tolist(), lengths, strict=True):
        if length >= 8:
            mask[start + length - length // 4 - 1] = False
    assert seqs.rollout_logps is not None
    return seqs.replace(action_mask=mask, rollout_logps=seqs.rollout_logps * mask)


def ppo(model: str, max_tokens: int, strategy: FSDP2TPStrategy | None = None) -> dict:
    """Two steps on one rollout: the second has ratios, old values and clips that say something."""
    module = RecordedPPO(
        model,
        optimizer=POLICY_STEPS,
        critic_optimizer=CRITIC_STEPS,
        max_tokens_per_device=max_tokens,
        max_grad_norm=None,
        epochs=2,
        init_seed=HEAD_SEED,
        **PPO_SETTINGS,
    )
    module.recorded = {"policy": [], "critic": []}
    outcome = fit(module, turns(LENGTHS), PromptBatch, strategy, steps=2)
    both = zip(*module.recorded.values(), strict=True)
    return outcome | {"gradients_of_steps": [policy | critic for policy, critic in both]}


class _OtherReference:
    """The reference of the preference cases: not what the policy started from, so that every term says something."""

    def build_reference(self):
        path = self.local_model_path()
        return self.strategy.build_policy(path, random_init=True, seed=REFERENCE_SEED, trainable=False)


class OtherDPO(_OtherReference, DPO): ...


class OtherKTO(_OtherReference, KTO): ...


def labelled(lengths: list[int]) -> Sequences:
    """The batch above, its groups of two being pairs."""
    seqs = batch(lengths)
    return seqs.replace(labels=torch.arange(len(seqs)) % 2 == 0, rewards=None, rollout_logps=None)


def preference(kind: type, model: str, max_tokens: int = 1000, strategy=None, steps=1, lengths=LENGTHS, **settings):
    module = kind(model, optimizer=OPTIMIZER, max_tokens_per_device=max_tokens, max_grad_norm=None, **settings)
    return fit(module, labelled(list(lengths)), ChatBatch, strategy, steps)


RPO = Sigmoid(beta=0.3, label_smoothing=0.1, nll_coef=0.5)


def dpo(model: str, max_tokens: int, loss: PreferenceLoss = RPO, **settings) -> dict:
    return preference(OtherDPO, model, max_tokens, preference_loss=loss, **{"reference": "live", **settings})


def dpo_precomputed(model: str) -> dict:
    """Twice from one directory: the second run, which may not build a reference, finds what the first has scored."""

    class WithoutReference(DPO):
        def build_reference(self):
            raise AssertionError("everything was scored in the run before")

    with TemporaryDirectory() as cache:  # one for each process, of which the first uses its own
        settings = {"preference_loss": RPO, "reference": "precomputed", "reference_cache": cache}
        first = preference(OtherDPO, model, 40, **settings)
        files = {str(path): path.stat().st_mtime_ns for path in Path(cache).rglob("*") if path.is_file()}
        second = preference(WithoutReference, model, 40, **settings)
        assert files == {str(path): path.stat().st_mtime_ns for path in Path(cache).rglob("*") if path.is_file()}
    return first | {"second_loss": second["metrics"]["train/loss"], "num_files": len(files)}


def pairs(lengths: list[int]) -> Sequences:
    """The batch above as pairs, every other with a margin."""
    seqs = batch(lengths)
    margins = torch.tensor([0.4 if i % 4 < 2 else float("nan") for i in range(len(lengths))])
    labels = torch.arange(len(lengths)) % 2 == 0
    return seqs.replace(labels=labels, margins=margins, rewards=None, rollout_logps=None)


def rm(model: str, max_tokens: int, lengths: list[int] = LENGTHS, strategy=None, steps=1) -> dict:
    module = RM(
        model,
        optimizer=OptimizerConfig(lr=0.01, **SMOOTH),
        max_tokens_per_device=max_tokens,
        max_grad_norm=None,
        init_seed=HEAD_SEED,
        margin=0.1,
        centering=0.2,
    )
    return fit(module, pairs(lengths), ChatBatch, strategy, steps)


CASES = {
    "sft": lambda model: sft(model, 1000),
    "sft_small_micro_batches": lambda model: sft(model, 32),
    "sft_sequence": lambda model: sft(model, 40, "sequence"),
    "sft_fewer_sequences_than_ranks": lambda model: sft(model, 1000, lengths=[11]),
    "sft_three_steps": lambda model: sft(model, 64, steps=3),
    "grpo_token": lambda model: grpo(model, 32, "token"),
    "grpo_sequence": lambda model: grpo(model, 64, "sequence"),
    "grpo_constant": lambda model: grpo(model, 1000, "constant"),
    "dpo": lambda model: dpo(model, 1000),
    "dpo_small_micro_batches": lambda model: dpo(model, 40),
    "dpo_fewer_pairs_than_ranks": lambda model: dpo(model, 1000, lengths=[9, 12]),
    "dpo_precomputed": dpo_precomputed,
    "orpo": lambda model: dpo(model, 40, ORPO(lam=0.5)),
    "kto": lambda model: preference(OtherKTO, model, 40, kto_loss=KTOLoss(beta=0.3, desirable_weight=1.5)),
    "ppo": lambda model: ppo(model, 32),
    "rm": lambda model: rm(model, 40, steps=2),
    "rm_fewer_pairs_than_ranks": lambda model: rm(model, 1000, [9, 14]),
}


def on_mesh(**axes) -> FSDP2TPStrategy:
    return FSDP2TPStrategy(timeout_seconds=120, **axes)


SEVERAL_PROCESSES = {
    "sft_replicated": lambda model: sft(model, 32, strategy=on_mesh(replicate=2)),
    "sft_reduced_each_micro_batch": lambda model: sft(model, 32, strategy=on_mesh(reduce_each_micro_batch=True)),
    "sft_three_steps_tensor": lambda model: sft(model, 64, strategy=on_mesh(tensor=2), steps=3),
    "sft_three_steps_tensor_sequence": lambda model: sft(
        model, 64, strategy=on_mesh(tensor=2, tensor_sequence=True), steps=3
    ),
    "sft_three_steps_context": lambda model: sft(model, 64, strategy=on_mesh(context=2), steps=3),
    "dpo_replicated": lambda model: dpo(model, 40, strategy=on_mesh(replicate=2)),
    "dpo_tensor": lambda model: dpo(model, 40, strategy=on_mesh(tensor=2)),
    "dpo_context": lambda model: dpo(model, 40, strategy=on_mesh(context=2)),
    "kto_context": lambda model: preference(
        OtherKTO, model, 40, on_mesh(context=2), kto_loss=KTOLoss(beta=0.3, desirable_weight=1.5)
    ),
    "ppo_replicated": lambda model: ppo(model, 32, on_mesh(replicate=2)),
    "ppo_tensor": lambda model: ppo(model, 32, on_mesh(tensor=2)),
    "ppo_context": lambda model: ppo(model, 32, on_mesh(context=2)),
    "rm_replicated": lambda model: rm(model, 40, strategy=on_mesh(replicate=2), steps=2),
    "rm_tensor": lambda model: rm(model, 40, strategy=on_mesh(tensor=2), steps=2),
    "rm_context": lambda model: rm(model, 40, strategy=on_mesh(context=2), steps=2),
}


def main(cases: dict[str, Callable[[str], Any]]) -> None:
    """Runs the cases on the model that the command line names; rank 0 writes what they return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = {name: case(args.model) for name, case in cases.items()}
    if not LAUNCHED or torch.distributed.get_rank() == 0:
        torch.save(results, args.out)


if __name__ == "__main__":
    main(CASES | (SEVERAL_PROCESSES if LAUNCHED else {}))
