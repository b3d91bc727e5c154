"""Rows of text with what the teacher thought of each place, and the attention that reads such rows.

A row is documents one behind the other. In front of all of them stands, once and shared, the opening of the chat
template: every token sees the opening and its own document, nothing else. So nothing is computed twice or padded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bough.errors import ConfigError
from bough.model.files import replace

NAME = "bough_rows"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Written text; the opening is not in it."""

    tokens: torch.Tensor  # (num_rows, length) int32
    starts: torch.Tensor  # (num_rows, length) int32: the place in the row where the token's document begins
    is_answer: torch.Tensor  # (num_rows, length) bool: the token after this one was the assistant's to choose
    top_ids: torch.Tensor  # (num_rows, length, num_top) int32: the teacher's likeliest next tokens, best first
    top_log_probs: torch.Tensor  # (num_rows, length, num_top) float16

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    def take(self, index: torch.Tensor) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device) -> Rows:
        """On another device."""
        return Rows(*(getattr(self, f.name).to(device) for f in fields(self)))

    def fingerprint(self) -> str:
        """Hash over all of them."""
        digest = hashlib.blake2b(digest_size=12)
        for f in fields(self):
            tensor = getattr(self, f.name).cpu().contiguous()
            digest.update(f"{f.name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.view(torch.uint8).numpy())
        return digest.hexdigest()

    def save(self, file: Path) -> None:
        """At once or not at all."""
        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self)}
        replace(file, lambda partial: save_file(tensors, partial))

    @classmethod
    def load(cls, file: Path) -> Rows:
        """What `save` has written.

        Raises:
            ConfigError: the file is something else.
        """
        try:
            tensors = load_file(file)
            return cls(**tensors)
        except (SafetensorError, TypeError) as exc:
            raise ConfigError(f"--data: {file} is no text that `bough distill` wrote: {exc}") from exc

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """Rows of equal length, one below the other."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def placed(self, opening: torch.Tensor) -> Placed:
        """The rows as a model takes them, behind the opening, (num_opening,)."""
        num_rows, length = self.tokens.shape
        count = len(opening)
        in_front = torch.arange(count, device=self.tokens.device).expand(num_rows, count)
        place = torch.arange(length, device=self.tokens.device)
        positions = torch.cat((in_front, count + place - self.starts), dim=1)
        starts = torch.cat((torch.full_like(in_front, -1), self.starts), dim=1)
        every = torch.arange(count + length, device=self.tokens.device)
        same = (starts[:, :, None] == starts[:, None, :]) | (every < count)
        mask = same & (every[:, None] >= every)
        return Placed(torch.cat((opening.expand(num_rows, count), self.tokens), dim=1), positions, mask[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Input of a model pass."""

    tokens: torch.Tensor  # (num_rows, num_places)
    positions: torch.Tensor  # (num_rows, num_places)
    mask: torch.Tensor  # (num_rows, 1, num_places, num_keys) bool: which keys a token sees
    windows: dict[int, torch.Tensor] = field(default_factory=dict)  # masks of layers that see so far, when made

    def within(self, window: int, key_positions: torch.Tensor) -> torch.Tensor:
        """The mask of a layer that sees so many positions, those of the keys being (num_rows, num_keys)."""
        if window not in self.windows:  # layers take turns with it
            behind = self.positions[:, :, None].int() - key_positions[:, None, :].int()
            self.windows[window] = self.mask & (behind < window)[:, None]
        return self.windows[window]


class Store:
    """Keys and values of rows that are being written, all of one length."""

    def __init__(self, num_rows: int, num_places: int) -> None:
        self._num_rows, self._num_places = num_rows, num_places
        self.length = 0  # places that are taken when the pass that is under way is over
        self._positions: torch.Tensor | None = None
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def positions(self) -> torch.Tensor:
        """(num_rows, length) of the tokens in the places that are taken."""
        assert self._positions is not None, "nothing has been placed"
        return self._positions[:, : self.length]

    def place(self, positions: torch.Tensor) -> None:
        """Notes the positions of a pass's tokens, (num_rows, new places), whose places are the last."""
        if self._positions is None:
            self._positions = positions.new_zeros(self._num_rows, self._num_places)
        self._positions[:, self.length - positions.shape[1] : self.length] = positions

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a layer's new (num_rows, heads, new places, head_dim) and gives all that it holds by now."""
        if layer not in self._held:
            shape = (self._num_rows, key.shape[1], self._num_places)
            self._held[layer] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = (held[:, :, : self.length] for held in self._held[layer])
        keys[:, :, -key.shape[2] :], values[:, :, -key.shape[2] :] = key, value
        return keys, values


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    placed: Placed,
    store: Store | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (num_rows, heads, places, head_dim) in, (num_rows, places, heads, ...) out."""
    if store is not None:
        key, value = store.append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    if sliding_window is not None and sliding_window < key.shape[2]:
        attention_mask = placed.within(sliding_window, placed.positions if store is None else store.positions)
    num_rows, num_heads, num_places, _ = query.shape
    group = num_heads // key.shape[1]
    if num_places == 1:  # heads that share keys are rows of one query: no keys are copied
        shared = query.reshape(num_rows, key.shape[1], group, -1)
        out = _attend(shared, key, value, attention_mask, scaling, softcap, s_aux)
        return out.reshape(num_rows, 1, num_heads, -1), None
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = _attend(query, keys, values, attention_mask, scaling, softcap, s_aux)
    return out.transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """By torch's kernel; where scores are capped, or sinks (num_heads,) stand beside them, by what it stands for."""
    if not softcap and sinks is None:
        return scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
    scores = scaling * (query @ keys.transpose(2, 3)).float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # of each head; heads stand along the second axis, or along the second and the third
        beside = sinks.float().reshape(1, query.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, beside), dim=3)
    return scores.softmax(3)[..., : keys.shape[2]].to(values.dtype) @ values


AttentionInterface.register(NAME, row_attention)
