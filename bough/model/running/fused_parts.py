"""Replaces norms, rotary embeddings and gates of transformers' modules by the backend's, which are one kernel each.

What a module computes is found by trying: if its own forward gives the bits of one of `Backend`'s formulas for random
numbers, it is replaced. So no class is listed here, and one that computes otherwise keeps its forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from bough.model.architecture.moe import has_own_products
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
NO_NORMS = (nn.Linear, nn.Embedding, nn.LayerNorm)  # torch computes each row of a LayerNorm alone
MOST_WEIGHTS = 1 << 18  # of a norm
FIXED = RowCounts(256, 256)  # rows of norms that are not known
TRIED = torch.bfloat16  # roundings at other places give other bits
NUM_ROWS, WIDTH = 3, 16  # of random numbers: few, as there are many modules
SCALES = -3, 1  # powers of ten by which random rows are scaled: in small rows a norm's epsilon counts
LARGE = 1000.0  # factor of a gate's other random rows: clamped gates compute large numbers otherwise


def fuse_parts(decoder: nn.Module, backend: Backend) -> None:
    """Replace what can be, before products are; norms that are not known run with a fixed number of rows.

    Modules with a forward of their own, already replaced, stay.
    """
    for module in decoder.modules():
        if "forward" in vars(module):
            continue
        if has_own_products(module):
            _find_gate(module)
            continue
        if not any(True for _ in module.children()):
            _fuse_norm(module, backend)
        elif not _fuse_gate(module, backend):
            _fuse_rotation(module, backend)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRIED)


def _random_gates(*shape: int) -> torch.Tensor:
    """Rows as `_random`, and as many large ones."""
    rows = _random(*shape)
    return torch.cat((rows, LARGE * rows), -2)


def _result(function: Forward, *inputs: Any) -> Any:
    """What a function returns; None if it raises an error, as one does that has other inputs."""
    try:
        with torch.inference_mode():
            return function(*inputs)
    except Exception:  # of any kind: what it computes is not known
        return None


def _same(mine: Any, theirs: Any) -> bool:
    is_both = isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
    return is_both and mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def _replace(module: Any, backend: Backend, run: Callable[[], Any], forwards: Iterable[Forward]) -> bool:
    """Replace a module's forward by one that gives its bits, with this backend; returns whether there is one."""
    own = run()
    for forward in forwards:
        module.forward = partial(forward, module, load("reference"))
        if _same(run(), own):
            module.forward = partial(forward, module, backend)
            return True
        del module.forward
    return False


def _fuse_norm(module: Any, backend: Backend) -> None:
    """Replace a module that has rows, or rows and gates, as input; a row is as large as its weights."""
    weights = {name: _random(*p.shape) for name, p in module.named_parameters() if p.numel() <= MOST_WEIGHTS}
    row = max((weight.shape for weight in weights.values()), key=len, default=torch.Size([WIDTH]))
    if isinstance(module, NO_NORMS) or len(row) > 2 or len(weights) < len([*module.parameters()]):
        return
    in_fixed = partial(_in_fixed_counts, module.forward, len(row))
    rows, gates = (_random(NUM_ROWS, *row, seed=seed) for seed in (1, 2))
    rows = (rows * torch.logspace(*SCALES, NUM_ROWS).view(-1, *(1 for _ in row))).to(TRIED)
    for inputs in ((rows, gates), (rows,)):
        run = partial(_result, functional_call, module, weights, inputs)
        own = run()
        if isinstance(own, torch.Tensor) and own.shape == rows.shape:
            break
    else:
        if "norm" in type(module).__name__.lower():  # it cannot be tried, as with a buffer that has no memory yet
            module.forward = in_fixed
        return
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    forwards = [partial(_normed, *found) for found in product(NORMS, epsilons)] if [*weights] == ["weight"] else []
    if not _replace(module, backend, run, forwards):
        rows[..., 0] += 1.0
        if not _same(own[..., 1:], run()[..., 1:]):  # it computes a number from several of the row
            module.forward = in_fixed


