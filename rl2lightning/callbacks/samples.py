"""Sample completions with their rewards: a table at every validation, and files of all rollouts on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from rl2lightning.callbacks.records import trajectory_record, write_records
from rl2lightning.types import Trajectory

_COLUMNS = ("prompt", "completion", "answer", "reward")


class Samples(L.Callback):
    """Prints and logs a few validation samples.

    Args:
        num_samples: rows of the table; 0: no table.
        max_characters: longer texts are cut in the middle.
        save_rollouts: write every trajectory of training and validation to `rollouts/` of the run, one JSON a line.
    """

    def __init__(self, num_samples: int = 4, max_characters: int = 60, save_rollouts: bool = False) -> None:
        self.num_samples = num_samples
        self.max_characters = max_characters
        self.save_rollouts = save_rollouts
        self._shown: list[Trajectory] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._save(trainer, "train", batch, pl_module.weights_step)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        wanted = self.num_samples - len(self._shown)
        if wanted > 0 and batch.trajectories:
            stride = max(1, len(batch.trajectories) // wanted)  # neighbours in a data set are often alike
            self._shown += batch.trajectories[::stride][:wanted]
        self._save(trainer, "val", batch, pl_module.weights_step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        shown, self._shown = self._shown, []
        if not shown or not trainer.is_global_zero:
            return
        rows = [self._row(t) for t in shown]
        bar: Any = trainer.progress_bar_callback
        show = print if bar is None or bar.is_disabled else bar.print  # above the bar, not into it
        step = pl_module.weights_step
        show(f"\nstep {step}: sample completions\n{format_table(_COLUMNS, rows)}\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("val/samples", columns=list(_COLUMNS), data=rows, step=step)
            elif isinstance(logger, TensorBoardLogger):
                lines = [" | ".join(_COLUMNS), " | ".join("---" for _ in _COLUMNS), *(" | ".join(row) for row in rows)]
                logger.experiment.add_text("val/samples", "\n".join(lines), step)

    def _row(self, t: Trajectory) -> list[str]:
        prompt = next((str(m["content"]) for m in t.messages if m["role"] == "user"), "")
        reply = " ⏎ ".join(str(m["content"]) for m in t.messages[len(t.row["messages"]) :])
        texts = (prompt, reply, str(t.row.get("answer", "")), f"{t.reward:.3g}")
        return [self._cut(text.replace("\n", "⏎")) for text in texts]

    def _cut(self, text: str) -> str:
        half = self.max_characters // 2
        return text if len(text) <= self.max_characters else f"{text[:half]}…{text[-half + 1 :]}"

    def _save(self, trainer: L.Trainer, kind: str, batch: Any, step: int) -> None:
        if not self.save_rollouts or trainer.sanity_checking:
            return
        directory = Path(trainer.log_dir or trainer.default_root_dir) / "rollouts"  # a broadcast: on every process
        if not batch.trajectories:
            return
        path = directory / f"{kind}-step{step:06d}-rank{trainer.global_rank}.jsonl"
        write_records(path, map(trajectory_record, batch.trajectories), append=True)


def format_table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell, a rule under the header."""
    widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [columns, *rows]]
    return "\n".join([lines[0], "  ".join("─" * w for w in widths), *lines[1:]])
