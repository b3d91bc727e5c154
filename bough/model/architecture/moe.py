"""Mixtures of experts: one expert's weights at a time, and only experts that some row has chosen.

transformers keeps a layer's experts in one stacked parameter. An `ExpertTable` takes its place, and makes values on
request: views of a slab, or dequantized into the same small scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bough.model.backend import backend_of
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import (
    ReusedMemory,
    Scratch,
    Stored,
    TensorSource,
    Transposed,
    parts_of,
    parts_with_bytes,
    pieces,
)
from bough.model.packed import ExpertTiles, Matrix, Stack, tensors_of

NAME = "bough"
DOWN = "down_proj"
EXPERT_ROWS = 16  # rows of an expert's products are padded to multiples of this: a library then rounds all equally
_num_rows: ContextVar[int | None] = ContextVar("num_rows", default=None)  # rows beyond are padding; None: there is none
Choices = list[tuple[int | torch.Tensor, int]]
_counts: ContextVar[Choices] = ContextVar("counts")  # see `counted_experts`
Result = TypeVar("Result")


class _Asking(greenlet):  # type: ignore[misc]  # greenlet has no types
    """The greenlet of one function of `side_by_side`."""


def is_side_by_side() -> bool:
    """Whether the caller runs in `side_by_side` and may call `ask`."""
    return isinstance(getcurrent(), _Asking)


def ask(question: Any) -> Any:
    """The answer to a question, once all other functions have asked theirs or ended."""
    hub = getcurrent().parent
    assert hub is not None, "only functions of `side_by_side` ask"
    return hub.switch(question)


def side_by_side(
    functions: Sequence[Callable[[], Result]], answer: Callable[[list[Any]], Sequence[Any]]
) -> list[Result]:
    """Results of all functions; `answer` gets the functions' questions and returns the answers.

    A layer's forward is transformers' own, and cannot be split after its router. So each function, for a chunk of rows,
    runs in a greenlet, which pauses when it asks for its experts and continues with the answer, in the same thread. An
    error of any of them, or of `answer`, ends all.
    """
    tasks, results = [_Asking(function) for function in functions], dict[_Asking, Any]()
    for task in tasks:
        task.gr_context = copy_context()  # by default a greenlet sees none of the caller's context variables
    try:
        given: list[tuple[_Asking, tuple[Any, ...]]] = [(task, ()) for task in tasks]
        while given:
            yielded = [(task, task.switch(*arguments)) for task, arguments in given]
            results |= {task: value for task, value in yielded if task.dead}
            asking = [(task, question) for task, question in yielded if not task.dead]
            answers = answer([question for _, question in asking]) if asking else ()
            given = [(task, (answered,)) for (task, _), answered in zip(asking, answers, strict=True)]
    finally:
        for task in tasks:
            if not task.dead:
                task.throw()  # ends the greenlet, which then releases its resources
    return [results[task] for task in tasks]


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """Sources of one stacked parameter, expert by expert."""

    parts: tuple[TensorSource, ...]

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return tuple(place for part in self.parts for place in part.places)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Scratch bytes of one expert."""
        return max(part.scratch_bytes(dtype) for part in self.parts)

    def table(self, raw: Sequence[torch.Tensor], dtype: torch.dtype, scratch: Scratch) -> ExpertTable:
        """The table that replaces the parameter; `raw` as in `TensorSource.value`."""
        raws, taken = [], 0
        for part in self.parts:
            raws.append(tuple(raw[taken : taken + len(part.places)]))
            taken += len(part.places)
        return ExpertTable(self, _AllThere(raws), dtype, scratch)


AnySource = TensorSource | ExpertSources


class ExpertBytes(Protocol):
    """Supplies an `ExpertTable` with bytes. All parameters of an expert come together."""

    def expect(self, experts: Sequence[int]) -> Sequence[int]:
        """Announce all experts that the layer's rows have chosen; returns them in the best order to compute."""

    def of(self, expert: int) -> Sequence[torch.Tensor]:
        """Tensors of an expert, as in `TensorSource.value`."""


