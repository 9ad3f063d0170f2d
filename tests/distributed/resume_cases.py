"""Run under torchrun: runs with checkpoints, and runs that go on from those; one record per process.

`whole`: uninterrupted runs on this number of processes. `resumed`: from checkpoints of the directories given, in new
processes and from another seed. Every process writes what it saw to `<case>.rank<r>.json`, rank 0 the last weights to
`<case>.pt`.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rl2lightning import (
    DPO,
    GRPO,
    KTO,
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
    RolloutEngine,
    SamplingParams,
    UnpairedDataModule,
)
from rl2lightning.models.lora import merged_weights
from rl2lightning.parallel import checkpoint as ckpt
from rl2lightning.policy_losses import KLPenalty
from rl2lightning.types import Completion

STEPS = 8
OPTIMIZER = OptimizerConfig(lr=3e-3, schedule="cosine", warmup_ratio=0.3)


class RecordedEngine(RolloutEngine):
    """Returns a completion that depends on prompt and seed alone, as if it had been recorded: weights change nothing.

    So a run on another mesh, whose weights differ in their last bits, learns from the same samples.
    """

    def start(self, spec) -> None:
        self._done: list[Completion] = []

    @property
    def unfinished(self) -> int:
        return len(self._done)

    def submit(self, request_id, prompt_ids, sampling, *, seed, begun=0) -> None:
        digest = hashlib.sha256(repr((list(prompt_ids), seed)).encode()).digest()
        ids = [6 + byte % 90 for byte in digest[: 2 + digest[-1] % 4]]
        logps = [-1.0 - byte / 256 for byte in digest[8 : 8 + len(ids)]]
        self._done.append(Completion(request_id, list(prompt_ids), ids, logps, "length", self.version or 0))

    def step(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        return self.step()

    def update_weights(self, weights, version: int) -> None:
        for _ in weights:
            pass  # gathering them takes every process
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


class Record(L.Callback):
    """What every step logged, saw and drew; what every validation said; a digest of the last weights."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.validations: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        names = ["train/loss", "train/grad_norm", "train/kl", "train/skipped_steps"]
        names += ["train/critic_loss", "train/critic_grad_norm"]
        self.steps.append(
            {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
            | {
                "epoch": trainer.current_epoch,
                "batch_idx": batch_idx,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "rows": [row["messages"] for row in batch.rows],
                "completions": [t.token_ids for t in batch.trajectories],
                "drawn": self.drawn,
            }
        )

    def on_validation_end(self, trainer, pl_module) -> None:
        values = {
            n: float(x) for n, x in trainer.callback_metrics.items() if n.startswith("val/") and "second" not in n
        }
        self.validations.append((trainer.global_step, values))

    def on_train_end(self, trainer, pl_module) -> None:
        trained = {name: trained.model for name, trained in pl_module.trained.items()}  # PPO's critic as well
        self.weights = {f"{m}.{name}": x.clone() for m, model in trained.items() for name, x in merged_weights(model)}


def sft(model: str, task: str, *, num_workers: int = 0, lora: LoRAConfig | None = None):
    data = ChatDataModule(f"conversations@{task}", batch_size=16, max_length=32, num_workers=num_workers)
    return SFT(model, optimizer=OPTIMIZER, max_tokens_per_device=60, lora=lora), data, []


def rm(model: str, task: str):
    data = PreferenceDataModule(f"pairs@{task}", batch_size=16, max_length=32)
    return RM(model, optimizer=OPTIMIZER, max_tokens_per_device=120), data, []


def dpo(model: str, task: str, *, reference: Literal["precomputed", "live"]):
    data = PreferenceDataModule(f"pairs@{task}", batch_size=16, max_length=32)
    return DPO(model, optimizer=OPTIMIZER, reference=reference, max_tokens_per_device=120), data, []


def kto(model: str, task: str):
    data = UnpairedDataModule(f"labelled@{task}", batch_size=16, max_length=32)
    return KTO(model, optimizer=OPTIMIZER, max_tokens_per_device=60), data, []


def grpo(model: str, task: str, *, engine: RolloutEngine | None = None):
    module = GRPO(
        model,
        optimizer=OPTIMIZER,
        sampling=SamplingParams(max_tokens=5),
        samples_per_prompt=2,
        updates_per_rollout=2,
        kl=KLPenalty(0.1),
        max_tokens_per_device=100,
    )
    # 57 prompts, so two rollouts or four steps an epoch
    data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=24, val_ratio=0.1)
    # what was recorded is by no policy of this run, and a check of its log-probs would rightly refuse it
    unchecked = {} if engine is None else {"check_logps": "never"}
    return module, data, [RolloutCallback(engine=engine, environment=task, **unchecked)]


