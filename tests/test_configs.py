"""Every shipped config parses, says where it comes from, is the algorithm it is named after, and takes a step."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl2lightning.algorithms.optimizer import OptimizerConfig
from rl2lightning.cli import main
from rl2lightning.rewards import ExactMatch

REPO = Path(__file__).parents[1]
CONFIGS = REPO / "configs"
ALL = sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.yaml"))
COMPLETE = [name for name in ALL if "model" in yaml.safe_load((CONFIGS / name).read_text())]
FRAGMENTS = sorted(set(ALL) - set(COMPLETE))
QUICKSTARTS = {
    f"quickstart/{name}.yaml"
    for name in ("sft", "rm", "dpo", "kto", "grpo", "grpo_lora", "grpo_vllm", "tools_sft", "tools", "ppo", "ppo_rm")
}
KINDS_OF_ROWS = {
    "ChatDataModule": "conversations",
    "PreferenceDataModule": "pairs",
    "UnpairedDataModule": "labelled",
    "PromptDataModule": "prompts",
}
WITHOUT_A_PAPER = {"sft.yaml", *QUICKSTARTS, *FRAGMENTS}


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rl2lightning"])
    monkeypatch.chdir(REPO)  # the quickstart's paths begin there


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file of rows for each kind of data module."""
    directory = tmp_path_factory.mktemp("rows")
    for name in KINDS_OF_ROWS.values():
        with (directory / f"{name}.jsonl").open("w") as file:
            for i in range(20):
                messages = [{"role": "user", "content": f"{i}+1="}]
                if name == "conversations":
                    messages.append({"role": "assistant", "content": str(i + 1)})
                answers: dict[str, Any] = {"answer": str(i + 1)}
                if name == "pairs":
                    answers = {"chosen": str(i + 1), "rejected": str(i)}
                elif name == "labelled":
                    answers = {"completion": str(i + i % 2), "label": i % 2 == 1}
                file.write(json.dumps({"messages": messages, **answers}) + "\n")
    return directory


def kind_of_rows(name: str) -> str:
    """What the data module of a config reads; a fragment comes behind SFT's."""
    config = yaml.safe_load((CONFIGS / (name if name in COMPLETE else "sft.yaml")).read_text())
    return KINDS_OF_ROWS[config["data"]["class_path"].rpartition(".")[2]]


def with_fragments(name: str) -> list[str]:
    """The arguments that use a config: a fragment comes behind a complete one."""
    files = [name] if name in COMPLETE else ["sft.yaml", name]
    return [f"--config={CONFIGS / file}" for file in files]


def resolved(capsys: pytest.CaptureFixture, name: str) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fit", *with_fragments(name), "--print_config"])
    assert end.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def own_keys(settings: Any, path: str = "") -> set[str]:
    """Dotted paths of the scalars of a config."""
    if isinstance(settings, dict):
        return {p for key, value in settings.items() for p in own_keys(value, f"{path}.{key}")}
    return {path}


@pytest.mark.parametrize("name", ALL)
def test_a_config_parses_and_loses_nothing(capsys, name: str) -> None:
    shipped, parsed = yaml.safe_load((CONFIGS / name).read_text()), resolved(capsys, name)
    for given in ("logger", "plugins"):  # jsonargparse takes one item for a list of one, and fills its settings in
        ours, theirs = (config["trainer"].pop(given, None) for config in (shipped, parsed))
        if ours is not None:
            ours, theirs = (x[0] if isinstance(x, list) else x for x in (ours, theirs))
            assert theirs["class_path"] == ours["class_path"]
            assert ours.get("init_args", {}).items() <= theirs["init_args"].items()
    known = own_keys(parsed)
    # a class may be given by its path alone
    assert not {path for path in own_keys(shipped) if not {path, f"{path}.class_path"} & known}
    assert parsed["trainer"]["callbacks"][-1]["class_path"] == "lightning.pytorch.callbacks.ModelCheckpoint"


@pytest.mark.parametrize("name", [name for name in FRAGMENTS if name.startswith("parallel/")])
def test_a_mesh_is_parsed_with_its_sizes(capsys, name: str) -> None:
    shipped = yaml.safe_load((CONFIGS / name).read_text())["trainer"]["strategy"]
    parsed = resolved(capsys, name)["trainer"]["strategy"]
    assert parsed["class_path"] == shipped["class_path"]
    assert shipped["init_args"].items() <= parsed["init_args"].items()


