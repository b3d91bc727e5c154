"""The reference backend: torch's operators and plain formulas, row by row. It is slow and short, to check kernels with.

A row's result is computed only from its own path, in shapes that depend only on its path, or among a fixed number of
rows. So it has the same bits in any batch. They differ from other backends' bits by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from bough.model.backend import Backend
from bough.model.backends.triton import accumulate_in_float32
from bough.model.batch.batch import BatchPart, Chunk
from bough.model.batch.state_steps import StateSteps
from bough.model.packed import Across, Along, Down, ExpertTiles, InBlocks, Matrix, Packed, Stack, parts_of
from bough.model.quant.ggml_blocks import BitField, Numbers
from bough.model.quant.scaled import E2M1
from bough.model.threads import all_threads

PART_WEIGHTS = 2**22  # that are unpacked at once: about 100 MB
EPSILON = 1e-6  # added to squared lengths of queries and keys in the gated delta rule


class ReferenceBackend(Backend):
    """torch's operators, on any device."""

    name = "reference"
    rooms = ()

    def describe(self, device: torch.device) -> str:
        own = "CPU with " + torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else _name(device)
        return f"{own}, by torch's operators"

    def make_ready(self, device: torch.device) -> None:
        if device.type != "cpu":
            accumulate_in_float32()

    def linear(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In float32 on a CPU each row alone: there MKL may round by a row's place among the others."""
        if rows.dtype != torch.float32 or rows.device.type != "cpu":
            with all_threads():
                return nn.functional.linear(rows, matrix, bias)
        flat = rows.reshape(-1, rows.shape[-1])
        out = torch.stack([torch.mv(matrix, row.clone()) for row in flat]) if len(flat) else flat @ matrix.t()
        out = out if bias is None else out + bias
        return out.view(*rows.shape[:-1], len(matrix))

    def multiply(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Each row alone."""
        weights, flat = self.written_out(matrix, rows.dtype), rows.reshape(-1, 1, rows.shape[-1])
        out = [self.linear(row.clone(), weights, bias) for row in flat]
        return torch.stack(out).view(*rows.shape[:-1], len(weights)) if out else rows.new_empty(0, len(weights))

    def expert_tiles(self, chosen: torch.Tensor, num_experts: int) -> ExpertTiles:
        """With a tile for each expert."""
        numbers, choices = torch.sort(chosen.flatten(), stable=True)
        return self.tiles_of(numbers, choices, chosen.shape[1], num_experts)

    def tiles_of(self, numbers: torch.Tensor, choices: torch.Tensor, k: int, num_experts: int) -> ExpertTiles:
        """Of the sorted experts of all entries, and the place of each among all choices, `k` of a row."""
        experts = torch.arange(num_experts, device=numbers.device)
        bounds = [torch.searchsorted(numbers, experts.to(numbers.dtype), right=right) for right in (False, True)]
        return ExpertTiles(torch.stack((experts, *bounds), 1).int(), (choices // k).int(), choices.argsort().int())

    def multiply_grouped(
        self, rows: torch.Tensor, stack: Stack, tiles: ExpertTiles, is_sorted: bool = False
    ) -> torch.Tensor:
        out = rows.new_zeros(len(tiles.places), stack.first.shape[0])
        for expert, begin, end in tiles.table.tolist():
            own, matrix = rows[begin:end] if is_sorted else rows[tiles.places[begin:end]], stack.matrices[expert]
            if begin < end and matrix is not None:
                out[begin:end] = self.multiply(own, matrix, stack.biases[expert])
        return out

    def attend(
        self, chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
    ) -> torch.Tensor:
        out = queries.new_zeros(*queries.shape[:2], values.shape[2])
        for piece, (held_keys, held_values) in zip(chunk.pieces, chunk.slots(layer), strict=True):
            own = torch.from_numpy(piece.rows).to(queries.device)
            held_keys[own], held_values[own] = keys[piece.span], values[piece.span]
            for row, query in enumerate(queries[piece.span]):
                path = torch.from_numpy(_path(piece, row, rules[1])).to(queries.device)
                out[piece.span.start + row] = _attended(query.double(), held_keys[path], held_values[path], *rules)
        return out

    def recur(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        steps: StateSteps,
        states: torch.Tensor,
        num_key_heads: int,
        begin: int,
    ) -> torch.Tensor:
        return take_steps(qkv, decay, beta, steps.steps.tolist(), states, num_key_heads, begin)

    def write(self, matrix: Packed, out: torch.Tensor) -> None:
        """In parts: torch's operators take up to 30 bytes for each weight, for which no budget has room."""
        for outputs, part in parts_of(matrix, PART_WEIGHTS):
            out[outputs].copy_(_written(part))


def _written(matrix: Packed) -> torch.Tensor:
    if isinstance(matrix, Down):
        return _from_down(matrix).t()
    if isinstance(matrix, Across):
        return _from_across(matrix).t()
    return _from_along(matrix) if isinstance(matrix, Along) else _from_blocks(matrix)


def _from_down(matrix: Down) -> torch.Tensor:
    words, zeros, scales, groups, bits, zero_offset = matrix
    integers, own_zeros = _parts(words, bits, 1).flatten(0, 1), _parts(zeros, bits, 2).flatten(1) + zero_offset
    group = _groups(len(integers), len(integers) // len(scales), len(scales), groups, words.device)
    return (integers - own_zeros[group]).float() * scales.float()[group]


def _from_across(matrix: Across) -> torch.Tensor:
    words, zeros, scales = matrix
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=words.device)  # the nibble of each of a word's numbers
    integers, own_zeros = (_parts(numbers, 4, 2)[:, :, order].flatten(1) for numbers in (words, zeros))
    group = _groups(len(words), len(words) // len(scales), len(scales), None, words.device)
    return (integers - own_zeros[group]).float() * scales.float()[group]


def _from_along(matrix: Along) -> torch.Tensor:
    numbers, _, zeros, groups, bits, (height, width), *_ = matrix
    (num_outputs, num_inputs), device = matrix.shape, numbers.device
    scales = matrix.joined_scales()
    group = _groups(num_inputs, width, scales.shape[1], groups, device)
    scales = scales[torch.arange(num_outputs, device=device) // height]
    values = numbers.float()
    if numbers.dtype == torch.uint8:
        codes = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)
        values = torch.tensor(E2M1, device=device)[codes.long()]
    if numbers.dtype == torch.int32:
        values = _parts(numbers, bits, 2).flatten(1).float()
        values = values - (1 << (bits - 1)) if zeros is None else values
    if zeros is not None:
        values = values - _parts(zeros, bits, 1).flatten(0, 1)[:num_outputs].float()[:, group]
    return values * scales[:, group]


def _from_blocks(matrix: InBlocks) -> torch.Tensor:
    data, size, type_, half = matrix
    row = torch.arange(len(data), device=data.device)
    within = row % (2 * half)
    blocks = data[row - within + 2 * (within % half) + within // half].view(len(data), -1, size[1])
    scale, offset = _half(blocks, type_.scale), _half(blocks, type_.offset) if type_.offset >= 0 else None
    if type_.scales.low.bits:
        scale = scale * _numbers(blocks, type_.scales, type_.num_groups)
    if offset is not None and type_.mins.low.bits:
        offset = offset * -_numbers(blocks, type_.mins, type_.num_groups)
    values = _numbers(blocks, type_.numbers, size[0]) * _spread(scale, size[0])
    return (values if offset is None else values + _spread(offset, size[0])).view(matrix.shape)


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device))


def _path(piece: BatchPart, row: int, window: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of a slot that a row sees, in the order of positions."""
    length = int(piece.lengths[row])
    positions = np.arange(max(0, length - window) if window else 0, length)
    in_text = positions < piece.base
    return np.concatenate((positions[in_text], piece.tail[row, positions[~in_text] - piece.base].astype(np.int64)))


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,  # noqa: ARG001  # of the path
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention (num_heads, value_dim) of a query (num_heads, head_dim) to keys (num_keys, num_kv_heads, key_dim).

    In float64, so that the order of sums hardly matters.
    """
    keys, values = keys.double(), values.double()
    if query.shape[1] > keys.shape[2]:
        keys = torch.cat((keys, values), 2)
    by_group = query.reshape(keys.shape[1], -1, keys.shape[2])
    scores = torch.einsum("hgd,khd->khg", by_group, keys).flatten(1) * scale  # (num_keys, num_heads)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if sinks is not None:
        scores = torch.cat((scores, sinks[None]))
    weights = scores.softmax(0)[: len(keys)].view(len(keys), *by_group.shape[:2])
    return torch.einsum("khg,khd->hgd", weights, values).flatten(0, 1)


def take_steps(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    steps: Iterable[tuple[int, int, int]],
    states: torch.Tensor,
    num_key_heads: int,
    begin: int,
) -> torch.Tensor:
    """`Backend.recur`, by steps of (row, place of the state before it, place of the state after it)."""
    num_heads, _, key_dim, value_dim = states.shape
    out = qkv.new_empty(len(decay) - begin, num_heads, value_dim)
    for row, before, after in steps:
        heads = torch.split(qkv[row], [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim])
        queries, keys = (
            _normed(numbers.view(num_key_heads, key_dim)).repeat_interleave(num_heads // num_key_heads, 0)
            for numbers in heads[:2]
        )
        state = states[:, before] * decay[row, :, None, None]
        delta = (heads[2].view(num_heads, value_dim) - (state * keys[:, :, None]).sum(1)) * beta[row, :, None]
        states[:, after] = state = state + keys[:, :, None] * delta[:, None]
        if row >= begin:
            out[row - begin] = (state * (queries / key_dim**0.5)[:, :, None]).sum(1)
    return out


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + EPSILON)


def _parts(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The numbers of each 32-bit word, lowest bits first, along a new axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shape = [-1 if place == axis else 1 for place in range(3)]
    return words.unsqueeze(axis) >> shifts.view(shape) & ((1 << bits) - 1)


def _groups(
    num_inputs: int, width: int, num_groups: int, groups: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The group of each input; of consecutive inputs without `groups`."""
    found = torch.arange(num_inputs, device=device) // width if groups is None else groups.long()
    return found.clamp(0, num_groups - 1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block, (rows, blocks, 1) float32."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).float()


def _numbers(blocks: torch.Tensor, of: Numbers, count: int) -> torch.Tensor:
    """Numbers of one kind, (rows, blocks, count) float32."""
    found = (_field(blocks, of.low, count) | _field(blocks, of.high, count) << of.low.bits) ^ of.flip
    found = torch.tensor(of.codes, device=blocks.device)[found] if of.codes else found
    return (found - of.center).float()


def _field(blocks: torch.Tensor, of: BitField, count: int) -> torch.Tensor:
    """These bits of each number of each block, (rows, blocks, count) int64."""
    j = torch.arange(count, device=blocks.device)
    places = of.first + j // of.span * of.stride + j % of.width
    return blocks[:, :, places].long() >> of.start + j % of.span // of.every * of.step & ((1 << of.bits) - 1)


def _spread(of_groups: torch.Tensor, count: int) -> torch.Tensor:
    """Each group's number for all of a block's `count` numbers."""
    return of_groups.repeat_interleave(count // of_groups.shape[2], 2)


BACKEND = ReferenceBackend()
