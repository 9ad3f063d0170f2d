"""What transformers' models say, one sequence at a time: no packing, no FSDP, no chunks."""

import torch

from rl2lightning.types import Sequences


def plain_logps(model, seqs: Sequences) -> list[torch.Tensor]:
    """Log-probs of the actions of each sequence."""
    out = []
    for i in range(len(seqs)):
        one = seqs.select([i])
        logits = model(input_ids=one.input_ids[None]).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(1, one.input_ids[1:, None])[:, 0]
        out.append(logps[one.action_mask[1:]])
    return out
