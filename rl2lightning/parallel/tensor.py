"""Tensor parallelism: the matrices of each layer are cut over the processes of the mesh axis `tensor`.

Megatron-LM's scheme (Shoeybi et al., 2019, arXiv:1909.08053): what enters attention or an MLP is whole on every
process, the first matrix product is cut by outputs, the last by inputs, and one all-reduce adds the parts up. With
sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198) what lies between is cut by rows instead, and the
all-reduce becomes a reduce-scatter and an all-gather of the same traffic. Which matrix is cut how is read from Hugging
Face's `base_model_tp_plan`; everything else of it is ours, since its own runtime gives the norms of queries and keys
wrong gradients when several micro-batches are accumulated.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from rl2lightning.parallel.tensor_layers import (
    Column,
    GatheredColumn,
    KeyValue,
    Row,
    SplitRow,
    Whole,
    Words,
    cross,
    distribute,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STYLES = {
    "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "replicated_with_grad_allreduce", "gathered",
}  # fmt: skip

# what a family's own plan leaves unsaid, by model type
_AMENDMENTS: dict[str, dict[str, str]] = {
    # norms over the whole width, between projections whose outputs are gathered
    "olmo2": {"layers.*.self_attn.q_norm": "gathered", "layers.*.self_attn.k_norm": "gathered"},
}


def apply_tensor_parallel(lm: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Cuts a model, on meta or not, over a mesh of one axis; before activation checkpointing and `fully_shard`.

    Embedding and output layer are cut by words: a causal LM's head holds the rows of its own words alone. Other layers
    on top, such as a scalar head, stay whole. With `sequence_parallel` a multiple of the mesh's size of rows must come.

    Raises:
        ValueError: numbers that do not divide, or a model whose layers are not all understood.
    """
    if mesh.size() == 1:
        return
    config = lm.config.get_text_config()
    plan = tensor_plan(config, mesh.size())
    _refuse_dropout(lm)
    stream = Shard(1) if sequence_parallel else Replicate()  # of the activations [1, m, H] between attention and MLP
    base, embedding, head = lm.base_model, lm.get_input_embeddings(), lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)

    modules = dict(base.named_modules())
    regions = {name.rpartition(".")[0] for name in modules if _pattern(name) in plan}  # attention and MLP of each layer
    owners = {name: module for name, module in modules.items() if module._parameters and module is not embedding}
    norms = {name for name in owners if _pattern(name) not in plan}
    for name in norms:
        inside = any(f"{name}.".startswith(f"{region}.") for region in regions)
        if inside or any(p.ndim != 1 for p in owners[name].parameters(recurse=False)):
            raise ValueError(
                f"{type(lm).__name__} has parameters in '{name}' that its tensor-parallel plan does not speak of: "
                f"set strategy.tensor={mesh.size()} to 1"
            )
    for name in regions:
        _enter_whole(modules[name], mesh, stream)
    for name, module in owners.items():
        if name in norms:
            Whole.take(module, mesh, grads=Partial() if sequence_parallel else Replicate())
        else:
            kv_heads = config.num_key_value_heads if _is_key_value(name) else None
            _cut(module, plan[_pattern(name)], mesh, stream, kv_heads=kv_heads)
    Words.take(embedding, mesh, out=stream)
    if sequence_parallel:
        _leave_whole(base, mesh)
    for module in lm.children():
        if module is head:
            distribute(module, mesh, weight=Shard(0), bias=Shard(0))
        elif module is not base:
            Whole.take(module, mesh, grads=Replicate())
    if head is not None and config.tie_word_embeddings:
        head.weight = embedding.weight  # type: ignore[union-attr]


def tensor_plan(config: PretrainedConfig, size: int) -> dict[str, str]:
    """How the layers of such a model are cut for `size` processes: pattern of their names to one of `_STYLES`."""
    kind = config.model_type
    if not config.base_model_tp_plan:
        raise ValueError(f"'{kind}' models have no tensor-parallel plan: set strategy.tensor={size} to 1")
    # transformers adds a tied embedding, which is always cut here
    plan = {name: style for name, style in config.base_model_tp_plan.items() if name != "embed_tokens"}
    plan |= _AMENDMENTS.get(kind, {})
    if unknown := sorted(set(plan.values()) - _STYLES):
        raise ValueError(
            f"the tensor-parallel plan of '{kind}' models asks for {unknown[0]}, which is not supported: "
            f"set strategy.tensor={size} to 1"
        )
    heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    by_head = any(style == "colwise" and _is_key_value(name) for name, style in plan.items())
    misfits = {
        f"num_attention_heads={heads}": heads % size,
        f"num_key_value_heads={kv_heads}": by_head and kv_heads % size and size % kv_heads,
        f"intermediate_size={inner}": inner % size,
        f"vocab_size={config.vocab_size}": -(-config.vocab_size // size) * (size - 1) >= config.vocab_size,
    }
    for number, misfit in misfits.items():
        if misfit:
            raise ValueError(
                f"{number} does not fit strategy.tensor={size}, which must divide num_attention_heads={heads} and "
                f"intermediate_size={inner}, and divide num_key_value_heads={kv_heads} or be a multiple of it"
            )
    return plan


def _pattern(name: str) -> str:
    """`layers.0.mlp.up_proj` as plans write it: `layers.*.mlp.up_proj`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_key_value(name: str) -> bool:
    return name.endswith((".k_proj", ".v_proj"))


def _refuse_dropout(lm: PreTrainedModel) -> None:
    """Processes would draw different masks for activations that they must hold alike."""
    rates = [module.p for module in lm.modules() if isinstance(module, nn.Dropout)]
    rate = max(*rates, getattr(lm.config.get_text_config(), "attention_dropout", None) or 0.0, 0.0)
    if rate:
        raise ValueError(f"dropout ({rate}) needs strategy.tensor=1, or a config.json of the model that sets it to 0")


def _cut(module: nn.Module, style: str, mesh: DeviceMesh, stream: Placement, *, kv_heads: int | None) -> None:
    """One layer of the plan; `kv_heads` of the projections of keys and values."""
    match style:
        case "colwise" if kv_heads is not None and kv_heads % mesh.size():
            KeyValue.take(module, mesh, num_heads=kv_heads)
        case "colwise":
            Column.take(module, mesh)
        case "colwise_gather_output":
            GatheredColumn.take(module, mesh)
        case "rowwise":
            Row.take(module, mesh, out=stream)
        case "rowwise_split_input":
            SplitRow.take(module, mesh, out=stream)
        case "replicated_with_grad_allreduce":  # a norm of each head, of which every process has its own
            Whole.take(module, mesh, grads=Partial())
        case "gathered":
            # alike on all processes but for the order in which a kernel sums: their mean keeps the copies equal
            Whole.take(module, mesh, grads=Partial("avg"))


def _enter_whole(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Attention and MLP take all rows; one collective adds up what their first matrices send back."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = cross(args[0] if args else kwargs["hidden_states"], mesh, stream, Replicate(), grads=Partial())
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    module.register_forward_pre_hook(before, with_kwargs=True)


def _leave_whole(base: nn.Module, mesh: DeviceMesh) -> None:
    """The head takes all rows."""

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        output.last_hidden_state = cross(output.last_hidden_state, mesh, Shard(1), Replicate())
        return output

    base.register_forward_hook(after)
