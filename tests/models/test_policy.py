"""What a policy makes of its head; packing and numbers are test_packed's and tests/distributed's."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, Qwen3Config

from rl2lightning.models.build import build_causal_lm
from rl2lightning.models.packed import pack
from rl2lightning.models.policy import Policy
from rl2lightning.types import Sequences

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GraniteConfig(**SMALL, logits_scaling=8.0), r"GraniteForCausalLM scales its logits \(logits_scaling=8\.0\)"),
        (CohereConfig(**SMALL, logit_scale=0.25), r"CohereForCausalLM scales its logits \(logit_scale=0\.25\)"),
    ],
)
def test_families_that_scale_their_logits_are_refused(config, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Policy(build_causal_lm(config, torch.float32))


def test_a_scale_of_one_is_none() -> None:
    Policy(build_causal_lm(GraniteConfig(**SMALL, logits_scaling=1.0), torch.float32))


def test_the_bias_of_a_head_counts() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    lm = build_causal_lm(copy.deepcopy(config), torch.float32).to_empty(device="cpu")
    for model in (reference, lm):
        model.lm_head = nn.Linear(32, 50, bias=True)
    lm.load_state_dict(reference.state_dict())
    for name, buffer in reference.named_buffers():
        lm.get_buffer(name).copy_(buffer)
    ids = torch.randint(50, (9,))
    seqs = Sequences.from_lists([ids.tolist()], [[False] + [True] * 8])
    with torch.no_grad():
        logps, _ = Policy(lm)(pack(seqs, torch.device("cpu"), torch.float32), temperature=0.8)
        expected = (reference(input_ids=ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[1:, None])
    torch.testing.assert_close(logps[1:], expected[:, 0])
