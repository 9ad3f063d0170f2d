"""From a checkpoint to a model directory that `from_pretrained` loads; needs no trainer or GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def export(
    ckpt_path: str,
    output_dir: str,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    submodule: str | None = None,
    adapter: bool = False,
    base: str | None = None,
) -> Path:
    """Writes a model of a checkpoint (only of one you trust) as a Hugging Face model directory.

    Args:
        ckpt_path: a *.ckpt directory of a run.
        output_dir: the directory to make; it must not hold a model yet.
        dtype: type of the stored weights. A scalar head is stored in float32, as it was trained; RewardModel and vLLM
            compute it so, transformers rounds it and its scores to the type that it is asked to load the model in.
        submodule: which model of the module to export, for instance PPO's critic; None: the policy, or the only one
            there is. One with a scalar head becomes a model for sequence classification, a regression of one label.
        adapter: of a model trained with LoRA, write its adapter alone, for `PeftModel.from_pretrained`; otherwise it is
            merged into its base model.
        base: the model that an adapter is merged into, where it is no longer where training found it.
    """
    import torch
    from lightning.pytorch.utilities import rank_zero_warn
    from transformers import AutoTokenizer

    from rl2lightning.models.build import copy_generation_config, load_config, save_pretrained
    from rl2lightning.models.heads import SCALAR_HEAD
    from rl2lightning.models.lora_files import CONFIG_FILE, file_name, read_base, read_config, write_adapter
    from rl2lightning.models.serving import set_padding
    from rl2lightning.parallel.checkpoint import load_full_weights, locate, model_names

    checkpoint = locate(Path(ckpt_path))
    output = Path(output_dir)
    if any((output / name).exists() for name in ("config.json", CONFIG_FILE)):
        raise ValueError(f"'{output}' holds a model already; set --output_dir to a new directory")
    names = model_names(checkpoint)
    if submodule is None:
        submodule = names[0] if len(names) == 1 else "policy"
    if submodule not in names:
        held = " or ".join(names) or "a model"
        raise ValueError(f"checkpoint '{checkpoint}' holds no '{submodule}': set --submodule to what it holds, {held}")
    state = load_full_weights(checkpoint, f"{submodule}.lm.")
    own = checkpoint / "model" / submodule  # where it is of another architecture than the first of the module
    config = load_config(str(own if own.is_dir() else checkpoint / "model"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "model")
    stored, heads = getattr(torch, dtype), (SCALAR_HEAD, file_name(SCALAR_HEAD))

    def typed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(torch.float32 if name in heads else stored) for name, x in weights.items()}

    of_adapter = checkpoint / "model" / "adapters" / submodule
    if of_adapter.is_dir():
        weights, lora = {file_name(name): x for name, x in state.items()}, read_config(of_adapter)
        if adapter:
            write_adapter(typed(weights), lora, output)
            tokenizer.save_pretrained(output)
            return output
        # of the adapter as it was trained, rounded once
        state = _merged(weights, lora, base, stored, trained_on=read_base(of_adapter))
    elif adapter:
        raise ValueError(f"'{checkpoint}' was trained without LoRA: leave --adapter out")
    state = typed(state)
    if SCALAR_HEAD in state and not set_padding(config, tokenizer):
        rank_zero_warn(
            "no special token is left to pad with: transformers will score one sequence at a time and refuse batches"
        )
    save_pretrained(config, state, str(output), tokenizer=tokenizer)
    if SCALAR_HEAD not in state:
        copy_generation_config(checkpoint / "model", output)
    return output


def _merged(
    adapter: dict[str, Tensor], lora: dict[str, Any], base: str | None, dtype: torch.dtype, *, trained_on: str | None
) -> dict[str, Tensor]:
    """Weights of the model that an adapter was trained on, with it."""
    from rl2lightning.models.build import read_weights, resolve_model
    from rl2lightning.models.heads import SCALAR_HEAD
    from rl2lightning.models.lora_files import fingerprint, merge_files

    path = base or lora["base_model_name_or_path"]
    try:
        directory = resolve_model(path)
    except ValueError as error:
        raise ValueError(
            f"the model that the adapter was trained on is not to be had ({error}): set --base to where it is now, or "
            "--adapter to do without"
        ) from error
    if trained_on not in (None, fingerprint(directory)):
        raise ValueError(
            f"'{path}' holds other weights than those that the adapter was trained on: set --base to where these are, "
            "or --adapter to do without"
        )
    merged = merge_files({name: x.to(dtype) for name, x in read_weights(directory)}, adapter, lora)
    if SCALAR_HEAD in merged:
        merged.pop("lm_head.weight", None)  # of a causal LM, in whose place the head is
    return merged
