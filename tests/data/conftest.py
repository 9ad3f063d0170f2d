"""Tokenizers made on the spot: three families of chat templates, over single characters and over a trained BPE."""

from types import SimpleNamespace

import datasets
import pytest
from lightning.pytorch.trainer.states import TrainerFn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{{- '<|bos|>' }}{%- for m in messages %}\
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# thinking is kept after the last user turn only, tool results are user turns and follow one another in one of them
THINKING = """\
{%- if tools %}{{ '<|im_start|>system\n' }}\
{%- for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}\
{%- set ns = namespace(last=0) %}\
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for m in messages %}\
{%- if m.role == 'tool' %}\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}\
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}\
{%- elif m.role == 'assistant' and loop.index0 < ns.last %}\
{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}\
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make_tokenizer(template, *, eos, pad="<|pad|>", bpe=False):
    if bpe:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["assistant\n\nbanana bananas user", "think bananas\n\n"] * 20, trainer)
    else:
        characters = [chr(i) for i in range(32, 127)] + ["\n"]
        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos)
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def chatml():
    return make_tokenizer(CHATML, eos="<|im_end|>", pad="<|im_end|>")  # PAD is EOS, as in many base models


@pytest.fixture(scope="session")
def llama3():
    return make_tokenizer(LLAMA3, eos="<|eot_id|>")


@pytest.fixture(scope="session")
def thinking():
    return make_tokenizer(THINKING, eos="<|im_end|>")


@pytest.fixture(scope="session")
def bpe():
    return make_tokenizer(CHATML, eos="<|im_end|>", bpe=True)


@pytest.fixture(scope="session")
def tokenizer_path(chatml, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    chatml.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def make_trainer(tokenizer_path):
    """What a data module asks its trainer for."""

    def make(*, rank=0, size=1, updates_per_rollout=1, validating=False, tokenizer=tokenizer_path):
        return SimpleNamespace(
            strategy=SimpleNamespace(data_rank=rank, data_size=size),
            lightning_module=SimpleNamespace(
                tokenizer_path=tokenizer, updates_per_rollout=updates_per_rollout, predicts_completions=True
            ),
            global_step=0,
            overfit_batches=0.0,
            state=SimpleNamespace(fn=TrainerFn.VALIDATING if validating else TrainerFn.FITTING),
        )

    return make
