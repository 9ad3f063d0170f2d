"""vLLM's CUDA graphs beside a trainer that clears what it takes for its own memory; needs a GPU and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.types import SamplingParams

pytestmark = pytest.mark.gpu
MODEL = str(Path(__file__).parents[2] / "configs/quickstart/model")


def test_graphs_survive_what_lightning_clears_when_a_run_begins() -> None:
    pytest.importorskip("vllm")
    from lightning.fabric.accelerators.cuda import _clear_cuda_memory
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", torch.cuda.current_device())
    engine = VLLMEngine(max_num_seqs=1024, kv_cache_memory_bytes=2**30)
    engine.start(EngineSpec(MODEL, device, torch.float32, ()))
    try:
        assert engine._llm.llm_engine.vllm_config.cache_config.block_size == 64
        engine.sleep()
        _clear_cuda_memory()
        others = [torch.full((2**20,), float("nan"), device=device) for _ in range(256)]  # whose memory it is now
        model = AutoModelForCausalLM.from_pretrained(MODEL).to(device).float()
        engine.update_weights(model.named_parameters(), version=0)
        engine.wake()
        # batches of all sizes: padded to the sizes of graphs, with prompts and without
        for num_prompts in (500, 127, 64, 17, 3):
            prompts = [[3 + i % 9, 5, 4 + i % 7, 9, 8, 7, 6][: 3 + i % 5] for i in range(num_prompts)]
            found = engine.generate(prompts, SamplingParams(max_tokens=12), list(range(num_prompts)))
            for completion in found[::50]:
                ids = torch.tensor([completion.prompt_ids + completion.token_ids], device=device)
                with torch.no_grad():
                    logps = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
                plain = logps.gather(-1, ids[0, len(completion.prompt_ids) :, None])[:, 0].cpu()
                # vLLM multiplies in TF32
                torch.testing.assert_close(torch.tensor(completion.logps), plain, atol=0.02, rtol=0)
        assert all(bool(x.isnan().all()) for x in others)  # nobody wrote there
    finally:
        engine.shutdown()
