"""Keys or values whose layers are on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from bough.model.kv.session_kv import KVMemory, KVShape


class SplitLayers:
    """Stands in for a tensor (num_layers, num_rows, num_kv_heads, head_dim), with a tensor for each device.

    It implements the operations of tensors that slots use.
    """

    def __init__(self, parts: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """`parts` have some layers each; `places` is by layer: the index of its part, and the index within it."""
        self._parts, self._places = tuple(parts), tuple(places)

    @property
    def device(self) -> torch.device:
        """The device of the first part."""
        return self._parts[0].device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return (len(self._places), *self._parts[0].shape[1:])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """A layer; rows of a layer; or rows of all layers, [:, begin:end]."""
        layer, *rows = index if isinstance(index, tuple) else (index,)
        if isinstance(layer, slice):
            assert layer == slice(None), "of all layers or of one"
            return SplitLayers([part[:, rows[0]] for part in self._parts], self._places)
        part, number = self._places[layer]
        return self._parts[part][(number, *rows)]

    def __setitem__(self, index: tuple[Any, Any], value: Any) -> None:
        layer, rows = index
        if isinstance(layer, slice):
            for mine, theirs in zip(self._parts, value._parts, strict=True):
                mine[:, rows] = theirs
        else:
            part, number = self._places[layer]
            self._parts[part][number, rows] = value

    def index_select(self, dim: int, rows: torch.Tensor) -> SplitLayers:
        """A copy of these rows along axis `dim`, of every layer on its device."""
        return SplitLayers([part.index_select(dim, rows.to(part.device)) for part in self._parts], self._places)


def split_memory(
    shape: KVShape, num_rows: int, device: torch.device, elsewhere: Mapping[int, torch.device]
) -> KVMemory:
    """Memory for `num_rows` tokens: layers in `elsewhere` on their devices, others on `device`."""
    if {device, *elsewhere.values()} == {device}:
        return shape.empty(num_rows, device)
    devices = list(dict.fromkeys((device, *elsewhere.values())))
    layers: list[list[int]] = [[] for _ in devices]
    places = []
    for layer in range(shape.num_layers):
        part = devices.index(elsewhere.get(layer, device))
        places.append((part, len(layers[part])))
        layers[part].append(layer)

    def empty(whole: Sequence[int]) -> torch.Tensor:
        sizes = ((len(own), *whole[1:]) for own in layers)
        parts = [torch.empty(size, dtype=shape.dtype, device=d) for size, d in zip(sizes, devices, strict=True)]
        return cast(torch.Tensor, SplitLayers(parts, places))  # slots use only what it implements

    return KVMemory(*map(empty, shape.sizes(num_rows)))
