"""The interface between models and formats, which know no kernels, and the kernels of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.functional import gelu, pad, silu

from bough.errors import ConfigError
from bough.model.batch.batch import Chunk
from bough.model.batch.state_steps import StateSteps
from bough.model.packed import ExpertTiles, Matrix, Packed, Stack, is_transposed
from bough.sizing.row_counts import RowCounts

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


class Norm(NamedTuple):
    """How modules of transformers scale a row by its root mean square, in float32, and multiply it with weights."""

    is_rounded: bool = False  # before it is multiplied with weights
    adds_one: bool = False  # to weights
    is_centred: bool = False  # the row's mean is subtracted first


class Table(Enum):
    """Which numbers of a row's table of cosines belong to a pair; sines are alike."""

    WHOLE = auto()  # those at the places of the pair's numbers
    FIRST = auto()  # one for both, in the first half of the table
    HALF = auto()  # one for both; the table is half as long as what turns


class Rotary(NamedTuple):
    """How modules of transformers turn pairs of a head's numbers."""

    in_pairs: bool = False  # pairs are neighbours, otherwise numbers of both halves
    out_pairs: bool = False  # the same of the result
    table: Table = Table.WHOLE
    is_wide: bool = False  # in float32, otherwise each operation is rounded to the wider type of heads and tables


