"""A Trainer for tests."""

from pathlib import Path
from typing import Any

import lightning as L

from rl2lightning import FSDP2TPStrategy


def quiet_trainer(root: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    """One step on the CPU that prints, logs and saves nothing, unless `settings` say otherwise."""
    defaults = {
        "strategy": FSDP2TPStrategy(),
        "accelerator": "cpu",
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return L.Trainer(callbacks=list(callbacks), default_root_dir=root, **(defaults | settings))
