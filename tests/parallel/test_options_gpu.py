"""On a GPU: whatever option decides where parameters are, a fit with validation ends with the same weights."""

from pathlib import Path

import pytest
import torch
from quiet import quiet_trainer

from rl2lightning import SFT, ChatDataModule, FSDP2TPStrategy, OptimizerConfig

pytestmark = pytest.mark.gpu


def trained(model: str, task: str, directory: Path, **options) -> dict[str, torch.Tensor]:
    module = SFT(model, optimizer=OptimizerConfig(lr=1e-3, schedule="constant", warmup_ratio=0.0))
    settings = {"accelerator": "gpu", "devices": 1, "max_steps": 3, "val_check_interval": 1}
    trainer = quiet_trainer(directory, strategy=FSDP2TPStrategy(**options), **settings)
    trainer.fit(module, datamodule=ChatDataModule(f"conversations@{task}", batch_size=8, val_ratio=0.2, seed=0))
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    assert module.device.type == "cuda"
    return {name: x.cpu() for name, x in module.policy_weights()}


def test_options_change_no_weight(tiny_model: str, task: str, tmp_path: Path) -> None:
    plain = trained(tiny_model, task, tmp_path)
    for options in (
        {"cpu_offload": True},
        {"offload": "optimizer"},
        {"offload": "all"},
        {"activation_checkpointing": "selective"},
    ):
        for name, x in trained(tiny_model, task, tmp_path, **options).items():
            torch.testing.assert_close(x, plain[name], rtol=1e-4, atol=1e-5, msg=f"{options}: {name}")
