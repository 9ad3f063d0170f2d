"""The command line: configs, run directories, verbs, and errors in one sentence."""

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2lightning import __main__, cli
from rl2lightning.cli import main, run_loggers
from rl2lightning.parallel.checkpoint import load_full_weights

Run = Callable[..., None]


@pytest.fixture(scope="module")
def config(tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete GRPO run of two steps with validation and checkpoints."""
    settings = {
        "seed_everything": 0,
        "model": {
            "class_path": "rl2lightning.GRPO",
            "init_args": {
                "model": tiny_model,
                "optimizer": {"lr": 1e-2, "schedule": "constant"},
                "sampling": {"max_tokens": 4},
                "samples_per_prompt": 2,
            },
        },
        "data": {
            "class_path": "rl2lightning.PromptDataModule",
            "init_args": {"path": f"prompts@{task}", "prompts_per_rollout": 4, "val_ratio": 0.1},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "rl2lightning.RolloutCallback", "init_args": {"environment": task}},
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"monitor": "val/reward", "mode": "max", "filename": "{step}"},
                },
            ],
        },
    }
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(sys, "argv", ["rl2lightning"])  # Lightning wonders about arguments given twice
    return lambda *args: main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of one finished run; nobody writes into it."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rl2lightning"])
        main(["fit", "--config", str(config), f"--trainer.default_root_dir={root}"])
    return root


def printed(run: Run, capsys: pytest.CaptureFixture, *args: Any) -> dict[str, Any]:
    """What --print_config says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run("fit", *args, "--print_config")
    assert end.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def error_of(run: Run, capsys: pytest.CaptureFixture, *args: Any) -> str:
    """The message of a run that fails, which is no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(*args)
    assert end.value.code not in (0, None)
    message = capsys.readouterr().err if isinstance(end.value.code, int) else str(end.value.code)
    message = message[message.rindex("error: ") :]
    assert "Traceback" not in message
    assert len(message.splitlines()) == 2, message  # and where to look further
    return message.splitlines()[0]


# ---- configs


def test_a_printed_config_is_a_config(run: Run, capsys, config: Path, tmp_path: Path) -> None:
    first = printed(run, capsys, "--config", config, "--model.optimizer.lr=0.125", "--samples.num_samples=7")
    again = tmp_path / "printed.yaml"
    again.write_text(yaml.safe_dump(first))
    assert printed(run, capsys, "--config", again) == first
    assert first["model"]["init_args"]["optimizer"]["lr"] == 0.125
    assert first["samples"]["num_samples"] == 7
    assert first["model"]["init_args"]["max_grad_norm"] == 1.0  # a default is printed too


def test_a_second_config_changes_what_it_names_and_nothing_else(run: Run, capsys, config: Path, tmp_path: Path) -> None:
    base = printed(run, capsys, "--config", config)
    override = tmp_path / "override.yaml"
    override.write_text("model: {init_args: {optimizer: {lr: 0.25}, kl: {coef: 0.5}}}\ntrainer: {max_steps: 9}\n")
    changed = printed(run, capsys, "--config", config, "--config", override)
    base["model"]["init_args"]["optimizer"]["lr"] = 0.25
    base["model"]["init_args"]["kl"]["coef"] = 0.5
    base["trainer"]["max_steps"] = 9
    assert changed == base
    # and the command line has the last word
    assert printed(run, capsys, "--config", config, "--config", override, "--trainer.max_steps=3")["trainer"] == {
        **base["trainer"],
        "max_steps": 3,
    }


def test_classes_go_by_their_short_names(tiny_model: str, task: str) -> None:
    """In a fresh process, where nothing has been imported but the command line."""
    command = [
        "fit",
        "--model=GRPO",
        f"--model.model={tiny_model}",
        "--model.policy_loss=GSPO",
        "--data=PromptDataModule",
    ]
    more = [f"--data.path=prompts@{task}", "--trainer.callbacks+=RolloutCallback", "--trainer.callbacks.max_turns=2"]
    done = subprocess.run(
        [sys.executable, "-m", "rl2lightning", *command, *more, "--trainer.strategy.replicate=2", "--print_config"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["model"]["class_path"] == "rl2lightning.GRPO"
    assert printed["model"]["init_args"]["policy_loss"]["class_path"] == "rl2lightning.policy_losses.GSPO"
    assert printed["data"]["class_path"] == "rl2lightning.PromptDataModule"
    assert printed["trainer"]["callbacks"][0]["init_args"]["max_turns"] == 2
    assert printed["trainer"]["strategy"]["init_args"]["replicate"] == 2


# ---- misspelt keys


def moved(settings: dict[str, Any], path: str, name: str) -> None:
    """Renames the key at a dotted path; numbers index lists."""
    *parents, old = path.split(".")
    for part in parents:
        settings = settings[int(part) if part.isdigit() else part]
    settings[name] = settings.pop(old)


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("trainer", "trainr", "trainer"),
        ("trainer.max_steps", "max_step", "trainer.max_steps"),
        ("model.init_args", "init_arg", "init_args"),
        ("model.init_args.samples_per_prompt", "sample_per_prompt", "samples_per_prompt"),
        ("model.init_args.optimizer.schedule", "scedule", "optimizer.schedule"),
        ("model.init_args.sampling.max_tokens", "max_token", "sampling.max_tokens"),
        ("data.init_args.prompts_per_rollout", "prompts_per_rolout", "prompts_per_rollout"),
        ("data.init_args.val_ratio", "val_ration", "val_ratio"),
        ("trainer.callbacks.0.init_args.environment", "enviroment", "environment"),
        ("trainer.callbacks.1.init_args.monitor", "moniter", "monitor"),
    ],
)
def test_a_misspelt_key_in_a_file_is_an_error_that_names_the_right_one(
    run: Run, capsys, config: Path, tmp_path: Path, path: str, name: str, meant: str
) -> None:
    settings = yaml.safe_load(config.read_text())
    moved(settings, path, name)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(yaml.safe_dump(settings, sort_keys=False))
    message = error_of(run, capsys, "fit", "--config", misspelt)
    assert name in message
    assert message.endswith(f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--trainr.max_steps=3", "trainer"),
        ("--trainer.max_step=3", "trainer.max_steps"),
        ("--seed_everythin=3", "seed_everything"),
        ("--throughput.smothing=0.5", "throughput.smoothing"),
        ("--model.samples_per_promt=3", "samples_per_prompt"),
        ("--model.optimizer.lrr=3", "optimizer.lr"),
        ("--model.init_args.kl.coeff=3", "kl.coef"),
        ("--model.policy_loss.clip_hi=3", "clip_high"),
        ("--model.clip_high=3", "policy_loss.clip_high"),
        ("--data.prompts_per_rolout=3", "prompts_per_rollout"),
        ("--trainer.callbacks+={class_path: RolloutCallback, init_args: {max_turn: 3}}", "max_turns"),
        ("--trainer.callbacks+=RolloutCalback", "RolloutCallback"),
        ("--model.advantage=rl2lightning.estimators.LeavOneOut", "LeaveOneOut"),
    ],
)
def test_a_misspelt_argument_is_an_error_that_names_the_right_one(
    run: Run, capsys, config: Path, argument: str, meant: str
) -> None:
    assert error_of(run, capsys, "fit", "--config", config, argument).endswith(f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model.samples_per_prompt=eight", "rl2lightning.GRPO: samples_per_prompt: Expected a <class 'int'>"),
        ("--model.loss_level=tokens", "loss_level: Expected a typing.Literal['token', 'sequence', 'constant']"),
        (
            "--model.advantage=rl2lightning.policy_losses.GSPO",
            "does not correspond to a subclass of AdvantageEstimator",
        ),
        ("--model.sampling.temperature=0", "sampling.temperature=0 explores nothing: set a positive temperature"),
        ("--model.kl.coef=-1", "kl.coef=-1.0 must not be negative"),
        ("--data.prompts_per_rollout=0", "data.prompts_per_rollout=0 must be at least 1"),
        ("--throughput.smoothing=2", "throughput.smoothing=2.0 must lie in [0, 1)"),
        ("--trainer.precision=16-true", "trainer.precision=16-true is not supported: use 32-true, bf16-mixed"),
        ("--trainer.strategy=fsdp2_tpp", "trainer.strategy='fsdp2_tpp' is no strategy: set it to fsdp2_tp"),
        ("--trainer.strategy=ddp", "trainer.strategy is DDPStrategy; rl2lightning modules need FSDP2TPStrategy"),
        (
            "--trainer.gradient_clip_val=1",
            "trainer.gradient_clip_val=1 is not for these modules: set model.init_args.max",
        ),
        ("--trainer.accumulate_grad_batches=2", "a batch is a whole optimizer step, whose micro-batches have"),
        (
            "--trainer.callbacks+={class_path: RolloutCallback, init_args: {environment: no.py}}",
            "'no.py': no such file",
        ),
    ],
)
def test_a_bad_value_is_one_sentence(
    run: Run, capsys, config: Path, tmp_path: Path, argument: str, message: str
) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    assert message in error_of(run, capsys, "fit", "--config", config, root, argument)


# ---- files that are not there


def test_an_output_directory_that_cannot_be_made_is_named(run: Run, capsys, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = error_of(run, capsys, "fit", "--config", config, f"--trainer.default_root_dir={tmp_path}/file/runs")
    assert f"output directory '{tmp_path}/file/runs' cannot be written to; set trainer.default_root_dir" in message


def test_a_model_directory_without_weights_is_named(
    run: Run, capsys, config: Path, tiny_model: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(tiny_model).iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    root = f"--trainer.default_root_dir={tmp_path}"
    message = error_of(run, capsys, "fit", "--config", config, root, f"--model.model={bare}")
    assert f"model directory '{bare}' has no *.safetensors weights" in message
    message = error_of(run, capsys, "fit", "--config", config, root, "--model.model=/nowhere")
    assert "model '/nowhere' is not a directory; set model.init_args.model" in message


def test_a_missing_data_file_is_named(run: Run, capsys, config: Path, tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    message = error_of(run, capsys, "fit", "--config", config, root, "--data.path=/nowhere/prompts.jsonl")
    assert "data file '/nowhere/prompts.jsonl' does not exist" in message


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_missing_checkpoint_is_named(run: Run, capsys, config: Path, tmp_path: Path, verb: str) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    message = error_of(run, capsys, verb, "--config", config, root, "--ckpt_path=/nowhere/step=1.ckpt")
    assert "checkpoint '/nowhere/step=1.ckpt' does not exist; set --ckpt_path" in message


def test_an_error_ends_the_process_with_a_code_and_without_a_traceback(config: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", config, f"--trainer.default_root_dir={tmp_path}", "--data.path=/nowhere/p.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "rl2lightning", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "rl2lightning: error: data file '/nowhere/p.jsonl' does not exist\n" in done.stderr


def test_an_interrupt_before_the_fit_begins_ends_the_process_without_a_traceback(monkeypatch, capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 130
    assert not any(capsys.readouterr())


def test_the_traceback_is_there_for_the_asking(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL2LIGHTNING_TRACEBACK", "1")
    with pytest.raises(ValueError, match="data file '/nowhere/p.jsonl' does not exist"):
        run("fit", "--config", config, f"--trainer.default_root_dir={tmp_path}", "--data.path=/nowhere/p.jsonl")


# ---- a run and its directory


def metrics_of(directory: Path) -> dict[str, list[float]]:
    """The values of each column of metrics.csv, in order."""
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_a_run_leaves_config_logs_and_checkpoints_in_one_directory(finished: Path) -> None:
    (directory,) = finished.iterdir()
    assert directory.name == "version_0"
    metrics = metrics_of(directory)
    for name in ("train/grad_norm", "train/loss", "rollout/reward", "perf/tokens_per_second"):
        assert len(metrics[name]) == 2, name  # every step
    assert len(metrics["val/reward"]) == 2  # before training, and at the end of it
    events = EventAccumulator(str(directory))
    events.Reload()
    logged = [event.value for event in events.Scalars("rollout/reward")]
    assert logged == pytest.approx(metrics["rollout/reward"])
    best = directory / "checkpoints/step=2.ckpt"
    assert [p.name for p in (directory / "checkpoints").iterdir()] == [best.name]
    assert torch.load(best / "meta.pt", weights_only=True)["global_step"] == 2


def test_the_config_of_a_run_runs_again_and_gives_the_same(run: Run, finished: Path, tmp_path: Path) -> None:
    saved = finished / "version_0/config.yaml"
    run("fit", "--config", saved, f"--trainer.default_root_dir={tmp_path}")
    for name in ("train/grad_norm", "rollout/reward", "val/reward"):
        assert metrics_of(tmp_path / "version_0")[name] == metrics_of(finished / "version_0")[name]


def test_a_second_run_leaves_the_first_alone(run: Run, config: Path, tmp_path: Path) -> None:
    arguments = ["--config", config, f"--trainer.default_root_dir={tmp_path}", "--trainer.max_steps=1"]
    run("fit", *arguments)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}
    run("fit", *arguments, "--model.optimizer.lr=0.5")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0", "version_1"]
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in before} == before
    assert not [p for p in (tmp_path / "version_0").rglob("*") if p.is_file() and p not in before]
    lr = yaml.safe_load((tmp_path / "version_1/config.yaml").read_text())["model"]["init_args"]["optimizer"]["lr"]
    assert lr == 0.5


def test_runs_that_begin_at_the_same_moment_have_directories_of_their_own(tmp_path: Path) -> None:
    one, other = run_loggers(None, str(tmp_path)), run_loggers(None, str(tmp_path))
    assert not list(tmp_path.iterdir())  # what fails before it logs leaves nothing
    assert {x.log_dir for x in one} == {str(tmp_path / "version_0")}
    assert {x.log_dir for x in other} == {str(tmp_path / "version_1")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_0", "version_1"]
    together = threading.Barrier(8)

    def claim(loggers: list[Any]) -> str:
        together.wait()
        return loggers[0].log_dir

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim, [run_loggers(None, str(tmp_path)) for _ in range(8)]))
    assert {Path(path).name for path in claimed} == {f"version_{i}" for i in range(2, 10)}


# ---- the other verbs


def test_validate_and_test_score_the_checkpoint_they_are_given(
    run: Run, config: Path, finished: Path, tmp_path: Path
) -> None:
    checkpoint = finished / "version_0/checkpoints/step=2.ckpt"
    for i, verb in enumerate(("validate", "test")):
        run(verb, "--config", config, f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={checkpoint}")
        metrics = metrics_of(tmp_path / f"version_{i}")
        name = {"validate": "val", "test": "test"}[verb]
        assert metrics[f"{name}/reward"] == [metrics_of(finished / "version_0")["val/reward"][-1]]


def test_predict_writes_a_line_for_every_held_out_row(run: Run, config: Path, finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "version_0/checkpoints/step=2.ckpt"
    run("predict", "--config", config, f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={checkpoint}")
    lines = (tmp_path / "version_0/completions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 6  # a tenth of 64
    assert len({r["messages"][0]["content"] for r in records}) == 6
    mean = sum(r["reward"] for r in records) / 6
    assert mean == pytest.approx(metrics_of(finished / "version_0")["val/reward"][-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_makes_a_model_directory_with_the_policy_s_logits(
    run: Run, capsys, finished: Path, tiny_model: str, tmp_path: Path, dtype: str
) -> None:
    checkpoint, output = finished / "version_0/checkpoints/step=2.ckpt", tmp_path / "model"
    run("export", f"--ckpt_path={checkpoint}", f"--output_dir={output}", f"--dtype={dtype}")
    assert f"model written to {output}" in capsys.readouterr().out
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.load_state_dict(load_full_weights(checkpoint, "policy.lm."), strict=False)  # tied: without lm_head
    assert not torch.equal(policy.model.norm.weight, start["model.norm.weight"])
    exported = AutoModelForCausalLM.from_pretrained(output)
    assert exported.dtype == getattr(torch, dtype)
    ids = AutoTokenizer.from_pretrained(output)("12+34=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, policy(input_ids=ids).logits, rtol=0, atol=0)
    message = error_of(run, capsys, "export", f"--ckpt_path={checkpoint}", f"--output_dir={output}")
    assert f"'{output}' holds a model already; set --output_dir to a new directory" in message


# ---- help


def help_of(run: Run, capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        run(*args)
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())  # without its line breaks


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_help_explains_the_settings_of_a_run(run: Run, capsys, verb: str) -> None:
    text = help_of(run, capsys, verb, "--help")
    for name, explanation in {
        "--trainer.max_steps": "Stop training after this number of steps",
        "--trainer.strategy.help": "Show the help for the given subclass of Strategy",
        "--model.help": "rl2lightning.GRPO",
        "--model ": "rl2lightning.SFT",
        "--data.help": "rl2lightning.PromptDataModule",
        "--throughput.smoothing": "weight of the past in the running average",
        "--samples.save_rollouts": "write every trajectory of training and validation to `rollouts/` of the run",
        "--preemption.enabled": "false leaves signals to Lightning",
        "--ckpt_path": "",
    }.items():
        assert name in text
        assert explanation in text


@pytest.mark.parametrize(
    ("option", "explanations"),
    [
        ("--model.help=GRPO", ["group size", "0 is greedy", "peak learning rate", "distance to the frozen reference"]),
        ("--model.help=SFT", ["every trained token counts alike", "most tokens of one training micro-batch"]),
        (
            "--data.help=PromptDataModule",
            ["prompts of one rollout, over all ranks", "share of `path` that is held out"],
        ),
        (
            "--trainer.callbacks.help=RolloutCallback",
            ["drop groups whose rewards are all equal", "most turns of the policy"],
        ),
        (
            "--model.help=GRPO --model.policy_loss.help=GSPO",
            ["--model.policy_loss.sequence_clip_low", "how far below 1"],
        ),
        (
            "--trainer.callbacks.help=RolloutCallback --trainer.callbacks.engine.help=HFEngine",
            ["--trainer.callbacks.engine.max_num_seqs", "most requests decoded at a time"],
        ),
        ("--trainer.strategy.help fsdp2_tp", ["copies of the parameters", "recomputes each transformer block"]),
        ("--trainer.strategy.help=FSDP2TPStrategy", ["copies of the parameters", "recomputes each transformer block"]),
    ],
)
def test_help_of_a_class_explains_its_settings(run: Run, capsys, option: str, explanations: list[str]) -> None:
    text = help_of(run, capsys, "fit", *option.split())
    for explanation in explanations:
        assert explanation in text


def test_help_of_export_explains_its_settings(run: Run, capsys) -> None:
    text = help_of(run, capsys, "export", "--help")
    for explanation in (
        "a *.ckpt directory of a run",
        "must not hold a model yet",
        "type of the stored",
        "--submodule",
        "write its adapter",
        "--base",
    ):
        assert explanation in text
    assert "--trainer" not in text  # a checkpoint says all there is to know


def test_a_data_file_is_a_path_and_its_content_no_setting(run: Run, capsys, config: Path, tmp_path: Path) -> None:
    for name, text in (("rows.json", '[{"a": 1}, {"a": 2}]'), ("rows.csv", "q,r\n1,2\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as done:
            run("fit", "--config", config, f"--data.path={tmp_path / name}", "--print_config")
        assert done.value.code in (0, None)
        assert f"path: {tmp_path / name}\n" in capsys.readouterr().out


def test_the_strategys_name_and_its_settings_go_together(config: Path, run: Run, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run(
            "fit", "--config", config, "--trainer.strategy", "fsdp2_tp", "--trainer.strategy.tensor=2", "--print_config"
        )
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"] == "rl2lightning.FSDP2TPStrategy"
    assert strategy["init_args"]["tensor"] == 2
