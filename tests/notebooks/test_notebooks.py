"""Every notebook is stored without outputs, runs from top to bottom, and comes to what it says."""

import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

REPO = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
SECONDS_PER_CELL = 300  # ends a cell that hangs; a whole notebook takes half a minute on two idle cores

# run in the notebook's own kernel, after its last cell; a notebook without an entry fails
OUTCOMES = {
    "01_quickstart": """
assert len(before) == len(after) == 500
assert 0.4 < accuracy_before < 0.6
assert accuracy_after > accuracy_before + 0.1  # it comes to 0.77 from 0.50; one standard error is 0.02

assert set(rollouts.history) == {"with carry", "without carry"}
for means in rollouts.history.values():
    assert len(means) == 30
    assert mean(means[-10:]) > mean(means[:10]) + 0.03

import csv
with open(Path(trainer.log_dir) / "metrics.csv") as file:
    tapers = [float(row["train/taper"]) for row in csv.DictReader(file) if row["train/taper"]]
assert len(tapers) == 60
assert tapers[0] == 1 and min(tapers[1::2]) < 1  # the notebook's loss was used, with the old policy to compare to
assert Path(trainer.log_dir).resolve().is_relative_to(working_copy)
""",
}
FIGURES = {"01_quickstart": 1}


@pytest.fixture
def working_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a notebook reads of the repository, in a place where it may write, apart from the user's own settings."""
    for name in ("IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # or a core that is shared makes it several times slower
    copy = tmp_path / "repository"
    shutil.copytree(REPO / "configs", copy / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "notebooks").mkdir()
    return copy


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(OUTCOMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_valid_and_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_comes_to_what_it_says(path: Path, working_copy: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    check = f"import sys\nassert sys.executable == {sys.executable!r}\nworking_copy = {str(working_copy)!r}\n"
    notebook.cells.append(nbformat.v4.new_code_cell(check + OUTCOMES[path.stem]))
    # no directories to look for kernels in: what is left is ipykernel's own, which is this interpreter
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    location = {"metadata": {"path": str(working_copy / "notebooks")}}
    NotebookClient(notebook, km=kernel, timeout=SECONDS_PER_CELL, resources=location).execute(cleanup_kc=True)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES[path.stem]
