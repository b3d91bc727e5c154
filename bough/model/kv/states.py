"""States of recurrent layers (gated delta nets) of one session, in addition to its keys and values.

A layer's state is the one after some of the session's tokens. For each row that a tree has added since, the inputs of
its step of the recurrence are stored, so the state can follow the accepted path. A state cannot go back: for that there
are snapshots after some of the text's whole blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from transformers import PretrainedConfig

from bough.model.kv.state_shape import RECURRENT, SNAPSHOTS, StateShape

Value = TypeVar("Value")
UNUSABLE = sys.maxsize  # length of a state after an interrupted step: beyond any text


def kv_places(config: PretrainedConfig) -> list[int]:
    """The number of each layer among those that have keys and values; -1 if it has a state instead."""
    numbers, types = count(), getattr(config, "layer_types", None) or [""] * int(config.num_hidden_layers)
    return [-1 if kind == RECURRENT else next(numbers) for kind in types]


def by_kv_place(config: PretrainedConfig, of_layers: Mapping[int, Value]) -> dict[int, Value]:
    """The entries of some layers in a list, by their numbers among layers with keys and values."""
    places = kv_places(config)
    return {places[layer]: value for layer, value in of_layers.items() if places[layer] >= 0}


class StateRows(NamedTuple):
    """The recurrence's inputs from rows in one layer."""

    inputs: torch.Tensor  # (num_rows, num_inputs) of the convolution
    decay: torch.Tensor  # (num_rows, num_heads) float32: factor of the state
    beta: torch.Tensor  # (num_rows, num_heads) float32

    def select(self, rows: slice | torch.Tensor) -> StateRows:
        """A copy or view of some of the rows."""
        return StateRows(*(numbers[rows] for numbers in self))

    def followed_by(self, other: StateRows) -> StateRows:
        """A copy with the rows of `other` behind these."""
        return StateRows(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


class StateSnapshot(NamedTuple):
    """A layer's state at some length; never written to, so sessions may share it."""

    memory: torch.Tensor
    window: torch.Tensor


class LayerState:
    """A layer's state of one session."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.snapshots: dict[int, StateSnapshot] = {}  # by length
        self.memory = torch.zeros(shape.size, dtype=torch.float32, device=device)
        self.go_back(0)

    def no_rows(self) -> StateRows:
        """An empty `StateRows`."""
        gates = torch.zeros(0, self._shape.num_heads, dtype=torch.float32, device=self._device)
        inputs = torch.zeros(0, self._shape.num_inputs, dtype=self._shape.dtype, device=self._device)
        return StateRows(inputs, gates, gates)

    def snap(self) -> None:
        """Take a snapshot; of too many, drop the one between the shortest, where others may begin, and the longest."""
        self.snapshots[self.length] = StateSnapshot(self.memory.clone(), self.window)
        if len(self.snapshots) > SNAPSHOTS:
            del self.snapshots[sorted(self.snapshots)[1]]

    @torch.inference_mode()
    def go_back(self, length: int) -> None:
        """Return to a snapshot, or to the beginning of the text, in the existing memory."""
        self.length, self.kept = UNUSABLE, self.no_rows()  # of slot rows from `length` on
        if length:
            snapshot = self.snapshots[length]
            self.memory.copy_(snapshot.memory)
            self.window = snapshot.window
        else:
            self.memory.zero_()
            size = self._shape.window, self._shape.num_inputs
            self.window = torch.zeros(size, dtype=self._shape.dtype, device=self._device)  # the last inputs
        self.length = length  # tokens in the state

    def copy(self, length: int) -> LayerState:
        """A copy that holds `length` tokens, which must be usable."""
        new = LayerState(self._shape, self._device)
        new.snapshots = {at: snapshot for at, snapshot in self.snapshots.items() if at <= length}
        if self.length > length:
            new.go_back(length)
        else:
            new.length, new.window = self.length, self.window
            new.memory.copy_(self.memory)
            new.kept = self.kept.select(slice(length - self.length))
        return new


@dataclass(slots=True)
class SessionStates:
    """States of all recurrent layers; a layer's memory is allocated where and when it first computes."""

    shape: StateShape
    wanted: frozenset[int] = frozenset()  # lengths after which to take snapshots
    _layers: dict[int, LayerState] = field(default_factory=dict)

    def layer(self, index: int, device: torch.device) -> LayerState:
        """The state of a recurrent layer, counted among these."""
        if index not in self._layers:
            self._layers[index] = LayerState(self.shape, device)
        return self._layers[index]

    def usable(self, length: int) -> int:
        """The longest prefix, up to `length` committed tokens, after which the session can continue.

        After a sweep that failed midway, layers that it passed may be ahead of the committed tokens.
        """
        layers = self._layers.values()
        if self._reaches(length):
            return length
        common = set.intersection(*(set(layer.snapshots) for layer in layers)) if self._is_whole else set[int]()
        return max((at for at in common if at <= length), default=0)

    def roll_back(self, length: int) -> None:
        """Go back to a usable length."""
        reaches = self._reaches(length)
        for layer in self._layers.values():
            if not reaches:
                layer.go_back(length)
            layer.snapshots = {at: snapshot for at, snapshot in layer.snapshots.items() if at <= length}

    def fork(self, source: SessionStates, length: int) -> None:
        """Take over another session's states at a length that is usable there."""
        self._layers = {index: layer.copy(length) for index, layer in source._layers.items()}

    def commit(self, rows: Sequence[int]) -> None:
        """Keep only these rows of a tree: the accepted path's and, for a draft, those of nodes below it."""
        paths: dict[tuple[int, torch.device], torch.Tensor] = {}  # sent once, as most layers are at one length
        for layer in self._layers.values():
            if rows and rows[0] >= layer.length:
                before = range(layer.length, rows[0])  # rows of earlier paths, not yet applied to the state
                place = layer.length, layer.memory.device
                if place not in paths:
                    paths[place] = torch.tensor([*before, *rows], device=place[1]) - layer.length
                layer.kept = layer.kept.select(paths[place])

    @property
    def _is_whole(self) -> bool:
        return len(self._layers) == self.shape.num_layers

    def _reaches(self, length: int) -> bool:
        """Whether all layers' states, with the rows stored since, belong to a prefix of at most `length` tokens."""
        return (self._is_whole or not length) and all(layer.length <= length for layer in self._layers.values())
