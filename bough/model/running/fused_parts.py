"""Replaces norms, rotary embeddings and gates of transformers' modules by the backend's, which are one kernel each.

What a module computes is found by trying: if its own forward gives the bits of one of `Backend`'s formulas for random
numbers, it is replaced. So no class is listed here, and one that computes otherwise keeps its forward.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from bough.model.backend import ACTIVATIONS, Backend, Norm, Rotary, Table, in_counts, load
from bough.sizing.row_counts import RowCounts

Forward = Callable[..., Any]
NORMS = (Norm(is_rounded=True), Norm(), Norm(adds_one=True), Norm(is_centred=True))
ROTARIES = (
    Rotary(),
    Rotary(table=Table.HALF),
    Rotary(in_pairs=True, out_pairs=True, is_wide=True),
    Rotary(in_pairs=True, out_pairs=True, table=Table.FIRST),
    Rotary(in_pairs=True, table=Table.FIRST),
)
# Never replaced as norms. torch computes a row of a LayerNorm alone.
OTHERS = (nn.Linear, nn.Embedding, nn.LayerNorm)
MOST_WEIGHTS = 1 << 18  # of a module that is tried as a norm
TRIED = torch.bfloat16  # roundings at other places give other bits
FIXED = RowCounts(256, 256)  # rows of modules that are not known
NUM_ROWS, WIDTH = 8, 16  # of random numbers
LEAST, MOST = -3, 1  # powers of ten by which random rows are scaled: in small rows the norm's epsilon counts


def fuse_parts(decoder: nn.Module, backend: Backend) -> None:
    """Replace what can be; other modules that add numbers of a row run with a fixed number of rows.

    Modules with a forward of their own, already replaced, stay.
    """
    known: dict[Any, Any] = {}
    rotating = partial(_rotating, backend)

    def once(find: Callable[[Any], Any], of: Any, *key: Any) -> Any:
        if (find, key) not in known:
            known[find, key] = find(of)
        return known[find, key]

    for module in decoder.modules():
        if "forward" in vars(module):
            continue
        forward: Any = type(module).forward
        if not any(True for _ in module.children()):
            if found := once(_norm, module, _key(module)):
                module.forward = partial(_normed, module, backend, *found)
            elif once(_adds, module, _key(module)):
                module.forward = partial(_in_fixed_counts, module.forward, len(_row(module)))
        elif activation := once(_activation, module, _key(module)):
            module.forward = partial(_gated, module, backend, activation)
        elif function := once(rotating, forward, forward):
            module.forward = MethodType(function, module)


def _key(module: nn.Module) -> tuple[Any, ...]:
    """What decides which formula is a module's."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    shapes = {name: p if p is None else p.shape for name, p in module._parameters.items()}
    children = {name: type(child) for name, child in module.named_children()}
    return type(module), *(tuple(found.items()) for found in (plain, shapes, children))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRIED)


def _as_tried(module: nn.Module, parts: Mapping[str, nn.Module | nn.Parameter]) -> nn.Module:
    """A copy of a module with other parts, on the CPU."""
    tried = copy.copy(module)
    for name in ("_parameters", "_modules", "_buffers"):
        setattr(tried, name, dict(getattr(module, name)))
    for name, part in parts.items():
        setattr(tried, name, part)
    return tried


def _result(forward: Forward, *inputs: Any) -> Any:
    """What a forward returns; None if it raises an error, as one does that has other inputs."""
    try:
        with torch.inference_mode():
            return forward(*inputs)
    except Exception:  # of any kind: what it computes is not known
        return None


def _same(mine: Any, theirs: Any) -> bool:
    is_both = isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
    return is_both and mine.dtype == theirs.dtype and torch.equal(mine, theirs)


class _Trial(NamedTuple):
    """A module of one input, or of two of the same size, its random inputs, and its result."""

    module: Any
    inputs: tuple[torch.Tensor, ...]
    result: torch.Tensor


def _row(module: nn.Module) -> torch.Size:
    """The shape of what a norm's weights are for: a row, or its heads."""
    return max((parameter.shape for parameter in module.parameters()), key=len, default=torch.Size([WIDTH]))


def _trial(module: nn.Module) -> _Trial | None:
    """None if its result is not of its input's size."""
    row = _row(module)
    if isinstance(module, OTHERS) or len(row) > 2 or row.numel() > MOST_WEIGHTS:
        return None
    weights = {name: nn.Parameter(_random(*p.shape), requires_grad=False) for name, p in module.named_parameters()}
    tried = _as_tried(module, weights)
    scales = torch.logspace(LEAST, MOST, NUM_ROWS).view(NUM_ROWS, *(1 for _ in row))
    rows, gate = (_random(1, NUM_ROWS, *row, seed=seed) for seed in (1, 2))
    rows = (rows * scales).to(TRIED)
    for inputs in ((rows,), (rows, gate)):
        result = _result(tried.forward, *inputs)
        if isinstance(result, torch.Tensor) and result.shape == rows.shape:
            return _Trial(tried, inputs, result)
    return None


