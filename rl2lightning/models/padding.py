"""The padding token of a reward model that is written for others to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
