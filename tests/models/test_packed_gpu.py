"""On a GPU: the variable-length kernel against one sequence at a time, and a step in bf16-mixed."""

import importlib.util
from pathlib import Path

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl2lightning import SFT
from rl2lightning.models.packed import PACKED_ATTENTION, pack, register_packed_attention
from rl2lightning.models.policy import Policy
from rl2lightning.types import Sequences

pytestmark = pytest.mark.gpu


def sequences(lengths: list[int]) -> Sequences:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(6, 100, (n,), generator=g).tolist() for n in lengths]
    return Sequences.from_lists(ids, [[False] + [True] * (n - 1) for n in lengths])


def test_varlen_attention_equals_one_by_one(make_model) -> None:
    path = make_model(head_dim=64)
    register_packed_attention()
    device, lengths = torch.device("cuda"), [3, 50, 17, 200, 2]
    seqs = sequences(lengths)
    packed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    with torch.no_grad():
        ours, _ = Policy(packed.to(device))(pack(seqs, device, torch.bfloat16), temperature=1.0)
        theirs = []
        for i in range(len(seqs)):
            ids = seqs.select([i]).input_ids[None].to(device)
            logps = exact(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            theirs += [logps.new_zeros(1), logps]
    gap = (ours - torch.cat(theirs)).abs()
    assert float(gap.mean()) < 0.05  # bf16 against fp32; a sequence that saw its neighbour is off by more than 1
    assert float(gap.max()) < 0.5


def test_a_bf16_step_has_fp32_masters_and_the_loss_of_fp32(tiny_model: str) -> None:
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).parents[1] / "distributed/cases.py")
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        module = SFT(tiny_model, max_tokens_per_device=64)
        trainer = L.Trainer(
            strategy="fsdp2_tp",
            accelerator="gpu",
            devices=1,
            precision=precision,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=cases.Share(cases.batch([20, 30, 9]), cases.ChatBatch))
        losses[precision] = float(trainer.callback_metrics["train/loss"])
        assert {p.dtype for p in module.policy.parameters()} == {torch.float32}
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=2e-2)
