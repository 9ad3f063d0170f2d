"""The policy: a causal LM whose forward returns log-probabilities of the tokens it is asked about, never logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rl2lightning.functional.logps import token_logps
from rl2lightning.types import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM (`lm`) so that head and loss run inside the forward of one FSDP root.

    Only the positions that predict an action go through the head, in chunks, so no [n, vocabulary] tensor exists.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, seqs: Sequences, *, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the actions at `temperature`, and the entropies of their distributions if asked for.

        Args:
            seqs: a micro-batch prepared by `models.packed.pack`.
            temperature: what the logits are divided by; that of the sampling the tokens came from.
            entropy: whether to return entropies.

        Returns:
            [n] fp32, 0 off actions; and likewise or None.
        """
        layout = seqs.layout
        hidden = self.lm.base_model(
            input_ids=seqs.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            packed=layout,
        ).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        logps, entropies = token_logps(
            hidden[layout.actions - 1],  # x[i] describes token i given the tokens before it
            head.weight,  # type: ignore[union-attr, arg-type]
            seqs.input_ids[layout.actions],
            temperature=temperature,
            entropy=entropy,
            fuse=hidden.is_cuda,
            softcap=getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None),
        )
        num_tokens = seqs.num_tokens
        # index_put into zeros keeps shapes static: no boolean indexing, so no host synchronisation
        scattered = logps.new_zeros(num_tokens).index_put((layout.actions,), logps)
        if entropies is None:
            return scattered, None
        return scattered, entropies.new_zeros(num_tokens).index_put((layout.actions,), entropies)
