"""The padding token of a reward model: transformers must find the last token of every sequence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from rl2lightning.models.build import scalar_config
from rl2lightning.models.serving import set_padding

TEMPLATE = "{% for m in messages %}<start>{{ m.content }}<turn>{% endfor %}"


def made(special: list[str], *, rows: int = 16, eos_ids: Any = 1, pad_id: int | None = None, **named: str):
    """Config and tokenizer of a few words and special tokens; `named` are pad_token and the like."""
    words = ["a", "</s>", "b", "<start>", "<turn>", *special]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=named.get("unk_token")))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", **named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<turn>", *special]})
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=rows, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, eos_token_id=eos_ids, pad_token_id=pad_id, bos_token_id=None,
    )  # fmt: skip
    return config, tokenizer


@pytest.mark.parametrize(
    ("special", "settings", "token"),
    [
        (["<pad>"], {"pad_token": "<pad>"}, "<pad>"),  # its own
        (["<pad>"], {"pad_id": 5}, "<pad>"),  # the config's, which the tokenizer did not know
        (["<r0>", "<r1>"], {"pad_token": "</s>"}, "<r1>"),  # its own ends sequences
        (["<r0>", "<r1>"], {"pad_token": "<turn>"}, "<r1>"),  # its own ends turns
        (["<r0>", "<r1>"], {"pad_token": "<r1>", "eos_ids": [1, 6]}, "<r0>"),  # its own is another end of sequence
        (["<unk>", "<r0>"], {"unk_token": "<unk>"}, "<unk>"),
        (["<r0>", "<r1>"], {"rows": 6}, "<r0>"),  # one that has no embedding is none
        ([], {"pad_token": "</s>"}, None),
    ],
)
def test_nothing_that_ends_a_sequence_is_padded_with(special: list[str], settings: dict, token: str | None) -> None:
    config, tokenizer = made(special, **settings)
    assert set_padding(config, tokenizer) is (token is not None)
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert config.pad_token_id == expected
    if token is not None:
        assert tokenizer.pad_token == token
        assert tokenizer.pad_token_id == expected


@pytest.mark.parametrize("special", [["<r0>"], []])
def test_batches_have_the_scores_of_single_sequences_or_are_refused(special: list[str], tmp_path: Path) -> None:
    config, tokenizer = made(special, pad_token="</s>", pad_id=1)
    ids = [[0, 2, 0, 1], [2, 1], [0, 2]]  # two end with what was the padding token
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(scalar_config(config)).eval().requires_grad_(False)
    hidden = [model.model(input_ids=torch.tensor([x])).last_hidden_state[0, -1] for x in ids]
    expected = torch.stack(hidden) @ model.score.weight[0]
    wrong = model(input_ids=torch.tensor(ids[:1])).logits[0, 0]
    assert abs(float(wrong) - float(expected[0])) > 1e-3  # read one token early
    set_padding(model.config, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).requires_grad_(False)
    single = torch.stack([model(input_ids=torch.tensor([x])).logits[0, 0] for x in ids])
    torch.testing.assert_close(single, expected)
    if special:
        batch = AutoTokenizer.from_pretrained(tmp_path).pad({"input_ids": ids}, return_tensors="pt")
        torch.testing.assert_close(model(**batch).logits[:, 0], expected)
    else:
        with pytest.raises(ValueError, match="Cannot handle batch sizes > 1"):
            model(input_ids=torch.tensor([ids[1], ids[2]]))
