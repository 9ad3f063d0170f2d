"""The key-value cache of a left-padded batch: it grows in place, and batches join by one copy.

Imports transformers at the top to subclass its cache layer, so import this file inside functions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_SPARE = 64  # columns allocated ahead


class GrowingLayer(DynamicLayer):
    """DynamicLayer that writes into spare room instead of concatenating the whole cache at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []  # keys and values, each [R, heads, capacity, dim]
        self.length = 0

    def adopt(self, buffers: list[Tensor], length: int) -> None:
        """Takes over buffers whose first `length` columns are filled."""
        self.buffers, self.length = buffers, length
        self.keys, self.values = (buffer[:, :, :length] for buffer in buffers)
        self.dtype, self.device, self.is_initialized = buffers[0].dtype, buffers[0].device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.buffers:  # a prefill is kept as it is: joining the batch copies it anyway
            self.adopt([key_states, value_states], key_states.shape[2])
            return key_states, value_states
        end = self.length + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self.buffers = [_wider(buffer, self.length, end + max(_SPARE, end // 2)) for buffer in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = states
        self.adopt(self.buffers, end)
        return self.buffers[0][:, :, :end], self.buffers[1][:, :, :end]


def new_cache(num_layers: int) -> Cache:
    return Cache(layers=[GrowingLayer() for _ in range(num_layers)])


def join_caches(parts: list[tuple[Cache, Tensor]], width: int) -> Cache:
    """The sequences at an index of each part, one below the other, aligned at the right in `width` columns.

    Columns that do not fit are cut off at the left, where all the chosen sequences must have padding only.
    """
    joined = new_cache(len(parts[0][0].layers))
    for i, layer in enumerate(joined.layers):
        sources: list[tuple[Any, Tensor]] = [(cache.layers[i], index) for cache, index in parts]
        assert isinstance(layer, GrowingLayer)
        keys = _join([(source.buffers[0], source.length, index) for source, index in sources], width)
        values = _join([(source.buffers[1], source.length, index) for source, index in sources], width)
        layer.adopt([keys, values], width)
    return joined


def _join(parts: list[tuple[Tensor, int, Tensor]], width: int) -> Tensor:
    """parts: buffer [., heads, ., dim], its filled columns, index [R_i] of the sequences wanted."""
    example = parts[0][0]
    num_rows = sum(index.numel() for _, _, index in parts)
    # zeros, not whatever is there: padding is masked, that is multiplied by 0, and 0 * NaN is NaN
    joined = example.new_zeros(num_rows, example.shape[1], width + _SPARE, example.shape[3])
    row = 0
    for buffer, length, index in parts:
        columns = min(width, length)
        joined[row : row + index.numel(), :, width - columns : width] = buffer[index, :, length - columns : length]
        row += index.numel()
    return joined


def _wider(buffer: Tensor, length: int, capacity: int) -> Tensor:
    bigger = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    bigger[:, :, :length] = buffer[:, :, :length]
    return bigger
