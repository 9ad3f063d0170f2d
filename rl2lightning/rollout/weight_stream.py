"""What engines do with a stream of weights besides loading it: check it, and read it to its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@contextmanager
def read_to_end(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Inside, an error is raised once the stream has passed: gathering it may take every process, failed or not."""
    stream = iter(weights)
    try:
        yield stream
    except Exception:
        for _ in stream:
            pass
        raise


@dataclass(frozen=True)
class ExpectedWeights:
    """What a complete push to a model holds: under each accepted name, the weight's own name and shape.

    Tied weights have several names; the one under which the model lists its parameters is their own.
    """

    model: str
    shapes: dict[str, torch.Size]  # own name -> shape, in the order of the model
    own_name: dict[str, str]  # accepted name -> own name

    @staticmethod
    def of(config: PretrainedConfig) -> ExpectedWeights:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        own = {id(p): name for name, p in model.named_parameters()}
        shapes = {name: p.shape for name, p in model.named_parameters()}
        names = {name: own[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        return ExpectedWeights(type(model).__name__, shapes, names)

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights under their own names, each once.

        Raises:
            ValueError: a name that the model lacks, a wrong shape, a tied weight with two values; at the end, if one
                is missing.
        """
        seen: dict[str, Tensor | None] = {}
        tied = {own for name, own in self.own_name.items() if name != own}
        for name, weight in weights:
            if name not in self.own_name:
                raise ValueError(f"pushed weight '{name}' is none of {self.model}'s; the models differ")
            own = self.own_name[name]
            if weight.shape != self.shapes[own]:
                shapes = f"{list(weight.shape)}, the engine's {list(self.shapes[own])}"
                raise ValueError(f"pushed weight '{name}' has shape {shapes}; the models differ")
            if own in seen:
                before = seen[own]
                if before is not None and not torch.equal(before, weight):
                    raise ValueError(
                        f"'{name}' is tied in the engine's model, but another value came under its other name"
                    )
                continue
            seen[own] = weight.detach() if own in tied else None
            yield own, weight.detach()
        if missing := [name for name in self.shapes if name not in seen]:
            raise ValueError(f"the push left out {len(missing)} weights, the first being '{missing[0]}'")
