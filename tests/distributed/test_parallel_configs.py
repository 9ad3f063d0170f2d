"""The quickstarts run unchanged behind every config of configs/parallel, and learn the same."""

import csv
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("config_cases.py")
MESHES = sorted(path.stem for path in (REPO / "configs/parallel").glob("*.yaml"))
ALGORITHMS = ("sft", "grpo", "rm", "dpo", "kto", "ppo")
# always: the first two on every mesh, and of the others each on every other mesh
PAIRS = (("rm", "kto"), ("dpo", "ppo"))
SOME = [f"{mesh}/{algorithm}" for i, mesh in enumerate(MESHES) for algorithm in (*ALGORITHMS[:2], *PAIRS[i % 2])]
OTHERS = [case for mesh in MESHES for algorithm in ALGORITHMS if (case := f"{mesh}/{algorithm}") not in SOME]


def logged(directory: Path) -> dict[str, list[float]]:
    """Columns of the run's metrics.csv, empty cells left out."""
    with (directory / "version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


@pytest.fixture(scope="module")
def alone(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`shard/<algorithm>` of one process."""
    root = tmp_path_factory.mktemp("alone")
    run_on(1, SCRIPT, root, *(f"shard/{algorithm}" for algorithm in ALGORITHMS))
    return root


def four(run_on, root: Path, cases: list[str]) -> Path:
    """`<mesh>/<algorithm>` of four processes."""
    run_on(4, SCRIPT, root, *cases, timeout=900)
    return root


@pytest.fixture(scope="module")
def some(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four(run_on, tmp_path_factory.mktemp("some"), SOME)


@pytest.fixture(scope="module")
def others(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four(run_on, tmp_path_factory.mktemp("others"), OTHERS)


def check(ours: dict[str, list[float]], alone: dict[str, list[float]]) -> None:
    assert len(alone["train/loss"]) == 2
    compared = [name for name in alone if name.startswith("train/") and name.endswith(("loss", "grad_norm"))]
    assert {"train/loss", "train/grad_norm"} <= set(compared)
    for name in compared:
        assert ours[name] == pytest.approx(alone[name], rel=2e-5, abs=1e-7), name
    for name in ("rollout/reward", "val/accuracy"):
        assert ours.get(name) == pytest.approx(alone[name]) if name in alone else name not in ours


@pytest.mark.parametrize("case", SOME)
def test_four_processes_learn_what_one_learns(case: str, some: Path, alone: Path) -> None:
    check(logged(some / case), logged(alone / "shard" / case.split("/")[1]))


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize("case", OTHERS)
def test_so_do_the_other_algorithms_on_the_other_meshes(case: str, others: Path, alone: Path) -> None:
    check(logged(others / case), logged(alone / "shard" / case.split("/")[1]))


@pytest.mark.parametrize("mesh", MESHES)
def test_each_config_makes_the_mesh_it_is_named_after(mesh: str, some: Path) -> None:
    import yaml

    resolved = yaml.safe_load((some / mesh / "sft/version_0/config.yaml").read_text())
    settings = resolved["trainer"]["strategy"]["init_args"]
    axes = {name for name in ("replicate", "context", "tensor") if settings[name] > 1}
    assert axes == {word for word in mesh.split("_") if word in ("replicate", "context", "tensor")}
