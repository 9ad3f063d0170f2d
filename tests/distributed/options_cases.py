"""Run under torchrun: three SFT steps under options of the strategy on meshes; rank 0 writes the weights after them."""

from functools import partial

import torch
from cases import main, on_mesh, sft

MESHES = {"tensor": {"tensor": 2}, "tensor_sequence": {"tensor": 2, "tensor_sequence": True}, "context": {"context": 2}}
OPTIONS = {"plain": {}, "cpu_offload": {"cpu_offload": True}, "compile": {"compile": True}}


def weights(model: str, *, settings: dict) -> dict[str, torch.Tensor]:
    return sft(model, 64, strategy=on_mesh(**settings), steps=3)["weights"]


if __name__ == "__main__":
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise the rest of the blocks is left uncompiled
    main(
        {
            f"{mesh}/{option}": partial(weights, settings={**axes, **settings})
            for mesh, axes in MESHES.items()
            for option, settings in OPTIONS.items()
        }
    )
