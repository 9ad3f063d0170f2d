"""Reward models outside of their training: written so that others serve them right, and loaded to score."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl2lightning.models.build import read_weights, resolve_model
from rl2lightning.models.heads import SCALAR_HEAD, ScalarHead, ScalarModel
from rl2lightning.models.packed import PACKED_ATTENTION, register_packed_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# transformers patches its classes while it loads a model: two threads at a time would leave them patched, and rewards
# are asked for from threads
_LOADING = threading.Lock()


def set_padding(config: PretrainedConfig, tokenizer: Any) -> bool:
    """Gives config and tokenizer one padding token, in place; returns whether there is one to be had.

    transformers reads a reward at the last token that is not padding. So no sequence may end with the padding token, as
    it does where that is the end-of-sequence token, too: the reward would be read one token early. Without one,
    transformers scores sequences one at a time and refuses batches.
    """
    template = str(tokenizer.chat_template or "")
    candidates = [tokenizer.pad_token_id, config.pad_token_id, tokenizer.unk_token_id]
    # then whatever is reserved: special tokens, into which no text turns
    candidates += sorted((i for i, token in tokenizer.added_tokens_decoder.items() if token.special), reverse=True)
    eos = config.eos_token_id
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, *(eos if isinstance(eos, list) else [eos])}
    text_config = config.get_text_config()

    def fits(i: int | None) -> bool:
        if i is None or i in ends or not 0 <= i < text_config.vocab_size:
            return False
        token = tokenizer.convert_ids_to_tokens(i)
        return token is not None and token not in template  # with which conversations are rendered

    found = next(filter(fits, candidates), None)
    config.pad_token_id = text_config.pad_token_id = found
    if found is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(found)
    return found is not None


def load_scalar_model(path: str, device: torch.device, dtype: torch.dtype) -> ScalarModel:
    """A model for sequence classification with one label, whole on one device, frozen, its head in fp32.

    It is read by transformers and takes no part in any mesh, so one process may load it alone.

    Args:
        path: directory or hub name.
    """
    from transformers import AutoModelForSequenceClassification

    directory = resolve_model(path)
    register_packed_attention()
    with _LOADING:
        lm, found = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=dtype, attn_implementation=PACKED_ATTENTION, output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"'{path}' is no reward model: it has no '{missing[0]}'; name a directory that `export` wrote")
    parameters = dict(lm.named_parameters())
    head = parameters.get(SCALAR_HEAD)
    if head is None or head.shape[0] != 1 or "score.bias" in parameters:
        raise ValueError(
            f"'{path}' ({type(lm).__name__}, {lm.config.num_labels} labels) has no head '{SCALAR_HEAD}' of one row "
            "without a bias: serve it and use ClassifyReward"
        )
    lm.score = ScalarHead(head.shape[1], 1, bias=False)
    # before it was rounded to the type of the rest; where names in files are others, after it
    stored = dict(read_weights(directory, {SCALAR_HEAD}))
    exact = stored[SCALAR_HEAD] if SCALAR_HEAD in stored else head.detach()
    lm.score.weight = nn.Parameter(exact.to(torch.float32))
    return ScalarModel(lm.requires_grad_(False).to(device)).eval()
