"""`python -m rl2lightning fit --config …`, and the console script of the same name."""

from __future__ import annotations

import os
import sys


def main() -> None:
    # threads that spin while they wait make a step ten times slower as soon as anything else runs on the machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from rl2lightning.cli import main as cli_main

        cli_main()
    except KeyboardInterrupt:  # while packages load or models are built; a fit that has begun saves and ends by itself
        sys.exit(130)


if __name__ == "__main__":
    main()
