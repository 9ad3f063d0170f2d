"""`python -m rl2lightning fit --config …`, and the console script of the same name."""

from __future__ import annotations

import os


def main() -> None:
    # threads that spin while they wait make a step ten times slower as soon as anything else runs on the machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rl2lightning.cli import main as cli_main

    cli_main()


if __name__ == "__main__":
    main()