class Backend(ABC):
    """The computations of one kind of device. A row's result depends on that row alone, bit for bit."""

    name: ClassVar[str]  # of its module in `bough.model.backends`
    rooms: ClassVar[tuple[str, ...]]  # packages whose code decides its bits, in addition to that module
    takes_any_rows = False  # whether layers of all models run over any number of rows, by `multiply`, `norm` and so on
    compiles_ahead = False  # whether a worker must compile kernels before it loads a model
    takes_packed = False  # whether `multiply` reads packed matrices as they are; otherwise it writes them out before
    groups_experts = False  # whether it has `expert_tiles` and `multiply_grouped`
    captures_steps = False  # whether a draft's steps may be captured as graphs

    @abstractmethod
    def describe(self, device: torch.device) -> str:
        """Name of the device and of its arithmetic; if two workers' descriptions differ, their bits do."""

    def make_ready(self, device: torch.device) -> None:
        """Prepare a device before a model is loaded. Raises ConfigError or AcceleratorFull if that is not possible."""
        return

    def spilling(self) -> set[str]:
        """Names of the kernels compiled so far that spill registers to memory."""
        return set()

    def linear(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows (..., inputs) times a matrix (outputs, inputs), plus a bias (outputs,).

        The number of rows must always be the same. Not used if the backend takes any number.
        """
        raise NotImplementedError

    def multiplies_single_rows(self, rows: torch.Tensor, matrix: torch.Tensor) -> bool:
        """Whether `multiply` takes any number of these rows, and a row has the same bits among any others."""
        return self.takes_any_rows

    def fits_single_rows(self, linear: nn.Linear, dtype: torch.dtype) -> bool:
        """Whether that holds for a layer, and torch splits a step of its input and output rows into whole vectors."""
        return False

    def multiply(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `linear`, of any number of rows; only if `fits_single_rows` or `multiplies_single_rows` allow it.

        The matrix may have any strides. The bias is added to sums before they are rounded.
        """
        raise NotImplementedError

    def expert_tiles(self, chosen: torch.Tensor, num_experts: int) -> ExpertTiles:
        """Sort rows by the experts that they have chosen, (rows, k); numbers from `num_experts` on mean no choice."""
        raise NotImplementedError

    def multiply_grouped(
        self, rows: torch.Tensor, stack: Stack, tiles: ExpertTiles, is_sorted: bool = False
    ) -> torch.Tensor:
        """Products (entries, outputs) of rows with the matrices of the experts that they have chosen.

        rows (rows, inputs), or with `is_sorted` (entries, inputs) in the order of entries, as of a product before.
        Entries that are in no tile are not written.
        """
        raise NotImplementedError

    def combine(
        self, made: torch.Tensor, tiles: ExpertTiles, chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
    ) -> torch.Tensor:
        """Sums (rows, outputs) of entries (entries, outputs) times the weights (rows, k) of the experts `chosen`.

        Products are rounded, and added to a row in the order of experts, each sum rounded as well.
        """
        experts, order = torch.sort(chosen, stable=True)
        own = made[tiles.entries.view(chosen.shape).gather(1, order)]  # (rows, k, outputs)
        scaled = (own * weights.gather(1, order)[:, :, None]).to(made.dtype)
        scaled = scaled.masked_fill((experts >= num_experts)[:, :, None], 0.0)
        return sum(scaled.unbind(1), torch.zeros_like(scaled[:, 0]))

    def linear_by_head(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Products (rows, num_heads, outputs) of (num_heads, rows, inputs) with (num_heads, outputs, inputs)."""
        return torch.stack([self.linear(*head) for head in zip(rows, matrices, strict=True)], 1)

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: Norm, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows (..., width), or (..., num_heads, width), normalised, times a weight (width,), or (num_heads, width).

        With a gate, as large as the rows, the product is multiplied with the gate's SiLU.
        """
        numbers = rows.float()
        if kind.is_centred:
            numbers = numbers - numbers.mean(-1, keepdim=True)
        numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + epsilon)
        if kind.is_rounded:
            out = weight * numbers.to(rows.dtype)
        else:
            out = (numbers * (weight.float() + 1.0 if kind.adds_one else weight)).to(rows.dtype)
        return out if gate is None else (out * silu(gate.float())).to(rows.dtype)

    def rotate(
        self, queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys (1, heads, num_rows, head_dim) turned by tables (1, num_rows, numbers of a table).

        What exceeds the tables stays as it is.
        """
        tables = cos.unsqueeze(1), sin.unsqueeze(1)
        return _rotated(queries, *tables, kind), _rotated(keys, *tables, kind)

    def gate(self, gates: torch.Tensor, ups: torch.Tensor, activation: str) -> torch.Tensor:
        """An activation (of `ACTIVATIONS`) of gates (..., width), times `ups`."""
        return ACTIVATIONS[activation](gates) * ups

    @abstractmethod
    def attend(
        self, chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
    ) -> torch.Tensor:
        """Write the rows' keys and values to their slots, and attend to each row's path; padding has any results.

        queries (num_rows, num_heads, head_dim), keys and values (num_rows, num_kv_heads, head_dim); returns (num_rows,
        num_heads, value_dim) in the type of `queries`. `rules` are scale, window, softcap (0: none) and sinks or None.
        If queries are wider than values, they are as wide as a key and a value: the value is the key's second part.
        """

    @abstractmethod
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
        """Take steps of the gated delta rule; returns outputs (num_rows, num_heads, value_dim) of rows from `begin` on.

        qkv (at least num_rows, num_inputs) float32: queries and keys of `num_key_heads` heads, and values of all; decay
        and beta (num_rows, num_heads); states (num_heads, num_places, key_dim, value_dim), which steps read and write.
        """

    @abstractmethod
    def write(self, matrix: Packed, out: torch.Tensor) -> None:
        """Unpack a matrix to `out` (outputs, inputs), which is contiguous, or its transpose if it `is_transposed`."""

    def written_out(self, matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
        """A matrix as a tensor (outputs, inputs), in new memory if it is packed."""
        if isinstance(matrix, torch.Tensor):
            return matrix
        shape, device = matrix.shape, matrix[0].device
        is_turned = is_transposed(matrix)
        out = torch.empty(shape[::-1] if is_turned else shape, dtype=dtype, device=device)
        self.write(matrix, out := out.t() if is_turned else out)
        return out

    # Models compiled whole. `skeleton` is a `Skeleton` of `bough.model.loading`, which needs this module.

    def compiles(self, skeleton: Any) -> bool:
        """Whether it has whole layers of this model, which `decoder` and `layers` make."""
        return False

    def compiles_int8(self, skeleton: Any) -> bool:
        """Whether its whole layers can multiply in 8 bits."""
        return False

    @property
    def prefers_int8(self) -> bool:
        """Whether products in 8 bits are faster than in 16."""
        return False

    def decoder(self, skeleton: Any, is_int8: bool) -> Any:
        """A decoder of a draft (`bough.model.llama.decoder.LlamaDecoder`); only for a model that it `compiles`."""
        raise NotImplementedError

    def layers(self, skeleton: Any) -> Any:
        """A target's layers (`bough.model.llama.decoder.CompiledLayers`); only for one that it `compiles`."""
        raise NotImplementedError


def in_counts(
    function: Callable[..., torch.Tensor], counts: RowCounts, *rows: torch.Tensor, axis: int = 0
) -> torch.Tensor:
    """Results of a function for any number of rows: it is called only with allowed numbers, including padding.

    All `rows` have them along the same axis, as do the results.
    """
    count = rows[0].shape[axis]
    if padding := counts.padded(count) - count:
        rows = tuple(pad(each, (0, 0) * (each.dim() - 1 - axis) + (0, padding)) for each in rows)
    parts = zip(*(torch.split(each, counts.most, axis) for each in rows), strict=True)
    out = result = function(*next(parts))
    if count > counts.most:  # not concatenated, for which there would have to be all logits twice
        sizes = list(result.shape)
        sizes[axis] = rows[0].shape[axis]
        out = result.new_empty(sizes)
        spans = iter(torch.split(out, counts.most, axis))
        next(spans).copy_(result)
        del result
        for span, part in zip(spans, parts, strict=True):
            span.copy_(function(*part))
    return out.narrow(axis, 0, count)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Rotary) -> torch.Tensor:
    if kind.is_wide:
        cos, sin = cos.float(), sin.float()
    turned = cos.shape[-1] * (2 if kind.table is Table.HALF else 1)
    if kind.table is Table.WHOLE:
        tables = *_halves(cos, kind.in_pairs), *_halves(sin, kind.in_pairs)
    else:
        cos, sin = cos[..., : turned // 2], sin[..., : turned // 2]
        tables = cos, cos, sin, sin
    first, second = _halves(heads[..., :turned], kind.in_pairs)
    both = first * tables[0] - second * tables[2], second * tables[1] + first * tables[3]
    out = torch.stack(both, -1).flatten(-2) if kind.out_pairs else torch.cat(both, -1)
    return torch.cat((out.to(heads.dtype), heads[..., turned:]), -1)


def _halves(numbers: torch.Tensor, in_pairs: bool) -> Sequence[torch.Tensor]:
    return (numbers[..., ::2], numbers[..., 1::2]) if in_pairs else numbers.chunk(2, -1)


RUNGS = ("triton", "cublas", "reference")  # backends of a GPU: each is used if the one before fails its self-check
REFERENCE_NOTE = "--backend reference: torch's operators compute, many times slower than kernels"
_chosen: list[str] = []  # at most one name, of the backend for all devices of this process


def backend_of(device: torch.device) -> Backend:
    """The backend of a device."""
    return load(_chosen[0] if _chosen else usual_name(device))


def usual_name(device: torch.device) -> str:
    """Name of the default backend of a device."""
    return "cpu" if device.type == "cpu" else "triton"


def choose_backend(name: str, device: torch.device) -> Backend:
    """Set the backend of this process, by the setting `--backend`; a worker does so before it loads a model.

    Raises ConfigError if the backend does not compute on the device.
    """
    names = ("cpu", "reference") if device.type == "cpu" else RUNGS
    if name not in ("auto", *names):
        raise ConfigError(f"--backend: must be auto, {', '.join(names[:-1])} or {names[-1]} on {device}, got {name}")
    _chosen[:] = [] if name in ("auto", usual_name(device)) else [name]
    return backend_of(device)


@contextmanager
def computing_by(name: str) -> Iterator[Backend]:
    """Use the backend of this name within the block, on all devices and threads."""
    before = list(_chosen)
    _chosen[:] = [name]
    try:
        yield load(name)
    finally:
        _chosen[:] = before


@cache
def load(name: str) -> Backend:
    """The backend of a name. Raises ConfigError if its packages are not installed."""
    backend: Backend = import_module(f"bough.model.backends.{name}").BACKEND
    return backend
