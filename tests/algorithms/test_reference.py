"""Reference log-probs on disk: found when nothing changed, never when something did, complete or absent."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from files import write_rows
from quiet import quiet_trainer
from safetensors.torch import load_file, save_file

from rl2lightning import DPO, PreferenceDataModule
from rl2lightning.algorithms import reference
from rl2lightning.algorithms.reference import PrecomputedReference, model_key, sequence_keys
from rl2lightning.preference_losses import ORPO, PreferenceLoss, SimPO
from rl2lightning.types import Sequences


def test_the_key_of_a_sequence_is_that_of_its_tokens_and_actions_wherever_it_stands() -> None:
    seqs = Sequences.from_lists(
        [[1, 2, 3], [4, 5], [1, 2, 3]], [[False, True, True], [False, True], [False, True, True]]
    )
    first, second, third = sequence_keys(seqs)
    assert first == third != second
    assert sequence_keys(seqs.select([1, 0])) == [second, first]
    other_mask = seqs.replace(action_mask=torch.tensor([False, False, True, False, True, False, True, True]))
    assert sequence_keys(other_mask)[0] != first
    # the border between tokens and mask is part of what is digested
    assert len(set(sequence_keys(Sequences.from_lists([[1, 0], [1]], [[False, False], [False]])))) == 2


@pytest.fixture
def own_model(tiny_model: str, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change_a_weight(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_the_key_of_a_model_is_that_of_its_weights_config_and_precision(own_model: Path) -> None:
    keys = [model_key(str(own_model), torch.float32, None)]
    moved = own_model.rename(own_model.with_name("moved"))
    assert model_key(str(moved), torch.float32, None) == keys[0]
    keys.append(model_key(str(moved), torch.bfloat16, None))
    keys += [model_key(str(moved), torch.float32, seed) for seed in (0, 1)]  # random weights
    change_a_weight(moved)
    keys.append(model_key(str(moved), torch.float32, None))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    keys.append(model_key(str(moved), torch.float32, None))
    assert len(set(keys)) == len(keys)


def test_numbers_are_written_and_found_in_any_number_of_files(tmp_path: Path) -> None:
    numbers = {bytes([i]) * 16: -0.1 * i for i in range(5)}
    assert reference._load(tmp_path / "none")[1] == {}
    reference._add(tmp_path, dict(list(numbers.items())[:3]))
    reference._add(tmp_path, dict(list(numbers.items())[3:]))
    reference._add(tmp_path, dict(list(numbers.items())[3:]))  # another run, at the same time
    assert len(list(tmp_path.iterdir())) == 2
    assert reference._load(tmp_path)[1] == pytest.approx(numbers, abs=1e-7)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from rl2lightning.algorithms import reference
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # all is written, nothing is sure yet
reference._add(Path({str(tmp_path)!r}), {{bytes(16): 1.0}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.suffix != ".pt"
    assert reference._load(tmp_path)[1] == {}


def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    reference._add(tmp_path, {bytes(16): 1.0})
    (file,) = tmp_path.iterdir()
    reference._add(tmp_path, {bytes([1]) * 16: -1.0})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match=rf"{file.name}' is damaged: .* scored again; delete that file"):
        assert reference._load(tmp_path)[1] == {bytes([1]) * 16: -1.0}


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [(ValueError("damaged"), "^damaged$"), (MemoryError(), r"^MemoryError\(\)$"), (ValueError(), "^$")],
)
def test_what_fails_on_the_first_process_is_heard_of_on_the_others(error: Exception, elsewhere: str) -> None:
    def fail():
        raise error

    sent = []

    def first(x):
        sent.append(x)
        return x

    for is_first, broadcast, kind, match in (
        (True, first, type(error), None),
        (False, lambda _: sent[0], ValueError, elsewhere),
    ):
        strategy: Any = SimpleNamespace(is_global_zero=is_first, broadcast=broadcast)
        numbers = PrecomputedReference(strategy, Path("anywhere"), fail)
        with pytest.raises(kind, match=match):
            numbers.prepare([], lambda seqs: seqs.weights, show_progress=False)


# ---- in a run


class Counted(DPO):
    """Counts what the reference scores."""

    num_scored = 0

    def score(self, model, seqs: Sequences):
        if model is not self.policy:
            self.num_scored += len(seqs)
        return super().score(model, seqs)


def pair_rows(num: int) -> list[dict]:
    return [{"messages": f"{i}+1=", "chosen": str(i + 1), "rejected": f"no{i}"} for i in range(num)]


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., int]:
    """Sequences that a short run in this directory has to score, training rows and held-out ones."""

    def run(model: Path | str, rows: list[dict], *, stage: str = "fit", **settings) -> int:
        path = write_rows(tmp_path / "pairs.jsonl", rows)
        trainer = quiet_trainer(tmp_path / "runs", max_steps=2, num_sanity_val_steps=-1)
        module = Counted(str(model), **settings)
        data = PreferenceDataModule(path, batch_size=4, val_ratio=0.25)
        if stage == "fit":
            trainer.fit(module, datamodule=data)
        else:
            trainer.validate(module, datamodule=data, verbose=False)
        assert module.reference is None
        assert module.num_scored == 0 or settings or list((tmp_path / "runs/reference_logps").rglob("*.pt"))
        return module.num_scored

    return run


def test_what_was_scored_is_found_again_and_only_what_changed_is_scored_anew(own_model: Path, scored) -> None:
    assert scored(own_model, pair_rows(16), stage="validate") == 8  # four held-out pairs
    assert scored(own_model, pair_rows(16)) == 24  # twelve more to train on
    assert scored(own_model, pair_rows(16)) == 0
    assert scored(own_model, pair_rows(16), stage="validate") == 0
    changed = pair_rows(16)
    changed[3]["chosen"] = "x"
    assert scored(own_model, changed) == 1
    assert scored(own_model, pair_rows(18)) == 4
    template = own_model / "chat_template.jinja"
    template.write_text("{{ 'A' }}" + template.read_text())
    assert scored(own_model, pair_rows(16)) == 32
    change_a_weight(own_model)
    assert scored(own_model, pair_rows(16)) == 32
    assert scored(own_model, pair_rows(16)) == 0


def test_what_a_damaged_file_held_is_scored_again_and_replaces_it(tiny_model: str, tmp_path: Path, scored) -> None:
    assert scored(tiny_model, pair_rows(8)) == 16
    (file,) = (tmp_path / "runs/reference_logps").rglob("*.pt")
    file.write_bytes(b"nothing that was pickled")
    with pytest.warns(UserWarning, match="is damaged"):
        assert scored(tiny_model, pair_rows(8)) == 16
    assert scored(tiny_model, pair_rows(8)) == 0


def test_rows_of_which_nothing_is_left_are_refused_before_a_step(tiny_model: str, tmp_path: Path) -> None:
    data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", pair_rows(8)), max_length=2, val_ratio=0.25)
    module, trainer = Counted(tiny_model), quiet_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"all 8 samples were dropped, .*: raise data\.max_length, or look at"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == module.num_scored == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"reference": "live"}, "reference is live"), ({"preference_loss": SimPO()}, "SimPO has none")],
)
def test_a_cache_of_what_is_not_kept_is_refused(settings: dict, why: str) -> None:
    with pytest.raises(
        ValueError, match=f"reference_cache='somewhere' would keep nothing, since {why}: set it to null"
    ):
        DPO("some/model", reference_cache="somewhere", **settings)


@pytest.mark.parametrize("loss", [SimPO(), ORPO()])
def test_a_live_reference_of_a_loss_that_needs_none_is_said_to_be_none(loss: PreferenceLoss, caplog) -> None:
    with caplog.at_level("INFO"):
        DPO("some/model", preference_loss=loss)
        assert not caplog.messages
        DPO("some/model", preference_loss=loss, reference="live")
    assert caplog.messages == [f"{type(loss).__name__} has no reference: reference 'live' is not used"]


def test_another_directory_has_its_own_numbers(tiny_model: str, tmp_path: Path, scored) -> None:
    shared = {"reference_cache": str(tmp_path / "shared")}
    assert [scored(tiny_model, pair_rows(8), **shared) for _ in range(2)] == [16, 0]
    assert scored(tiny_model, pair_rows(8)) == 16


def test_a_directory_that_cannot_be_written_to_is_named(tiny_model: str, tmp_path: Path, scored) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written to .* set model\.init_args\.reference_cache"):
        scored(tiny_model, pair_rows(8), reference_cache=str(tmp_path / "file"))


def test_rows_that_nobody_read_beforehand_are_an_error(tiny_model: str, tmp_path: Path) -> None:
    class Changing(PreferenceDataModule):
        def read_ahead(self, *, training: bool):
            return super().read_ahead(training=False)

    data = Changing(write_rows(tmp_path / "pairs.jsonl", pair_rows(8)), batch_size=4, val_ratio=0.25)
    with pytest.raises(
        ValueError, match=r"8 of 8 sequences were not among the rows .* set model\.init_args\.reference"
    ):
        quiet_trainer(tmp_path).fit(DPO(tiny_model), datamodule=data)
