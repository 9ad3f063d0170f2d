"""What saves memory or time changes no number: a GRPO run under each option against the run without."""

from pathlib import Path

import pytest
import torch
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


# (before the first rollout, before the second) in sizes of the model: only then are there moments, two per parameter
@pytest.mark.parametrize(("offload", "sizes"), [("none", (0, 0)), ("optimizer", (0, 2)), ("all", (1, 3))])
def test_offload_moves_what_it_names_while_the_engine_generates(
    offload: str, sizes: tuple[int, int], tiny_model: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert moved == [n * size for n in sizes]


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
