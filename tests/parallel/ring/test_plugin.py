"""What the plugin puts in place, refuses and restores, on one process."""

import subprocess
import sys

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.plugins import TorchSyncBatchNorm
from transformers import BambaConfig, LlamaConfig, Qwen3Config, Qwen3NextConfig, RecurrentGemmaForCausalLM

from rl2lightning import SFT, FSDP2TPStrategy, RingAttention, Sequences
from rl2lightning.models.packed import Bucketed, WholeSequences, pack
from rl2lightning.parallel.ring.plugin import refuse_what_cannot_be_spread, warn_of_embeddings_that_look_at_others
from rl2lightning.types import ChatBatch

CPU = torch.device("cpu")
SEQUENCES = Sequences.from_lists([[1, 2, 3], [4, 5]], [[False, True, True], [False, True]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "model type 'llama' has rotary embeddings of type .*dynamic.*strategy.context to 1",
        ),
        (Qwen3NextConfig(), "model type 'qwen3_next' has layers of the kind .*linear_attention"),
        (BambaConfig(), "model type 'bamba' has layers of the kind"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout=0.1"),
    ],
)
def test_models_that_cannot_be_spread_are_refused(config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_what_cannot_be_spread(config, recurrent=False)


def test_plain_and_windowed_models_are_not_refused() -> None:
    refuse_what_cannot_be_spread(LlamaConfig(), recurrent=False)
    windowed = Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    refuse_what_cannot_be_spread(windowed, recurrent=False)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    refuse_what_cannot_be_spread(LlamaConfig(rope_parameters=yarn), recurrent=False)


def test_a_recurrent_model_is_refused_whatever_its_layers_are_called() -> None:
    assert RecurrentGemmaForCausalLM._is_stateful  # how transformers marks them
    with pytest.raises(ValueError, match="model type 'llama' is recurrent"):
        refuse_what_cannot_be_spread(LlamaConfig(), recurrent=True)


def test_embeddings_that_look_at_the_longest_sequence_are_announced() -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    longrope |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    with pytest.warns(UserWarning, match="'llama' has rotary embeddings of type .*longrope.* longer than 4096"):
        warn_of_embeddings_that_look_at_others(LlamaConfig(rope_parameters=longrope))
    warn_of_embeddings_that_look_at_others(LlamaConfig())  # a warning is an error here


@pytest.mark.parametrize("settings", [{"split_from": -1}, {"gather_heads": 0}])
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RingAttention(**settings)


class OneBatch:
    """A sized loader."""

    def __len__(self) -> int:
        return 1

    def __iter__(self):
        return iter([ChatBatch(SEQUENCES, [])])


class Look(L.Callback):
    """What the model packs with while the trainer runs."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.layout = pl_module.policy.pack(SEQUENCES, CPU, torch.float32).layout


def fit(model: str, *, plugins: list, strategy: FSDP2TPStrategy) -> tuple[SFT, Look]:
    module, look = SFT(model), Look()
    trainer = L.Trainer(
        strategy=strategy,
        plugins=plugins,
        callbacks=[look],
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_dataloaders=OneBatch())
    return module, look


def test_the_strategy_applies_the_plugin_of_the_trainer_and_reverts_it(tiny_model: str) -> None:
    module, look = fit(tiny_model, plugins=[RingAttention(backend="math")], strategy=FSDP2TPStrategy())
    assert isinstance(look.layout.attention, WholeSequences)
    assert look.layout.attention.backend == "math"
    assert module.policy.pack is pack


def test_without_a_plugin_there_is_one_of_defaults(tiny_model: str) -> None:
    _, look = fit(tiny_model, plugins=[], strategy=FSDP2TPStrategy())
    assert isinstance(look.layout.attention, Bucketed)  # the CPU's


def test_another_kind_of_layer_sync_is_refused(tiny_model: str) -> None:
    with pytest.raises(ValueError, match="no use for TorchSyncBatchNorm"):
        fit(tiny_model, plugins=[TorchSyncBatchNorm()], strategy=FSDP2TPStrategy())


@pytest.mark.parametrize(
    ("argument", "split_from"),
    [
        ("RingAttention", None),
        ('[{"class_path": "rl2lightning.RingAttention", "init_args": {"split_from": 7}}]', 7),
    ],
)
def test_the_command_line_takes_it(argument: str, split_from: int | None, tiny_model: str, task: str) -> None:
    """In a fresh process, where nothing has been imported but the command line."""
    arguments = ["--model", "SFT", "--model.model", tiny_model, "--data", "ChatDataModule"]
    arguments += [f"--data.path=conversations@{task}", "--trainer.plugins", argument, "--print_config"]
    command = [sys.executable, "-m", "rl2lightning", "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plugins = yaml.safe_load(done.stdout)["trainer"]["plugins"]
    plugin = plugins[0] if isinstance(plugins, list) else plugins
    assert plugin["class_path"].endswith("RingAttention")
    assert plugin["init_args"]["split_from"] == split_from
    assert plugin["init_args"]["transport"] == "auto"
