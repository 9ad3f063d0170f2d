"""Run under torchrun: the command line with every config of configs/parallel behind both quickstarts."""

import argparse
import sys
import warnings
from pathlib import Path

import torch

from rl2lightning.cli import main as rl2lightning

SMALL = {
    "sft": ["--data.batch_size=8"],
    "grpo": ["--data.prompts_per_rollout=4", "--model.samples_per_prompt=4"],
}
EVERY = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.val_check_interval=2",
    "--trainer.enable_progress_bar=false",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("meshes", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sys.argv = ["rl2lightning"]  # Lightning wonders about arguments given twice
    for mesh in args.meshes:
        for algorithm, settings in SMALL.items():
            configs = [f"--config=configs/quickstart/{algorithm}.yaml", f"--config=configs/parallel/{mesh}.yaml"]
            root = f"--trainer.default_root_dir={args.root / mesh / algorithm}"
            rl2lightning(["fit", *configs, *settings, *EVERY, root])


if __name__ == "__main__":
    main()
