"""vLLM, really run, gives an exported reward model the scores that it has in process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl2lightning.models.build import load_config, save_pretrained, scalar_config
from rl2lightning.models.serving import set_padding
from rl2lightning.rewards import RewardModel
from rl2lightning.types import Trajectory

pytestmark = pytest.mark.vllm

# in a process of its own: vLLM keeps what it has set up
SERVE = """
import json, sys
import rl2lightning  # before vLLM: see compat.do_without_companions_for_cuda
from vllm import LLM

conversations, texts = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
          kv_cache_memory_bytes=1 << 26, gpu_memory_utilization=0.05)
classified = llm.classify([{"prompt_token_ids": ids} for ids in conversations], use_tqdm=False)
scored = llm.score(*texts, use_tqdm=False)
print("scores:", json.dumps([[x.outputs.probs for x in classified], [x.outputs.score for x in scored]]))
"""


def test_vllm_serves_the_same_scores(make_model: Callable[..., str], tmp_path: Path, monkeypatch) -> None:
    start = make_model(head_dim=32, hidden_size=64, initializer_range=0.1)
    config, tokenizer = load_config(start), AutoTokenizer.from_pretrained(start)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(scalar_config(config), dtype=torch.float32)
    assert set_padding(config, tokenizer)
    directory = str(tmp_path / "model")
    save_pretrained(config, dict(model.named_parameters()), directory, tokenizer=tokenizer)
    messages = [
        [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)[: 1 + a % 2]}]
        for a in range(5, 11)
        for b in range(3)
    ]
    ids = [tokenizer.apply_chat_template(m, return_dict=False) for m in messages]
    texts = ["<|user|>1+1=<|end|>", "<|assistant|>2<|end|>"]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    command = [sys.executable, "-c", SERVE, directory, json.dumps([ids, texts])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    classified, scored = json.loads(done.stdout.rpartition("scores:")[2])
    reward = RewardModel(directory, dtype="float32")
    expected = torch.tensor([[reward(Trajectory(row={}, group_id=0, messages=m))] for m in messages])
    assert expected.std() > 0.05
    torch.testing.assert_close(torch.tensor(classified), expected, rtol=1e-4, atol=1e-5)
    whole = RewardModel(directory, dtype="float32", token_in=True)
    pair = tokenizer.encode("".join(texts))
    assert scored == pytest.approx([whole(Trajectory(row={}, group_id=0, token_ids=pair))], abs=1e-4)