class _AllThere:
    """ExpertBytes of experts that are all in memory."""

    def __init__(self, raws: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._raws = raws

    def expect(self, experts: Sequence[int]) -> Sequence[int]:
        """Keep the order."""
        return experts

    def of(self, expert: int) -> Sequence[torch.Tensor]:
        return self._raws[expert]


@contextmanager
def with_rows(num_rows: int) -> Iterator[None]:
    """Treat rows beyond `num_rows` as padding within the block."""
    token = _num_rows.set(num_rows)
    try:
        yield
    finally:
        _num_rows.reset(token)


@contextmanager
def counted_experts() -> Iterator[Choices]:
    """Count the distinct experts that a layer's rows choose, and those of one row, layer by layer within the block.

    The host waits for none: where only the device knows the choices, its table of `ExpertTiles` is there instead.
    """
    token = _counts.set([])
    try:
        yield _counts.get()
    finally:
        _counts.reset(token)


class ExpertTable:
    """The values of a stacked parameter, one expert at a time."""

    def __init__(self, experts: ExpertSources, raw: ExpertBytes, dtype: torch.dtype, scratch: Scratch) -> None:
        self._experts = experts
        self._raw = raw
        self._dtype = dtype
        self._memory: Scratch
        if isinstance(scratch, ReusedMemory):
            room = scratch.take((experts.scratch_bytes(dtype),), torch.uint8)
            self._memory = ReusedMemory(room)
            self._materialized: list[list[torch.Tensor]] | None = None
        else:
            self._memory = scratch
            self._materialized = [self._make(expert) for expert in range(len(experts.parts))]

    def expect(self, experts: Sequence[int]) -> Sequence[int]:
        """Announce all experts that the layer's rows have chosen; returns them in the best order to compute."""
        return self._raw.expect(experts)

    def pieces(self, expert: int) -> list[torch.Tensor]:
        """An expert's value in parts along the first axis; in reused memory valid until the next call.

        A projection stored in two tensors need not be concatenated for a product.
        """
        if self._materialized is not None:
            return self._materialized[expert]
        assert isinstance(self._memory, ReusedMemory), "values that do not stay are made in reused memory"
        self._memory.begin()
        return self._make(expert)

    def is_there(self, is_transposed: bool) -> bool:
        """Whether the values of all experts stay in memory."""
        if self._materialized is not None or not isinstance(self._raw, _AllThere):
            return self._materialized is not None
        return all(self.as_stored(expert, is_transposed) is not None for expert in range(len(self._experts.parts)))

    def as_stored(self, expert: int, is_transposed: bool) -> list[Matrix] | None:
        """An expert's value, or its transpose, in parts along outputs; None if it must be made."""
        source, raw = self._experts.parts[expert], self._raw.of(expert)
        if is_transposed and isinstance(source, Transposed):
            source, is_transposed = source.matrix, False
        parts = [part.as_stored(own, self._dtype) for part, own in parts_with_bytes(source, raw)]
        if is_transposed:
            parts = [part.t() if isinstance(part, torch.Tensor) and len(parts) == 1 else None for part in parts]
        stored = [part for part in parts if part is not None]
        return stored if len(stored) == len(parts) else None

    def _make(self, expert: int) -> list[torch.Tensor]:
        return pieces(self._experts.parts[expert], self._raw.of(expert), self._dtype, self._memory)


class _Routed(NamedTuple):
    """The rows of a chunk that have reached a layer's experts, without padding."""

    module: nn.Module
    hidden: torch.Tensor  # (num_rows, hidden_size)
    chosen: torch.Tensor  # (num_rows, k) experts
    weights: torch.Tensor  # (num_rows, k)
    num_padding: int

    def padded(self, result: torch.Tensor) -> torch.Tensor:
        """The result with zeros for padding."""
        return nn.functional.pad(result, (0, 0, 0, self.num_padding)) if self.num_padding else result


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implements transformers' experts interface: (rows, hidden) in and out, (rows, k) chosen experts and weights.

    Padding rows get zeros. Within `routed_together` the experts of all chunks are computed at once.
    """
    hidden, chosen, weights = (each[: _num_rows.get()] for each in (hidden_states, top_k_index, top_k_weights))
    routed = _Routed(self, hidden, chosen, weights, len(hidden_states) - len(hidden))
    result: torch.Tensor = ask(routed) if is_side_by_side() else _outputs([routed])[0]
    return result


def routed_together(chunks: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """Compute a layer's chunks of rows with one stop after their routers, and each expert once for all of them.

    Where experts come when they are chosen, the host waits for the device's choice.
    """
    return side_by_side(chunks, _outputs) if len(chunks) > 1 else [chunk() for chunk in chunks]


def _outputs(chunks: Sequence[_Routed]) -> list[torch.Tensor]:
    """The output of a layer's experts for the rows of each chunk."""
    module, *others = {chunk.module for chunk in chunks}
    assert not others, "all chunks reach the same experts"
    hidden, chosen, weights = (_joined(list(each), 0) for each in list(zip(*chunks, strict=True))[1:4])
    is_any = backend_of(hidden.device).takes_any_rows
    result = (_sums_of_any_rows if is_any else _sums)(module, hidden, chosen, weights)
    own = torch.split(result, [len(chunk.hidden) for chunk in chunks])
    return [chunk.padded(part) for chunk, part in zip(chunks, own, strict=True)]


def _sums_of_any_rows(
    module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The sums of experts' outputs by products of any number of rows.

    If all experts are on the device, the rows of all are multiplied together, and the host waits for nothing.
    """
    backend, num_experts = backend_of(hidden.device), int(module.num_experts)  # type: ignore[arg-type]
    tiles = backend.expert_tiles(chosen, num_experts)
    stacks = {name: _stacks(module, name) for name in (_first(module), DOWN)} if backend.groups_experts else {}

    def product(name: str, rows: torch.Tensor) -> list[torch.Tensor]:
        return [backend.multiply_grouped(rows, stack, tiles, is_sorted=name == DOWN) for stack in stacks[name]]

    is_grouped = backend.groups_experts and all(stacks.values())
    if is_grouped:
        _counts.get([]).append((tiles.table, chosen.shape[1]))
        made = _made(module, hidden, product)
    else:
        made = _made_one_by_one(module, hidden[tiles.places], tiles, chosen.shape[1])
    return backend.combine(made, tiles, chosen, weights, num_experts)


def _made_one_by_one(module: nn.Module, rows: torch.Tensor, tiles: ExpertTiles, num_chosen: int) -> torch.Tensor:
    """The output for each entry, in the order in which experts arrive. Waits for a GPU, whose router must have run."""
    made, spans, backend = torch.empty_like(rows), dict[int, tuple[int, int]](), backend_of(rows.device)
    for expert, begin, end in tiles.table.tolist():
        if begin < end:
            spans[expert] = (spans.get(expert, (begin,))[0], end)
    for expert in _announced(module, tuple(spans), num_chosen):

        def product(name: str, rows: torch.Tensor, expert: int = expert) -> list[torch.Tensor]:
            return [backend.multiply(rows, *operand) for operand in _operands(module, name, expert)]

        own = slice(*spans[expert])
        made[own] = _made(module, rows[own], product)
    return made


def _sums(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums of experts' outputs by products of a fixed number of rows, or our own on a CPU.

    Results are added in the order of experts, independent of the order of loading. An expert has a multiple of
    EXPERT_ROWS rows, except for our own products; a result then depends on its row alone.
    """
    result, choices = torch.zeros_like(hidden), _by_expert(chosen, int(module.num_experts))  # type: ignore[arg-type]
    parts = {}
    for expert in _announced(module, tuple(choices), chosen.shape[1]):
        rows, ranks = choices[expert]
        padded = _padded(hidden[rows], -(-len(rows) // EXPERT_ROWS) * EXPERT_ROWS)
        made = _made(module, padded, partial(_products, module, expert, len(rows)))[: len(rows)]
        parts[expert] = (made * weights[rows, ranks, None]).to(result.dtype)
    for expert, (rows, _) in choices.items():
        result.index_add_(0, rows, parts[expert])
    return result


def _announced(module: nn.Module, experts: Sequence[int], num_chosen: int) -> Sequence[int]:
    """The chosen experts, of which each row has `num_chosen`, in the best order to compute."""
    _counts.get([]).append((len(experts), num_chosen))
    table = module.down_proj
    return table.expect(experts) if isinstance(table, ExpertTable) else experts


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _made(
    module: nn.Module, rows: torch.Tensor, product: Callable[[str, torch.Tensor], list[torch.Tensor]]
) -> torch.Tensor:
    """Outputs of one expert or several, by products with a parameter, which may be in parts along outputs."""
    out = _joined(product(DOWN, _activated(module, product(_first(module), rows))), -1)
    if getattr(module, "has_post_expert_norm", False):  # unknown to transformers before 5.20
        out = module.post_expert_norm(out)  # type: ignore[operator]
    return out


def _activated(module: Any, ups: Sequence[torch.Tensor]) -> torch.Tensor:
    activation = getattr(module, "gate_activation", None)  # see `fused_parts`
    if module.has_gate and activation is not None:
        gates, others = ups if len(ups) == 2 else _joined(ups, -1).chunk(2, -1)
        return backend_of(gates.device).gate(gates, others, activation)
    result: torch.Tensor = (module._apply_gate if module.has_gate else module.act_fn)(_joined(ups, -1))
    return result


def _by_expert(chosen: torch.Tensor, num_experts: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Experts in order, each with the rows that chose it and the rank of that choice.

    (rows, k) in; numbers from `num_experts` on mean no choice. Waits once for a GPU, whose router must have run, and
    sends nothing there.
    """
    numbers, places = torch.sort(chosen.flatten(), stable=True)
    rows, ranks = places // chosen.shape[1], places % chosen.shape[1]
    experts = torch.arange(num_experts, device=chosen.device, dtype=numbers.dtype)
    spans = pairwise((0, *torch.searchsorted(numbers, experts, right=True).tolist()))
    return {expert: (rows[begin:end], ranks[begin:end]) for expert, (begin, end) in enumerate(spans) if begin < end}


def stack_of(module: nn.Module, source: AnySource) -> ExpertSources | None:
    """The experts of a stacked parameter, or None for other parameters; a single stored tensor is split by experts."""
    if not has_own_products(module):
        return None
    if isinstance(source, ExpertSources):
        return source
    if not isinstance(source, Stored) or len(source.shape) != 3:
        return None
    return ExpertSources(tuple(map(Stored, parts_of(source.place))))


def has_own_products(module: nn.Module) -> bool:
    """Whether `experts_forward` computes a module: transformers then knows the layout of its matrices."""
    return hasattr(module, "is_transposed")


def _stacks(module: Any, name: str) -> list[Stack]:
    """Of each part of a parameter, the matrices of all experts; none if some come later, must be made, or differ."""
    values, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
    if not hasattr(values, "stacks"):  # with addresses, which are sent to the device once
        is_there = not isinstance(values, ExpertTable) or values.is_there(module.is_transposed)
        is_there = is_there and not isinstance(bias, ExpertTable)
        operands = [_operands(module, name, expert) for expert in range(module.num_experts)] if is_there else []
        parts = [tuple(zip(*part, strict=True)) for part in zip(*operands, strict=True)]
        is_alike = all(len({*map(_kind, matrices)}) == 1 for matrices, _ in parts)
        values.stacks = [Stack.of(*part) for part in parts] if is_alike else []
    stacks: list[Stack] = values.stacks
    return stacks


def _kind(matrix: Matrix) -> tuple[Any, ...]:
    """What matrices of a stack have in common."""
    tensors = (
        tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors_of(matrix)
    )
    others = () if isinstance(matrix, torch.Tensor) else (x for x in matrix if not isinstance(x, torch.Tensor))
    return type(matrix), *tensors, *others


def _operands(module: Any, name: str, expert: int) -> list[tuple[Matrix, torch.Tensor | None]]:
    """An expert's matrices with their biases, in parts along outputs; packed ones as they are stored."""
    values = getattr(module, name)
    found = values.as_stored(expert, module.is_transposed) if isinstance(values, ExpertTable) else None
    matrices: Sequence[Matrix] = found or _written_out(module, name, expert)
    if not module.has_bias:
        return [(matrix, None) for matrix in matrices]
    bias = _joined(_pieces(module, f"{name}_bias", expert), 0)
    return list(zip(matrices, torch.split(bias, [matrix.shape[0] for matrix in matrices]), strict=True))


def _written_out(module: nn.Module, name: str, expert: int) -> list[torch.Tensor]:
    """An expert's matrix in parts along outputs."""
    weights = _pieces(module, name, expert)
    return [_joined(weights, 0).t()] if module.is_transposed else weights


def _products(module: nn.Module, expert: int, count: int, name: str, rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows times a matrix of an expert; rows from `count` on are padding."""
    out = [_product(rows, weight, count) for weight in _written_out(module, name, expert)]
    return [_joined(out, -1) + _joined(_pieces(module, f"{name}_bias", expert), 0)] if module.has_bias else out


def _product(rows: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    backend = backend_of(rows.device)
    if backend.multiplies_single_rows(rows, weight):
        return _padded(backend.multiply(rows[:count], weight, None), len(rows))
    return torch.cat([backend.linear(part, weight) for part in torch.split(rows, EXPERT_ROWS)])


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return nn.functional.pad(rows, (0, 0, 0, count - len(rows))) if count > len(rows) else rows


def _pieces(module: nn.Module, name: str, expert: int) -> list[torch.Tensor]:
    """An expert's value in parts along the first axis, from a table or a plain stacked parameter."""
    values = getattr(module, name)
    return values.pieces(expert) if isinstance(values, ExpertTable) else [values[expert]]


def _joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=axis)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
