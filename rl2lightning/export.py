"""From a checkpoint to a model directory that `AutoModelForCausalLM.from_pretrained` loads; needs no trainer or GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(
    ckpt_path: str, output_dir: str, dtype: Literal["bfloat16", "float32"] = "bfloat16", submodule: str = "policy"
) -> Path:
    """Writes the policy of a checkpoint (only of one you trust) as a Hugging Face model directory.

    Args:
        ckpt_path: a *.ckpt directory of a run.
        output_dir: the directory to make; it must not hold a model yet.
        dtype: type of the stored weights.
        submodule: which model of the module to export, for instance PPO's critic; one with a scalar head becomes a
            model for sequence classification.
    """
    import torch
    from transformers import AutoTokenizer

    from rl2lightning.models.build import copy_generation_config, load_config, save_pretrained
    from rl2lightning.parallel.checkpoint import load_full_weights, locate

    checkpoint = locate(Path(ckpt_path))
    output = Path(output_dir)
    if (output / "config.json").exists():
        raise ValueError(f"'{output}' holds a model already; set --output_dir to a new directory")
    state = load_full_weights(checkpoint, f"{submodule}.lm.")
    own = checkpoint / "model" / submodule  # where it is of another architecture than the first of the module
    config = load_config(str(own if own.is_dir() else checkpoint / "model"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "model")
    stored = getattr(torch, dtype)
    save_pretrained(config, {name: x.to(stored) for name, x in state.items()}, str(output), tokenizer=tokenizer)
    copy_generation_config(checkpoint / "model", output)
    return output
