from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rl2lightning.rollout.engine import EngineSpec, RolloutEngine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.vllm import VLLMEngine

# few rows at a time, so that requests wait, join and leave all the time
ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "hf": lambda: HFEngine(max_num_seqs=4),
    "vllm": lambda: VLLMEngine(max_num_seqs=4, kv_cache_memory_bytes=32 << 20),
}
CONTRACT = {"stop_token_ids": (2,), "max_model_len": 64}
FOLLOWS_GRAMMARS = {"hf": False, "vllm": True}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer():
    """One token a character: ids 0 pad, 1 <|im_start|>, 2 <|im_end|>, then printable ASCII and the line break."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<|im_start|>", "<|im_end|>", *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int = 0):
    """A tied Qwen3 with weights large enough for lively distributions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6.0)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path):
    """From the model's directory, where engines that follow grammars read it again."""
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(model_path)
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def model():
    return build_model()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, model) -> Path:
    """A model directory; engines read its config only."""
    path = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def started() -> Iterator[dict[str, RolloutEngine]]:
    """Engines that tests have started, kept because a start takes seconds."""
    engines: dict[str, RolloutEngine] = {}
    yield engines
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(
    request: pytest.FixtureRequest, model_path: Path, tokenizer, started: dict[str, RolloutEngine]
) -> RolloutEngine:
    """Started, as if it never had any weights."""
    more = {"tokenizer": tokenizer, "structured": FOLLOWS_GRAMMARS[request.param]}
    spec = EngineSpec(str(model_path), "cpu", torch.float32, **CONTRACT, **more)
    engine = started.setdefault(request.param, ENGINES[request.param]())
    if engine.running_on != spec or engine.unfinished:
        engine.start(spec)
    engine.version = None
    engine.wake()
    return engine


@pytest.fixture
def processed():
    """Log-probs [len(completion)] of a completion by one plain forward over prompt and completion."""

    def logps(model, prompt_ids: list[int], token_ids: list[int], *, temperature: float = 1.0, warpers=()):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        scores = logits / temperature
        for warper in warpers:
            scores = warper(torch.tensor([[0]]), scores)
        return scores.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]

    return logps