def _normed(
    kind: Norm, epsilon: float, module: Any, backend: Backend, rows: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    return backend.norm(rows, module.weight, epsilon, kind, gate)


def _in_fixed_counts(forward: Forward, num_axes: int, *rows: torch.Tensor, **others: Any) -> torch.Tensor:
    """A norm of any number of rows of some axes: on a GPU torch divides a row's sum by the number of rows."""
    flat = (each.reshape(-1, *each.shape[-num_axes:]) for each in rows)
    return in_counts(partial(forward, **others), FIXED, *flat).view(rows[0].shape)


def _fuse_gate(module: Any, backend: Backend) -> bool:
    """Replace an MLP whose hidden numbers are gated; returns whether it is one."""
    linears = {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}
    if {*linears} not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return False
    weights = dict[str, torch.Tensor]()
    for seed, (name, linear) in enumerate(linears.items()):
        num_outputs = 2 * WIDTH if name == "gate_up_proj" else WIDTH
        weights[f"{name}.weight"] = _random(num_outputs, WIDTH, seed=seed)
        if linear.bias is not None:
            weights[f"{name}.bias"] = _random(num_outputs)
    run = partial(_result, functional_call, module, weights, (_random_gates(1, NUM_ROWS, WIDTH),))
    return _replace(module, backend, run, [partial(_gated, name) for name in ACTIVATIONS])


def _gated(activation: str, module: Any, backend: Backend, rows: torch.Tensor) -> torch.Tensor:
    if hasattr(module, "gate_up_proj"):
        gates, ups = module.gate_up_proj(rows).chunk(2, -1)
    else:
        gates, ups = module.gate_proj(rows), module.up_proj(rows)
    result: torch.Tensor = module.down_proj(backend.gate(gates, ups, activation))
    return result


def _find_gate(experts: Any) -> None:
    """Note the activation by which hidden numbers of experts are gated; None if it is not known."""
    both = _random_gates(NUM_ROWS, 2 * WIDTH)
    own, (gates, ups) = _result(experts._apply_gate, both), both.chunk(2, -1)
    found = (name for name in ACTIVATIONS if _same(load("reference").gate(gates, ups, name), own))
    experts.gate_activation = next(found, None)


def _fuse_rotation(module: Any, backend: Backend) -> None:
    """Replace an attention's forward by one in which functions that turn by tables are the backend's."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType):
        return
    named: dict[str, Any] = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    ours = {name: partial(_turned, function, backend) for name, function in named.items() if _takes_tables(function)}
    scope = forward.__globals__ | ours
    made = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    if ours:
        module.forward = MethodType(made, module)


def _takes_tables(function: Any) -> bool:
    is_function = callable(function) and not isinstance(function, type)
    return is_function and [*inspect.signature(function).parameters][:4] == ["q", "k", "cos", "sin"]


def _turned(function: Forward, backend: Backend, *arguments: Any, **others: Any) -> Any:
    """What the function returns, by the backend if it is one of its formulas."""
    if len(arguments) == 4 and not others:
        queries, keys, cos, sin = arguments
        is_usual = (queries.dim(), cos.dim()) == (4, 3) and queries.shape[-1] == keys.shape[-1]
        sizes = queries.shape[-1], queries.dtype, cos.shape[-1], cos.dtype
        kind = _rotary(function, *sizes) if is_usual else None
        if kind is not None:
            return backend.rotate(queries, keys, cos, sin, kind)
    return function(*arguments, **others)


@cache
def _rotary(
    function: Forward, width: int, dtype: torch.dtype, table_width: int, table_dtype: torch.dtype
) -> Rotary | None:
    """The function's formula for heads and tables of these widths and types."""
    heads = [_random(1, num, NUM_ROWS, width, seed=num).to(dtype) for num in (3, 2)]
    tables = [_random(1, NUM_ROWS, table_width, seed=seed).to(table_dtype) for seed in (0, 1)]
    found = _result(function, *heads, *tables)
    for kind in ROTARIES:
        ours = _result(load("reference").rotate, *heads, *tables, kind)
        if found is not None and ours is not None and all(map(_same, found, ours)):
            return kind
    return None
