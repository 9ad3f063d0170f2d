"""Who may import whom, read from the source; and what a light start must not load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rl2lightning

PACKAGE = Path(rl2lightning.__file__).parent
PURE = {"functional", "types"}  # of these, third-party code is torch alone
ESTIMATORS = {"estimators", "policy_losses", "preference_losses", "controllers"}  # small settings over functional
ALLOWED = {
    "functional": set(),
    "types": set(),
    "compat": set(),
    "usercode": set(),
    "service": set(),
    "seeding": set(),
    "suggest": set(),
    "estimators": {"functional", "types"},
    "policy_losses": {"functional", "types", "estimators"},
    "preference_losses": {"functional"},
    "controllers": {"functional", "types"},
    "models": {"functional", "types"},
    "parallel": {"models", "functional", "types"},
    "data": {"types", "usercode"},
    "environments": {"types", "usercode", "service"},
    # the sandbox, to run code; conversations as a reward model was trained on them
    "rewards": {"types", "usercode", "service", "environments.python_exec", "data.chat"},
    "rollout": {"types", "data.chat", "environments", "rewards"},
    "algorithms": {"functional", "types", "models", "parallel", *ESTIMATORS},
    # the RolloutCallback owns engine, environment and rewards, and finds their tokenizer
    "callbacks": {"types", "functional", "controllers", "rollout", "data.chat", "environments", "rewards"},
    "export": {"models", "parallel"},
}
INSIDE_FUNCTIONS = {"rewards": {"models"}}  # a reward that loads a model
ANYTHING = {"cli", "sweep", "__main__", "__init__"}  # and nobody imports these, but __main__ the command line
HEAVY = {"vllm", "flash_attn", "ring_flash_attn", "peft", "wandb", "mlflow", "optuna", "datasets"}


def package_files() -> Iterator[tuple[str, Path]]:
    """(top-level name such as `rollout` or `types`, file) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).with_suffix("").parts[0], path


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether at module level) of everything a file imports; names from a module one by one.

    What stands under `if TYPE_CHECKING` is at no level: it never runs.
    """
    tree = ast.parse(path.read_text())
    nested = {
        node
        for scope in ast.walk(tree)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(scope)
        for node in ast.walk(scope)
        if node is not scope
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in nested
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import of {node.module}"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node not in nested


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(top: str, path: Path) -> Iterator[str]:
    """Imports of one file that the rules do not allow."""
    if top in ANYTHING:
        return
    for name, at_module_level in imports(path):
        root, _, inside = name.partition(".")
        if root != "rl2lightning":
            if top in PURE and root not in {*sys.stdlib_module_names, "torch"}:
                yield name
            continue
        allowed = {"compat", "seeding", top, *ALLOWED[top]}
        if not at_module_level:
            allowed |= INSIDE_FUNCTIONS.get(top, set())
        if not any(f"{inside}.".startswith(f"{prefix}.") for prefix in allowed):
            yield name


def test_every_module_has_its_place_in_the_rules() -> None:
    assert {top for top, _ in package_files()} <= set(ALLOWED) | ANYTHING


def test_modules_import_only_what_they_may() -> None:
    found = {f"{path.relative_to(PACKAGE)}: {name}" for top, path in package_files() for name in violations(top, path)}
    assert not found


@pytest.mark.parametrize(
    ("top", "line"),
    [
        ("functional", "import numpy"),
        ("functional", "from rl2lightning import types"),
        ("types", "import lightning as L"),
        ("algorithms", "from rl2lightning.rollout.engine import RolloutEngine"),
        ("algorithms", "def f():\n    from rl2lightning.data.chat import encode_chat"),
        ("rollout", "from rl2lightning.data.base import RowDataModule"),
        ("rewards", "from rl2lightning.models.build import load_config"),
        ("callbacks", "from rl2lightning.cli import Trainer"),
        ("models", "import rl2lightning.parallel.mesh"),
    ],
)
def test_the_rules_catch_a_wrong_direction(top: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert list(violations(top, path))


def test_a_reward_may_load_a_model_inside_a_function(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def load():\n    from rl2lightning.models.build import load_config")
    assert not list(violations("rewards", path))


def test_heavy_packages_are_imported_inside_functions_in_one_file_or_folder_each() -> None:
    places: dict[str, set[str]] = {}
    for _, path in package_files():
        for name, at_module_level in imports(path):
            root = name.partition(".")[0]
            if root in HEAVY:
                assert not at_module_level, f"{path} imports {name} when it is loaded"
                places.setdefault(root, set()).add("vllm_backend" if path.parent.name == "vllm_backend" else path.name)
    assert {root: found for root, found in places.items() if len(found) > 1} == {}


def test_every_public_name_exists() -> None:
    for name in rl2lightning.__all__:
        assert getattr(rl2lightning, name) is not None, name
    assert set(rl2lightning.__all__) <= set(dir(rl2lightning))
    with pytest.raises(AttributeError, match="has no attribute 'GRP0'"):
        _ = rl2lightning.GRP0


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint('loaded:', *(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_importing_the_package_loads_nothing_of_weight() -> None:
    assert not loaded_by("import rl2lightning") & (HEAVY | {"torch", "lightning", "transformers", "numpy"})


def test_help_loads_no_heavy_package() -> None:
    help_text = """
import runpy, sys
sys.argv = ["rl2lightning", "--help"]
try:
    runpy.run_module("rl2lightning", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
"""
    loaded = loaded_by(help_text)
    assert "lightning" in loaded  # the command line itself did start
    assert not loaded & HEAVY
