"""From a checkpoint to a model directory that `from_pretrained` loads; needs no trainer or GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(
    ckpt_path: str,
    output_dir: str,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    submodule: str | None = None,
) -> Path:
    """Writes a model of a checkpoint (only of one you trust) as a Hugging Face model directory.

    Args:
        ckpt_path: a *.ckpt directory of a run.
        output_dir: the directory to make; it must not hold a model yet.
        dtype: type of the stored weights.
        submodule: which model of the module to export, for instance PPO's critic; None: the policy, or the only one
            there is. One with a scalar head becomes a model for sequence classification, a regression of one label.
    """
    import torch
    from transformers import AutoTokenizer

    from rl2lightning.models.build import copy_generation_config, load_config, save_pretrained
    from rl2lightning.models.heads import SCALAR_HEAD
    from rl2lightning.models.serving import set_padding
    from rl2lightning.parallel.checkpoint import load_full_weights, locate, model_names

    checkpoint = locate(Path(ckpt_path))
    output = Path(output_dir)
    if (output / "config.json").exists():
        raise ValueError(f"'{output}' holds a model already; set --output_dir to a new directory")
    if submodule is None:
        names = model_names(checkpoint)
        submodule = names[0] if len(names) == 1 else "policy"
    state = load_full_weights(checkpoint, f"{submodule}.lm.")
    own = checkpoint / "model" / submodule  # where it is of another architecture than the first of the module
    config = load_config(str(own if own.is_dir() else checkpoint / "model"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "model")
    if SCALAR_HEAD in state and not set_padding(config, tokenizer):
        print("no special token is left to pad with: transformers will score one sequence at a time and refuse batches")
    stored = getattr(torch, dtype)
    save_pretrained(config, {name: x.to(stored) for name, x in state.items()}, str(output), tokenizer=tokenizer)
    if SCALAR_HEAD not in state:
        copy_generation_config(checkpoint / "model", output)
    return output
