"""Both quickstarts run unchanged behind every config of configs/parallel, and learn the same."""

import csv
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MESHES = sorted(path.stem for path in (REPO / "configs/parallel").glob("*.yaml"))


def logged(directory: Path) -> dict[str, list[float]]:
    """Columns of the run's metrics.csv, empty cells left out."""
    with (directory / "version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


@pytest.fixture(scope="module")
def root(run_on, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`<mesh>/<algorithm>` of four processes, and `shard` of one under `alone`."""
    root = tmp_path_factory.mktemp("parallel")
    script = Path(__file__).with_name("config_cases.py")
    run_on(4, script, root / "four", *MESHES, timeout=600)
    run_on(1, script, root / "one", "shard")
    return root


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
@pytest.mark.parametrize("mesh", MESHES)
def test_four_processes_learn_what_one_learns(mesh: str, algorithm: str, root: Path) -> None:
    ours, alone = logged(root / "four" / mesh / algorithm), logged(root / "one" / "shard" / algorithm)
    assert len(alone["train/loss"]) == 2
    for name in ("train/loss", "train/grad_norm"):
        assert ours[name] == pytest.approx(alone[name], rel=2e-5, abs=1e-7), name
    if algorithm == "grpo":
        assert ours["rollout/reward"] == alone["rollout/reward"]
    assert ours["val/accuracy"] == pytest.approx(alone["val/accuracy"])


@pytest.mark.parametrize("mesh", MESHES)
def test_each_config_makes_the_mesh_it_is_named_after(mesh: str, root: Path) -> None:
    import yaml

    resolved = yaml.safe_load((root / "four" / mesh / "sft/version_0/config.yaml").read_text())
    settings = resolved["trainer"]["strategy"]["init_args"]
    axes = {name for name in ("replicate", "context", "tensor") if settings[name] > 1}
    assert axes == {word for word in mesh.split("_") if word in ("replicate", "context", "tensor")}
