"""Keys or values of all layers, of which some are on another device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from bough.model.kv.session_kv import KVMemory, KVShape


class SplitLayers:
    """(num_layers, num_rows, num_kv_heads, head_dim) numbers in a tensor for each device.

    It has of a tensor's ways those that slots use of theirs.
    """

    def __init__(self, parts: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """`parts` as the whole, of some layers each; `places` by layer: the part, and the number in it."""
        self._parts, self._places = tuple(parts), tuple(places)

    @property
    def device(self) -> torch.device:
        """The first one."""
        return self._parts[0].device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (len(self._places), *self._parts[0].shape[1:])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """A layer; rows of a layer; or rows of all, [:, begin:end]."""
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
        """As a tensor's: of every layer, where that is."""
        return SplitLayers([part.index_select(dim, rows.to(part.device)) for part in self._parts], self._places)


def split_memory(
    shape: KVShape, num_rows: int, device: torch.device, elsewhere: Mapping[int, torch.device]
) -> KVMemory:
    """Room for so many tokens: of the layers `elsewhere` on their devices, of the others on `device`."""
    if {device, *elsewhere.values()} == {device}:
        return shape.empty(num_rows, device)
    devices = list(dict.fromkeys((device, *elsewhere.values())))
    layers: list[list[int]] = [[] for _ in devices]
    places = []
    for layer in range(shape.num_layers):
        part = devices.index(elsewhere.get(layer, device))
        places.append((part, len(layers[part])))
        layers[part].append(layer)

    def empty() -> torch.Tensor:
        sizes = ((len(own), *shape.size(num_rows)[1:]) for own in layers)
        parts = [torch.empty(size, dtype=shape.dtype, device=d) for size, d in zip(sizes, devices, strict=True)]
        return cast(torch.Tensor, SplitLayers(parts, places))  # slots ask no more of one

    return KVMemory(empty(), empty())
