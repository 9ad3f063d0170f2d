"""Models over packed sequences: the policy returns log-probabilities of the tokens it is asked about, never logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl2lightning.functional.logps import VocabShard, token_logps
from rl2lightning.models.packed import Pack, pack
from rl2lightning.types import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl2lightning.models.lora import Adapters


class PackedModel(nn.Module):
    """A Hugging Face model (`lm`) that runs packed micro-batches; head and all, one FSDP root.

    `pack` gives a micro-batch its layout; a plugin that spreads sequences over processes puts its own in its place.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.pack: Pack = pack
        self.adapters: Adapters | None = None  # which learn in the place of the weights

    @property
    def full_precision(self) -> list[nn.Module]:
        """Modules whose parameters a mixed precision leaves as they are."""
        return []

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

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        _refuse_scaled_logits(lm)

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
        weight, bias, shard = head.weight, head.bias, None  # type: ignore[union-attr]
        if isinstance(weight, DTensor):  # under tensor parallelism, cut by words
            shard = VocabShard.of(weight)
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()  # type: ignore[union-attr]
        logps, entropies = token_logps(
            hidden[layout.predictors],  # x[i] describes token i given the tokens before it
            weight,  # type: ignore[arg-type]
            layout.targets,
            temperature=temperature,
            entropy=entropy,
            fuse=hidden.is_cuda,
            softcap=getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None),
            bias=bias,  # type: ignore[arg-type]
            shard=shard,
        )
        if entropies is None:
            return layout.scatter_actions(logps, seqs.num_tokens), None
        return layout.scatter_actions(logps, seqs.num_tokens), layout.scatter_actions(entropies, seqs.num_tokens)


_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")  # Granite, Cohere, Falcon-H1


def _refuse_scaled_logits(lm: PreTrainedModel) -> None:
    """Log-probs are taken of hidden states times the head's weight; a factor of the family's own would be lost."""
    for name in _SCALES:
        factor = getattr(lm.config.get_text_config(), name, None)
        if factor not in (None, 1, 1.0):
            raise ValueError(
                f"{type(lm).__name__} scales its logits ({name}={factor}), which is not supported: "
                "set model.init_args.model to a model of another family"
            )