def ppo(model: str, task: str, *, engine: RolloutEngine | None = None):
    module = PPO(
        model,
        optimizer=OPTIMIZER,
        critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear"),
        sampling=SamplingParams(max_tokens=5),
        epochs=2,
        mini_batches=2,
        kl=KLPenalty(0.1),
        target_kl=0.5,
        max_tokens_per_device=100,
    )
    data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=48, val_ratio=0.1)  # one rollout an epoch
    unchecked = {} if engine is None else {"check_logps": "never"}
    return module, data, [RolloutCallback(engine=engine, environment=task, **unchecked)]


CASES = {
    "sft": (sft, {}),
    "sft_in_background": (partial(sft, num_workers=2), {"async_checkpoints": True}),
    "sft_adapters": (partial(sft, lora=LoRAConfig(rank=4)), {}),
    "rm": (rm, {}),
    "dpo_precomputed": (partial(dpo, reference="precomputed"), {}),
    "dpo_live_tensor": (partial(dpo, reference="live"), {"tensor": 2}),
    "kto": (kto, {}),
    "kto_context": (kto, {"context": 2}),
    "grpo": (grpo, {}),
    "grpo_in_background": (grpo, {"async_checkpoints": True}),
    "ppo": (ppo, {}),
    "ppo_recorded": (lambda model, task: ppo(model, task, engine=RecordedEngine()), {}),
    "grpo_recorded": (lambda model, task: grpo(model, task, engine=RecordedEngine()), {}),
}


def fit(
    case: str,
    args: argparse.Namespace,
    out: Path,
    *,
    ckpt_path: Path | None = None,
    mesh: dict | None = None,
    save_every: int = 1,
):
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)  # a resumed run does not live off its seed
    make, settings = CASES[case]
    module, data, callbacks = make(args.model, args.task)
    record = Record()
    root = args.out / f"{case}-checkpoints"
    save = ModelCheckpoint(root, filename="{step}", every_n_train_steps=save_every, save_top_k=-1)
    saves = [] if ckpt_path else [save]
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(**(settings | (mesh or {})), timeout_seconds=120),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[record, *callbacks, *saves],
        enable_checkpointing=bool(saves),
        default_root_dir=args.out,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=STEPS,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    content = {"steps": record.steps, "validations": record.validations, "weights": digest(record.weights)}
    out.with_name(f"{out.name}.rank{trainer.global_rank}.json").write_text(json.dumps(content))
    if trainer.is_global_zero:
        torch.save(record.weights, out.with_name(f"{out.name}.pt"))
    return trainer, module


def digest(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in weights.items()}


def fail_on_one_process(args: argparse.Namespace) -> None:
    """Saves, then saves again while the last process may write no large files; what came of it, from every process."""
    for background in (False, True):
        name = f"disk_full{'_in_background' if background else ''}"
        root = args.out / name
        trainer, _ = fit("sft", args, args.out / name, mesh={"async_checkpoints": background}, ckpt_path=args.start)
        trainer.save_checkpoint(root / "old.ckpt")
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.global_rank == trainer.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
        told = []
        for path in (root / "new.ckpt", root / "old.ckpt"):
            try:
                trainer.save_checkpoint(path)
            except ckpt.CheckpointError as error:
                told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        (root / f"told.rank{trainer.global_rank}.json").write_text(json.dumps(told))
        if trainer.is_global_zero:
            (root / "left.json").write_text(json.dumps(sorted(p.name for p in root.glob("*.ckpt*"))))
        trainer.save_checkpoint(root / "new.ckpt")  # there is room again


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "jobs", help="JSON: [name, case, checkpoint or null, mesh, steps between saves], or ['disk_full', checkpoint]"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    for job in json.loads(args.jobs):
        if job[0] == "disk_full":
            args.start = Path(job[1])
            fail_on_one_process(args)
            continue
        name, case, start, mesh, every = job
        fit(case, args, args.out / name, ckpt_path=Path(start) if start else None, mesh=mesh, save_every=every)


if __name__ == "__main__":
    main()
