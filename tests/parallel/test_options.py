"""What saves memory or time changes no number: a GRPO run under each option against the run without."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import quiet_trainer

from rl2lightning import GRPO, SFT, ChatDataModule, FSDP2TPStrategy, OptimizerConfig, PromptDataModule, RolloutCallback
from rl2lightning.parallel import strategy as strategy_module
from rl2lightning.types import SamplingParams


def weights_after_training(model: str, task: str, directory: Path, **options) -> dict[str, torch.Tensor]:
    """Three steps on two rollouts, the second generated with weights that were trained; full weights afterwards."""
    module = GRPO(
        model,
        optimizer=OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0),
        sampling=SamplingParams(max_tokens=4),
        samples_per_prompt=4,
        updates_per_rollout=2,
        init_seed=0,
    )
    rollouts, strategy = RolloutCallback(environment=task, seed=0), FSDP2TPStrategy(**options)
    trainer = quiet_trainer(directory, rollouts, strategy=strategy, max_steps=3, limit_val_batches=0)
    trainer.fit(module, datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, seed=0))
    assert trainer.global_step == 3
    return {name: x.clone() for name, x in module.policy_weights()}


@pytest.fixture(scope="module")
def plain(tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_after_training(tiny_model, task, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "optimizer"},
        {"offload": "all"},
        {"cpu_offload": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ],
)
def test_memory_options_change_no_bit(options: dict, plain: dict, tiny_model: str, task: str, tmp_path: Path) -> None:
    ours = weights_after_training(tiny_model, task, tmp_path, **options)
    assert {name for name, x in ours.items() if not torch.equal(x, plain[name])} == set()


def test_compiled_blocks_agree_to_rounding(plain: dict, tiny_model: str, task: str, tmp_path: Path) -> None:
    ours = weights_after_training(tiny_model, task, tmp_path, compile=True)
    for name, x in ours.items():
        torch.testing.assert_close(x, plain[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("offload", "rollouts"), [("none", []), ("optimizer", []), ("all", [1, 1])])
def test_parameters_leave_while_the_engine_generates_if_asked(
    offload: str, rollouts: list[int], tiny_model: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    original = strategy_module.in_host_memory

    def watched(tensors):
        tensors = list(tensors)
        moved.append(sum(x.numel() for x in tensors))
        return original(tensors)

    monkeypatch.setattr(strategy_module, "in_host_memory", watched)
    weights = weights_after_training(tiny_model, task, tmp_path, offload=offload)
    size = sum(x.numel() for x in weights.values())
    assert moved == [n * size for n in rollouts]


class Moments(SFT):
    """Notes at each micro-batch the bytes of moments on the device, in sizes of the model."""

    def loss(self, seqs):
        assert self.policy is not None
        held = [x for state in self.optimizers().state.values() for x in state.values() if x.ndim]
        size = sum(p.untyped_storage().nbytes() for p in self.policy.parameters())
        self.held.append(sum(x._local_tensor.untyped_storage().nbytes() for x in held) / size)
        return super().loss(seqs)


@pytest.mark.parametrize(("offload", "size"), [("none", 2), ("optimizer", 0), ("all", 0)])
def test_moments_are_elsewhere_in_forward_and_backward_if_asked_also_after_a_checkpoint(
    offload: str, size: int, tiny_model: str, task: str, tmp_path: Path
) -> None:
    def run(directory: str, *, steps: int, offload: str, ckpt_path: str | None = None) -> Moments:
        constant = OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0)
        module = Moments(tiny_model, init_seed=0, max_tokens_per_device=64, optimizer=constant)
        module.held = []
        every_step = ModelCheckpoint(tmp_path / directory, save_top_k=0, save_last=True, every_n_train_steps=1)
        trainer = quiet_trainer(
            tmp_path / directory,
            every_step,
            strategy=FSDP2TPStrategy(offload=offload),
            limit_val_batches=0,
            max_steps=steps,
            enable_checkpointing=True,
        )
        data = ChatDataModule(f"conversations@{task}", batch_size=4)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    module = run("interrupted", steps=2, offload=offload)
    assert module.held[0] == 0
    assert module.held[-1] == size
    resumed = run("interrupted", steps=3, offload=offload, ckpt_path="last")
    assert set(resumed.held) == {size}
    plain = run("plain", steps=3, offload="none")
    weights = dict(plain.policy_weights())
    assert {name for name, x in resumed.policy_weights() if not torch.equal(x, weights[name])} == set()


class Watched(SFT):
    """Notes at each micro-batch whether there are gradients of the shards already."""

    def loss(self, seqs):
        assert self.policy is not None
        self.held.append(all(p.grad is not None for p in self.policy.parameters()))
        return super().loss(seqs)


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_sharded_after_each_micro_batch_if_asked(
    each: bool, tiny_model: str, task: str, tmp_path: Path
) -> None:
    module = Watched(tiny_model, max_tokens_per_device=20)
    module.held = []
    trainer = quiet_trainer(tmp_path, strategy=FSDP2TPStrategy(reduce_each_micro_batch=each), limit_val_batches=0)
    trainer.fit(module, datamodule=ChatDataModule(f"conversations@{task}", batch_size=8))
    assert len(module.held) > 2
    assert module.held == [False, *[each] * (len(module.held) - 1)]
