"""Run under torchrun: three SFT steps under options of the strategy on meshes; rank 0 writes the weights after them."""

import argparse
import warnings
from pathlib import Path

import torch
from cases import on_mesh, sft

MESHES = {"tensor": {"tensor": 2}, "tensor_sequence": {"tensor": 2, "tensor_sequence": True}, "context": {"context": 2}}
OPTIONS = {"plain": {}, "cpu_offload": {"cpu_offload": True}, "compile": {"compile": True}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise the rest of the blocks is left uncompiled
    weights = {
        f"{mesh}/{option}": sft(args.model, 64, strategy=on_mesh(**axes, **settings), steps=3)["weights"]
        for mesh, axes in MESHES.items()
        for option, settings in OPTIONS.items()
    }
    if torch.distributed.get_rank() == 0:
        torch.save(weights, args.out)


if __name__ == "__main__":
    main()