@pytest.mark.parametrize("name", ALL)
def test_a_config_begins_with_what_it_is_and_names_its_paper(name: str) -> None:
    comment = " ".join(
        line.removeprefix("#").strip() for line in re.match(r"(#.*\n)+", (CONFIGS / name).read_text())[0].splitlines()
    )
    assert len(comment) > 60
    if name not in WITHOUT_A_PAPER:
        assert re.search(r"\(.+, 20\d\d, arXiv:\d{4}\.\d{5}\)", comment), comment


ESTIMATORS, LOSSES = "rl2lightning.estimators", "rl2lightning.policy_losses"


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "level", "kl"),
    [
        ("grpo", ("GroupRelative", True), ("PPOClip", 0.2, 0.2), "sequence", (1e-3, "k3", "loss")),
        ("dr_grpo", ("GroupRelative", False), ("PPOClip", 0.2, 0.2), "constant", None),
        ("dapo", ("GroupRelative", True), ("PPOClip", 0.2, 0.28), "token", None),
        ("rloo", ("LeaveOneOut",), ("Reinforce",), "sequence", (1e-3, "k1", "reward")),
        ("reinforce_pp", ("BatchWhitened",), ("PPOClip", 0.2, 0.2), "token", (1e-3, "k1", "reward")),
        ("gspo", ("GroupRelative", True), ("GSPO", 3e-4, 4e-4), "sequence", None),
        ("cispo", ("GroupRelative", True), ("CISPO", 5.0), "token", None),
        (
            "ppo",
            ("GAE",),
            ("PPOClip", 0.2, 0.2),
            "token",
            (1e-3, "k1", "reward"),
        ),  # of kl it names the coefficient alone
    ],
)
def test_a_preset_is_the_algorithm_it_is_named_after(capsys, name: str, advantage, loss, level: str, kl) -> None:
    config = resolved(capsys, f"{name}.yaml")
    settings = config["model"]["init_args"]
    assert settings["advantage"]["class_path"] == f"{ESTIMATORS}.{advantage[0]}"
    if advantage[0] == "GroupRelative":
        assert settings["advantage"]["init_args"] == {"divide_by_std": advantage[1], "unbiased": True}
    assert settings["policy_loss"]["class_path"] == f"{LOSSES}.{loss[0]}"
    bounds = {
        "PPOClip": ("clip_low", "clip_high"),
        "GSPO": ("sequence_clip_low", "sequence_clip_high"),
        "CISPO": ("max_ratio",),
        "Reinforce": (),
    }[loss[0]]
    assert tuple(settings["policy_loss"]["init_args"][bound] for bound in bounds) == loss[1:]
    assert settings["loss_level"] == level
    expected = (
        {"coef": 0.0, "estimator": "k3", "place": "loss"} if kl is None else dict(zip(settings["kl"], kl, strict=True))
    )
    assert settings["kl"] == expected
    rollouts = config["trainer"]["callbacks"][0]["init_args"]
    rewards = [reward["class_path"].rpartition(".")[2] for reward in rollouts["rewards"]]
    assert rewards == (["ExactMatch", "SoftOverlong"] if name == "dapo" else ["ExactMatch"])
    assert rollouts["dynamic_sampling"] is (name == "dapo")


@pytest.mark.parametrize("num_steps", [40, 4000])
def test_ppo_begins_to_move_its_policy_at_the_rate_it_names(capsys, num_steps: int) -> None:
    config = resolved(capsys, "ppo.yaml")
    policy = OptimizerConfig(**config["model"]["init_args"]["optimizer"])
    (warmup,) = (c for c in config["trainer"]["callbacks"] if c["class_path"] == "rl2lightning.CriticWarmup")
    assert policy.lr_at(0, num_steps) == policy.lr_at(warmup["init_args"]["num_steps"], num_steps) == 1


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dpo", ("Sigmoid", {"beta": 0.1, "label_smoothing": 0.0, "nll_coef": 0.0, "length_normalised": False})),
        ("ipo", ("IPO", {"per_token_beta": 1.0, "nll_coef": 0.0})),
        ("simpo", ("SimPO", {"per_token_beta": 2.0, "gamma": 1.0, "nll_coef": 0.0})),
        ("orpo", ("ORPO", {"lam": 0.1})),
    ],
)
def test_a_preference_config_has_the_loss_it_is_named_after(capsys, name: str, loss) -> None:
    settings = resolved(capsys, f"{name}.yaml")["model"]["init_args"]
    assert settings["preference_loss"]["class_path"] == f"rl2lightning.preference_losses.{loss[0]}"
    assert settings["preference_loss"]["init_args"] == loss[1]
    assert settings["reference"] == "precomputed"  # of which those without a reference make nothing


