"""Where torch is a CPU build and its companions are for CUDA, what imports them can be imported all the same."""

import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rl2lightning import compat


@pytest.mark.vllm
def test_lightning_transformers_and_vllm_can_be_imported_after_this_package() -> None:
    code = "import rl2lightning, lightning, transformers.models.auto.image_processing_auto, vllm; vllm.LLM"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


class Installed:
    """A distribution with one library."""

    def __init__(self, version: str, library: Path) -> None:
        self.version, self.files, self._library = version, [library.name], library

    def locate_file(self, name: str) -> Path:
        return self._library


@pytest.mark.parametrize(
    ("torch", "companion", "links_to", "missing"),
    [
        ("2.13.0+cpu", "2.11.0", b"libc10_cuda.so", True),
        ("2.13.0+cpu", "2.11.0", b"libc10.so", False),  # built for the CPU, if not named so
        ("2.13.0+cpu", "2.11.0+cpu", b"libc10_cuda.so", False),
        ("2.13.0", "2.11.0", b"libc10_cuda.so", False),  # both for CUDA
    ],
)
def test_only_companions_that_cannot_load_count_as_missing(
    monkeypatch, tmp_path: Path, torch: str, companion: str, links_to: bytes, missing: bool
) -> None:
    library = tmp_path / "_torchaudio.abi3.so"
    library.write_bytes(b"\x7fELF" + links_to)
    found = {"torch": Installed(torch, library), "torchaudio": Installed(companion, library)}

    def distribution(name: str) -> Installed:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(compat.importlib.metadata, "distribution", distribution)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    finders = list(sys.meta_path)
    compat.do_without_companions_for_cuda()
    assert ("torchaudio" in sys.modules) == missing
    assert sys.meta_path == finders
    sys.modules.pop("torchaudio", None)


def test_an_advertisement_is_dropped_and_what_is_said_beside_it_is_not(caplog) -> None:
    compat.drop_misplaced_messages()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=logger.name):
        logger.info("Tip: try installing [litlogger](https://pypi.org/project/litlogger/)")
        logger.info("GPU available: False")
    assert [record.message for record in caplog.records] == ["GPU available: False"]
