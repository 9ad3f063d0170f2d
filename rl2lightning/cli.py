"""The command line: LightningCLI's fit, validate, test and predict with our defaults, and export."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

import rl2lightning
from rl2lightning.algorithms.base import PostTrainingModule  # brings the strategy `fsdp2_tp` with it
from rl2lightning.callbacks.preemption import Preemption
from rl2lightning.callbacks.progress import StepProgressBar
from rl2lightning.callbacks.samples import Samples
from rl2lightning.callbacks.throughput import Throughput
from rl2lightning.compat import drop_misplaced_messages, find_last_checkpoint_with, take_paths_as_they_are
from rl2lightning.export import export
from rl2lightning.parallel.checkpoint import CheckpointError, newest
from rl2lightning.suggest import shorten, suggest
from rl2lightning.types import NonFiniteError, RolloutError

_ALWAYS = (Throughput, Samples, Preemption)  # callbacks every run has; give one of your own to set it up otherwise


# for steps that Lightning makes itself: arguments, the values at which they do nothing, and what there is instead
_MODELS_OWN = (
    ("gradient_clip_val", 0, "set model.init_args.max_grad_norm"),
    (
        "accumulate_grad_batches",
        1,
        "a batch is a whole optimizer step, whose micro-batches have model.init_args.max_tokens_per_device tokens",
    ),
)


class Trainer(L.Trainer):
    """Lightning's Trainer with this project's defaults.

    Strategy `fsdp2_tp`; CSV and TensorBoard logs besides whatever loggers are given, all in one new directory
    `<default_root_dir>/version_N`, so that no run overwrites another; metrics logged at every step; a progress bar
    on one line; the callbacks Throughput, Samples and Preemption. Under torchrun it takes the processes that are there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {
            "strategy": "fsdp2_tp",
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
            "enable_model_summary": False,  # `configure_model` says what there is in a line
        }
        if torch.distributed.is_torchelastic_launched():
            defaults["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
            kwargs["num_nodes"] = int(os.environ["GROUP_WORLD_SIZE"])
        for name, value in defaults.items():
            if kwargs.get(name) in (None, "auto"):
                kwargs[name] = value
        strategy = kwargs["strategy"]
        if isinstance(strategy, str) and strategy.lower() not in StrategyRegistry.available_strategies():
            raise ValueError(f"trainer.strategy='{strategy}' is no strategy: set it to fsdp2_tp, or leave it out")
        for name, nothing, instead in _MODELS_OWN:
            if kwargs.get(name) not in (None, nothing):
                raise ValueError(f"trainer.{name}={kwargs[name]} is not for these modules: {instead}")
        callbacks = kwargs.get("callbacks") or []
        kwargs["callbacks"] = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for kind, default in ((ProgressBar, StepProgressBar), *((kind, kind) for kind in _ALWAYS)):
            wanted = kind is not ProgressBar or kwargs.get("enable_progress_bar") is not False
            if wanted and not any(isinstance(c, kind) for c in kwargs["callbacks"]):
                kwargs["callbacks"].append(default())
        logger = kwargs.get("logger")
        if logger is not False and not kwargs.get("fast_dev_run"):
            kwargs["default_root_dir"] = str(kwargs.get("default_root_dir") or "runs")
            kwargs["logger"] = run_loggers(logger, kwargs["default_root_dir"])
        drop_misplaced_messages()
        super().__init__(*args, **kwargs)
        find_last_checkpoint_with(self, self._last_checkpoint)

    def _last_checkpoint(self, fn: TrainerFn) -> Path | None:
        """What `ckpt_path="last"` means: the newest complete checkpoint of all runs in this root directory."""
        root = Path(self.default_root_dir)  # where Lightning puts those of a SLURM job that is requeued
        own = [Path(c.dirpath) for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
        path = newest({root, root / "checkpoints", *root.glob("version_*/checkpoints"), *own})
        if path is None and fn != TrainerFn.FITTING:
            raise ValueError(f"--ckpt_path last: no complete checkpoint of a run was found in '{root}'; name one")
        if path is None:
            rank_zero_info(f"no checkpoint in '{root}' yet: a new run begins")
        return path

    export = staticmethod(export)  # LightningCLI makes its verbs of the trainer's methods


def run_loggers(logger: Logger | list[Logger] | bool | None, root: str) -> list[Logger]:
    """The given loggers, with CSV and TensorBoard first unless they are among them."""
    given = list(logger) if isinstance(logger, (list, tuple)) else [logger] if isinstance(logger, Logger) else []
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"output directory '{root}' cannot be written to; set trainer.default_root_dir to another")
    run = RunDirectory(root)
    ours: list[Logger] = []
    if not any(isinstance(x, CSVLogger) for x in given):
        ours.append(_CSV(run))
    if not any(isinstance(x, TensorBoardLogger) for x in given):
        ours.append(_TensorBoard(run))
    return [*ours, *given]


class RunDirectory:
    """`version_N` in a root directory, claimed when a logger first asks for it: no other run can get the same.

    Only the first process claims, and only what it says is used (`trainer.log_dir` is a broadcast).
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._number: int | None = None

    def number(self) -> int:
        while self._number is None:
            taken = [int(p.name[8:]) for p in Path(self.root).glob("version_*") if p.name[8:].isdigit()]
            number = max(taken, default=-1) + 1
            try:
                if _rank() == 0:
                    Path(self.root, f"version_{number}").mkdir()
            except FileExistsError:  # by a run that asked at the same moment
                continue
            self._number = number
        return self._number


class _CSV(CSVLogger):
    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.root, name="", flush_logs_every_n_steps=10)
        self._run = run

    def _get_next_version(self) -> int:
        return self._run.number()


class _TensorBoard(TensorBoardLogger):
    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.root, name="")
        self._run = run

    def _get_next_version(self) -> int:
        return self._run.number()


class SaveResolvedConfig(SaveConfigCallback):
    """Writes the resolved config into the run's directory as `config.yaml`, and to W&B where that is a logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # a broadcast: on every process
        if not trainer.is_global_zero or log_dir is None:
            return
        path = Path(log_dir) / "config.yaml"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.parser.dump(self.config, skip_unset=False))
        rank_zero_info(f"run directory: {log_dir}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.config.update({"config": self.config.as_dict()}, allow_val_change=True)


class Parser(LightningArgumentParser):
    """Names the key that was probably meant when one is misspelt, and takes no abbreviated ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "rl2lightning", **kwargs})

    def add_subclass_arguments(self, *args: Any, **kwargs: Any) -> Any:
        # a data or environment file is a value: with sub-configs its content would be read in the place of its path
        super().add_subclass_arguments(*args, **kwargs)
        take_paths_as_they_are(self)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})

    def error(self, message: str, ex: Exception | None = None) -> Any:  # type: ignore[override]
        message = suggest(message, self)
        if not self.exit_on_error:  # an inner parser, which raises to the outer one
            super().error(message, ex)
        parser: LightningArgumentParser = getattr(ex, "subcommand_parser", self)
        prog = parser.prog.replace(" [options]", "")
        self.exit(2, f"{prog}: error: {shorten(message)}\n({prog} --help lists all settings)\n")


class CLI(LightningCLI):
    """`rl2lightning fit|validate|test|predict|export`; algorithm, data, callbacks and trainer come from the config."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        for name in rl2lightning.__all__:  # once loaded, they go by their short names, and the help lists them
            getattr(rl2lightning, name)
        super().__init__(
            PostTrainingModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=Trainer,
            parser_class=Parser,
            save_config_callback=SaveResolvedConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Throughput, "throughput")
        parser.add_lightning_class_args(Samples, "samples")
        parser.add_lightning_class_args(Preemption, "preemption")
        parser.set_defaults(
            {
                "trainer.strategy": {"class_path": "rl2lightning.FSDP2TPStrategy"},  # so that its settings can be given
                "trainer.use_distributed_sampler": False,
                "trainer.log_every_n_steps": 1,
                "trainer.default_root_dir": "runs",
                "trainer.enable_model_summary": False,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if args is None:
            sys.argv[1:] = _with_class_for_name(sys.argv[1:])
        elif isinstance(args, list):
            args = _with_class_for_name(args)
        super().parse_arguments(parser, args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "export": set()}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand != "export":
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)  # a checkpoint says all there is to know: no model, data or trainer
        self._subcommand_method_arguments[subcommand] = parser.add_function_arguments(export)
        return parser

    def _set_seed(self) -> None:
        if self.subcommand != "export":
            super()._set_seed()

    def instantiate_classes(self) -> None:
        if self.subcommand != "export":
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "export":
            config = self.config.export.as_dict()
            directory = export(**{name: config[name] for name in self._subcommand_method_arguments["export"]})
            print(f"model written to {directory}")
            return
        if subcommand != "fit":  # which saves nothing, so it matters little that its directory is another
            warnings.filterwarnings("ignore", message="The dirpath has changed")
        super()._run_subcommand(subcommand)

    def after_fit(self) -> None:
        preemption = next(c for c in self.trainer.callbacks if isinstance(c, Preemption))  # type: ignore[attr-defined]
        if preemption.received:
            launched = isinstance(self.trainer.strategy.launcher, _SubprocessScriptLauncher)
            if launched and self.trainer.local_rank:
                return  # Lightning's launcher would kill the process that others wait for, which says how it went
            sys.exit(128 + preemption.received)
        best = self.trainer.checkpoint_callback
        if isinstance(best, ModelCheckpoint) and best.best_model_path:
            score = "" if best.best_model_score is None else f" ({best.monitor} {float(best.best_model_score):.4g})"
            rank_zero_info(f"best checkpoint{score}: {best.best_model_path}")


def _with_class_for_name(args: list[str]) -> list[str]:
    """`--trainer.strategy fsdp2_tp` as its class, so that `--trainer.strategy.tensor 2` may follow."""
    spelt = list(args)
    for option, value in (
        ("--trainer.strategy", '{"class_path": "rl2lightning.FSDP2TPStrategy"}'),
        ("--trainer.strategy.help", "FSDP2TPStrategy"),
    ):
        for i, arg in enumerate(args):
            if arg == f"{option}=fsdp2_tp":
                spelt[i] = f"{option}={value}"
            elif arg == "fsdp2_tp" and i and args[i - 1] == option:
                spelt[i] = value
    return spelt


def main(args: list[str] | None = None) -> None:
    """Runs the command line; an error of the user's is one sentence, not a traceback."""
    launcher = os.getppid()
    try:
        CLI(args=args)
    except (ValueError, NonFiniteError, RolloutError, CheckpointError) as error:
        if os.environ.get("RL2LIGHTNING_TRACEBACK"):
            raise
        rank = _rank()
        if rank and _ends(launcher):
            sys.exit(1)
        who = f" (process {rank})" if rank else ""
        message = f"rl2lightning: error{who}: {shorten(str(error))}"
        sys.exit(f"{message}\n(RL2LIGHTNING_TRACEBACK=1 shows where it was raised)")


def _rank() -> int:
    """This process's number in the run, also before there is a process group."""
    return rank_zero_only.rank  # type: ignore[attr-defined]


def _ends(launcher: int, seconds: float = 5.0) -> bool:
    """Whether whoever launched this process has ended after a moment: the first process, or torchrun because of it.

    Most errors are every process's, and the first has said then what is wrong. torchrun does not even let us return.
    """
    deadline = time.monotonic() + seconds
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(0.1)
    return os.getppid() != launcher