@pytest.mark.parametrize(
    ("loss", "settings"), [("SimPO", {"per_token_beta": 2.0, "gamma": 1.0}), ("IPO", {"per_token_beta": 1.0})]
)
def test_one_loss_hands_nothing_to_another_on_the_command_line(capsys, loss: str, settings: dict) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([
            "fit", *with_fragments("dpo.yaml"), "--model.preference_loss", f"rl2lightning.preference_losses.{loss}",
            "--print_config",
        ])  # fmt: skip
    made = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["preference_loss"]
    assert made["init_args"] == settings | {"nll_coef": 0.0}


def small(name: str, tiny_model: str, rows: Path, root: Path) -> list[str]:
    """Arguments that make a step of a config a matter of a second on a laptop."""
    arguments = [
        *with_fragments(name),
        "--trainer.max_steps=1",
        "--trainer.precision=32-true",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.val_check_interval=1",
        f"--trainer.default_root_dir={root}",
        "--model.max_tokens_per_device=200",
    ]
    kind = kind_of_rows(name)
    supervised = kind != "prompts"
    arguments += ["--data.batch_size=4", "--data.max_length=32"] if supervised else ["--data.prompts_per_rollout=8"]
    if name.startswith("quickstart"):  # with its own model and data
        return [*arguments, "--data.val_ratio=0.001"]
    arguments += [f"--model.model={tiny_model}", f"--data.path={rows}/{kind}.jsonl", "--data.val_ratio=0.1"]
    return arguments if supervised else [*arguments, "--model.sampling.max_tokens=4", "--model.samples_per_prompt=4"]


def last_metrics(directory: Path) -> dict[str, float]:
    with (directory / "metrics.csv").open() as file:
        return {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if value}


@pytest.fixture
def every_other_sample_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows nothing earns no rewards, and equal rewards teach nothing."""
    monkeypatch.setattr(ExactMatch, "__call__", lambda self, trajectory: float(trajectory.sample_id % 2))


def with_reward_model(arguments: list[str], directory: Path) -> list[str]:
    """The same with a copy of the config that asks for a reward model, which is there, of random weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    start, reward_model = CONFIGS / "quickstart/model", directory / "reward-model"
    config = AutoConfig.from_pretrained(start, num_labels=1, problem_type="regression")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(reward_model)
    AutoTokenizer.from_pretrained(start).save_pretrained(reward_model)
    path = directory / "config.yaml"
    path.write_text((CONFIGS / "quickstart/ppo_rm.yaml").read_text().replace("my-reward-model", str(reward_model)))
    return [f"--config={path}", *arguments[1:]]


@pytest.mark.filterwarnings("ignore:the critic's warm-up")  # of which one step is a part
@pytest.mark.usefixtures("every_other_sample_is_right")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.vllm) if "vllm" in name else name for name in COMPLETE]
)
def test_a_config_takes_a_step(
    name: str, tiny_model: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    arguments = small(name, tiny_model, rows, tmp_path)
    main(["fit", *(with_reward_model(arguments, tmp_path) if name.endswith("ppo_rm.yaml") else arguments)])
    metrics = last_metrics(tmp_path / "version_0")
    assert metrics["step"] == 0  # counted from 0: the first and only one
    assert {"val/loss", "val/accuracy"} & set(metrics)
    first = "train/critic_" if "ppo" in name else "train/"  # PPO's policy rests while its critic warms up
    assert metrics[f"{first}grad_norm"] > 0
    assert metrics[f"{first}skipped_steps"] == 0
    assert list((tmp_path / "version_0/checkpoints").glob("*.ckpt"))
    if name == "dapo.yaml":
        assert metrics["rollout/score/overlong"] == 0
        assert metrics["rollout/filtered_groups"] == 0


def test_the_wandb_fragment_logs_beside_the_files(
    tiny_model: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import wandb

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        arguments = small("logger/wandb.yaml", tiny_model, rows, tmp_path)
        main(["fit", *arguments, f"--trainer.logger.save_dir={tmp_path}"])
        config = wandb.run.config["config"]
        summary = dict(wandb.run.summary)
    finally:
        wandb.finish()
    assert config["model"]["init_args"]["model"] == tiny_model  # the resolved config
    assert config["trainer"]["max_steps"] == 1
    metrics = last_metrics(tmp_path / "version_0")
    assert summary["train/loss"] == pytest.approx(metrics["train/loss"])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert list((tmp_path / "version_0").glob("events.out.tfevents*"))
