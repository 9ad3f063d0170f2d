"""Run under torchrun: the command line with every config of configs/parallel behind the quickstarts."""

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

from rl2lightning.cli import main as rl2lightning

ROLLOUTS = [
    {
        "class_path": "rl2lightning.RolloutCallback",
        "init_args": {"engine": "rl2lightning.HFEngine", "environment": "configs/quickstart/arithmetic.py"},
    }
]
SMALL = {
    "sft": ["--data.batch_size=8"],
    "grpo": ["--data.prompts_per_rollout=4", "--model.samples_per_prompt=4"],
    "rm": ["--data.batch_size=8"],
    "dpo": ["--data.batch_size=8"],
    "kto": ["--data.batch_size=16"],
    # without the critic's warm-up, while which the policy rests
    "ppo": ["--data.prompts_per_rollout=16", f"--trainer.callbacks={json.dumps(ROLLOUTS)}"],
}
EVERY = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--data.val_batch_size=32",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.val_check_interval=2",
    "--trainer.enable_progress_bar=false",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("cases", nargs="+", help="mesh/algorithm")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sys.argv = ["rl2lightning"]  # Lightning wonders about arguments given twice
    for case in args.cases:
        mesh, algorithm = case.split("/")
        configs = [f"--config=configs/quickstart/{algorithm}.yaml", f"--config=configs/parallel/{mesh}.yaml"]
        root = f"--trainer.default_root_dir={args.root / case}"
        rl2lightning(["fit", *configs, *SMALL[algorithm], *EVERY, root])


if __name__ == "__main__":
    main()
