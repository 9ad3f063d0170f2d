"""`python -m rl2lightning fit --config …`, and the console script of the same name."""

from __future__ import annotations


def main() -> None:
    from rl2lightning.cli import main as cli_main

    cli_main()


if __name__ == "__main__":
    main()