def _norm(module: nn.Module) -> tuple[Norm, float] | None:
    """Which norm it is, and its epsilon."""
    trial = _trial(module)
    if trial is None or [*module._parameters] != ["weight"]:
        return None
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    for kind, epsilon in product(NORMS, epsilons):
        rows, *gate = trial.inputs
        if _same(trial.result, _result(load("reference").norm, rows, trial.module.weight, epsilon, kind, *gate)):
            return kind, epsilon
    return None


def _normed(
    module: Any, backend: Backend, kind: Norm, epsilon: float, rows: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    return backend.norm(rows, module.weight, epsilon, kind, gate)


def _adds(module: nn.Module) -> bool:
    """Whether it computes a number of the result from several of the row."""
    trial = _trial(module)
    if trial is None:
        return False
    rows, *gate = trial.inputs
    others = rows.clone()
    others[..., 0] += 1.0
    return not _same(trial.result[..., 1:], trial.module.forward(others, *gate)[..., 1:])


def _in_fixed_counts(forward: Forward, num_axes: int, *rows: torch.Tensor) -> torch.Tensor:
    """A norm of any number of rows of some axes: on a GPU torch divides a row's sum by the number of rows."""
    flat = (each.reshape(-1, *each.shape[-num_axes:]) for each in rows)
    return in_counts(forward, FIXED, *flat).view(rows[0].shape)


def _activation(module: nn.Module) -> str | None:
    """The activation of a gated MLP."""
    linears = {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}
    if {*linears} not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return None
    parts = dict[str, nn.Module | nn.Parameter]()
    for seed, (name, linear) in enumerate(linears.items()):
        parts[name] = small = nn.Linear(WIDTH, 2 * WIDTH if name == "gate_up_proj" else WIDTH, device="meta")
        small.weight = nn.Parameter(_random(*small.weight.shape, seed=seed), requires_grad=False)
        small.bias = None if linear.bias is None else nn.Parameter(_random(small.out_features), requires_grad=False)
    tried, rows = _as_tried(module, parts), _random(1, NUM_ROWS, WIDTH)
    result = _result(tried.forward, rows)
    return next((name for name in ACTIVATIONS if _same(result, _gated(tried, load("reference"), name, rows))), None)


def _gated(module: Any, backend: Backend, activation: str, rows: torch.Tensor) -> torch.Tensor:
    if hasattr(module, "gate_up_proj"):
        gates, ups = module.gate_up_proj(rows).chunk(2, -1)
    else:
        gates, ups = module.gate_proj(rows), module.up_proj(rows)
    result: torch.Tensor = module.down_proj(backend.gate(gates, ups, activation))
    return result


def _rotating(backend: Backend, forward: Any) -> FunctionType | None:
    """An attention's forward in which functions that turn queries and keys by tables are the backend's."""
    if not isinstance(forward, FunctionType):
        return None
    named: dict[str, Any] = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    ours = {name: _rotation(backend, function) for name, function in named.items() if _takes_tables(function)}
    made = FunctionType(
        forward.__code__, forward.__globals__ | ours, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made if ours else None


def _takes_tables(function: Any) -> bool:
    is_function = callable(function) and not isinstance(function, type)
    return is_function and {"cos", "sin"} <= {*inspect.signature(function).parameters}


def _rotation(backend: Backend, function: Forward) -> Forward:
    """A function like one that turns queries and keys; what that computes is tried at the first call."""
    known: dict[Any, Rotary | None] = {}

    def rotate(queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        kind = None
        if not rest:
            key = *((x.shape[-1], x.dtype) for x in (queries, keys, cos)), queries.dim(), cos.dim()
            if key not in known:
                known[key] = _rotary(function, queries, keys, cos)
            kind = known[key]
        if kind is None:
            return function(queries, keys, cos, sin, *rest)
        return backend.rotate(queries, keys, cos, sin, kind)

    return rotate


def _rotary(function: Forward, queries: torch.Tensor, keys: torch.Tensor, table: torch.Tensor) -> Rotary | None:
    """The function's kind for tensors of these types and last axes."""
    likes, axes = (queries, keys, table, table), ((1, 3, NUM_ROWS), (1, 2, NUM_ROWS), (1, NUM_ROWS), (1, NUM_ROWS))
    inputs = [
        _random(*shape, like.shape[-1], seed=seed).to(like.dtype)
        for seed, (like, shape) in enumerate(zip(likes, axes, strict=True))
    ]
    if [like.dim() for like in likes] != [numbers.dim() for numbers in inputs]:
        return None
    found = _result(function, *inputs)
    for kind in ROTARIES:
        ours = _result(load("reference").rotate, *inputs, kind)
        if found is not None and ours is not None and all(map(_same, found, ours)):
            return kind
    return None
