"""Models over packed sequences: the policy returns log-probabilities of the tokens it is asked about, never logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rl2lightning.functional.logps import token_logps
from rl2lightning.models.packed import Pack, pack
from rl2lightning.types import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedModel(nn.Module):
    """A Hugging Face model (`lm`) that runs packed micro-batches; head and all, one FSDP root.

    `pack` gives a micro-batch its layout; a plugin that spreads sequences over processes puts its own in its place.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.pack: Pack = pack

    def hidden_states(self, seqs: Sequences) -> Tensor:
        """Last hidden states [m, H] of this process's rows."""
        layout = seqs.layout
        return self.lm.base_model(
            input_ids=layout.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            packed=layout,
        ).last_hidden_state[0]


class Policy(PackedModel):
    """A causal LM whose forward returns log-probs.

    Only the positions that predict an action go through the head, in chunks, so no [n, vocabulary] tensor exists.
    """

    def forward(self, seqs: Sequences, *, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the actions at `temperature`, and the entropies of their distributions if asked for.

        Args:
            seqs: a micro-batch prepared by `pack`.
            temperature: what the logits are divided by; that of the sampling the tokens came from.
            entropy: whether to return entropies.

        Returns:
            [n] fp32, 0 off actions; and likewise or None.
        """
        layout = seqs.layout
        hidden = self.hidden_states(seqs)
        head = self.lm.get_output_embeddings()
        logps, entropies = token_logps(
            hidden[layout.predictors],  # x[i] describes token i given the tokens before it
            head.weight,  # type: ignore[union-attr, arg-type]
            layout.targets,
            temperature=temperature,
            entropy=entropy,
            fuse=hidden.is_cuda,
            softcap=getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None),
        )
        if entropies is None:
            return layout.scatter_actions(logps, seqs.num_tokens), None
        return layout.scatter_actions(logps, seqs.num_tokens), layout.scatter_actions(entropies, seqs.num_tokens)
