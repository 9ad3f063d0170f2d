"""What an engine of vLLM keeps from happening in its process; none of it needs vLLM."""

from __future__ import annotations

import pytest
import torch

from rl2lightning.rollout.vllm_backend import process


def test_nobody_frees_the_workspaces_that_graphs_were_captured_with_until_the_engine_ends(monkeypatch):
    freed: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("freed"), raising=False)
    kept = process.WorkspacesKept()
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
    kept = [process.WorkspacesKept(), process.WorkspacesKept()]
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
    kept = process.WorkspacesKept()
    kept.apply()
    kept.revert()
    assert not hasattr(torch._C, "_cuda_clearCublasWorkspaces")
