"""Checks of kernels at the shapes of a model: values against the reference's, and a row's bits among other rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import finfo, nn

from bough.model.architecture.latent import is_latent
from bough.model.architecture.moe import has_own_products, stack_of
from bough.model.backend import ACTIVATIONS, Backend, Norm, Rotary, Table, computing_by
from bough.model.batch.batch import Batch, Segment
from bough.model.batch.state_steps import COMMITTED, StateSteps
from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.tensor_source import Joined, TensorSource, Transposed
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.loading.loading import Skeleton
from bough.model.packed import Matrix, Stack
from bough.model.quant.format import Dequantized, place_of
from bough.model.running.fused_parts import NORMS, ROTARIES
from bough.trees.tree import Tree

NUM_ROWS, NUM_NODES = 256, 70  # rows of a check, and how many of them attend as one tree; the others are another
CHAIN = (0, 1, 3, 7, 15)  # nodes of a path
# Rows whose bits must be the same without the others: parts of the trees at several places, the tree of short paths
# alone, and paths that attend as contexts.
FEWER = (
    [0],
    [NUM_NODES, *range(7)],
    [*range(NUM_NODES, NUM_NODES + 24), *range(40)],
    [*range(20), 34, 69],
    [*range(NUM_NODES, NUM_NODES + 8)],
    [*CHAIN, *(NUM_NODES + node for node in CHAIN)],
)
MANY = 256  # outputs of a matrix: more of them are computed alike
CONTEXT, WINDOW = 1100, 300  # keys before a tree, as attention divides long paths; and how many a row sees
UNIT = 2.0**-24  # of rounding in float32


class Check(NamedTuple):
    """A kernel at one shape of a model."""

    name: str  # with shapes
    operands: Sequence[Sequence[int] | Dequantized]  # their sizes, or the layout of a packed matrix
    num_by_row: int  # the first operands, which have NUM_ROWS rows
    call: Callable[..., torch.Tensor]  # its results for some rows by a backend: of this, the rows and the operands
    # Limit before results are rounded, relative to their root mean square; 0.0: operands are integers, and sums exact.
    error: float = 0.0
    is_shared: bool = True  # whether the backend to fall back to has the same kernel
    is_of_each: bool = False  # whether `error` is relative to each result instead

    def run(self, backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ArithmeticError for a wrong result, or what the kernel raises."""
        generator = torch.Generator().manual_seed(0)
        operands = [_operand(each, generator, self.error > 0, dtype, device) for each in self.operands]

        def results(backend: Backend, operands: Sequence[Matrix], rows: Sequence[int]) -> torch.Tensor:
            own = (_rows(numbers, rows) for numbers in operands[: self.num_by_row])
            return self.call(backend, rows, *own, *operands[self.num_by_row :])

        found = results(backend, operands, range(NUM_ROWS))
        for rows in FEWER:
            if not torch.equal(results(backend, operands, rows), _rows(found, rows)):
                raise ArithmeticError(f"{len(rows)} rows have other bits than among {NUM_ROWS}")
        with computing_by("reference") as reference:
            wide = [reference.written_out(each, dtype).double() for each in operands]
            wanted = results(reference, wide, range(NUM_ROWS)).double()
        rounding = wanted.abs() * (finfo(found.dtype).eps / 2 + 2 * UNIT)
        size = wanted.abs() if self.is_of_each else wanted.square().mean().sqrt()
        excess = (found.double() - wanted).abs() - rounding - self.error * size
        if not bool((excess <= 2.0**-16).all()):  # which is not so for NaN either
            raise ArithmeticError(f"values are up to {float(excess.max()):.3g} further off than rounding")


def checks_of(skeleton: Skeleton) -> tuple[Check, ...]:
    """Checks of the kernels that a model needs."""
    kinds = _products, _products_by_head, _experts, _parts_of_rows, _attention, _recurrence
    return tuple(check for kind in kinds for check in kind(skeleton))


def _operand(
    of: Sequence[int] | Dequantized,
    generator: torch.Generator,
    is_random: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Matrix:
    """A packed matrix, random numbers, or integers up to 8, of a matrix with a first row of ones."""
    if isinstance(of, Dequantized):
        seed = int(torch.randint(1 << 30, (), generator=generator))
        return of.packed([part.to(device) for part in of.random(np.random.default_rng(seed))])
    size = tuple(of)
    numbers = torch.randn(size, generator=generator) if is_random else torch.randint(-8, 9, size, generator=generator)
    if len(size) == 2 and not is_random:
        numbers[0] = 1
    return numbers.to(dtype).to(device)


def _rows(numbers: Any, rows: Sequence[int]) -> torch.Tensor:
    own: torch.Tensor = numbers[torch.tensor(rows).to(numbers.device)]
    return own


def _products(skeleton: Skeleton) -> Iterator[Check]:
    """Sums of integers are exact in any order; the errors of others are of either sign, and add up like a root."""
    modules = (skeleton.model.get_output_embeddings(), *(each for layer in skeleton.layers for each in layer.modules()))
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    few = {(min(x.out_features, MANY + x.out_features % MANY), x.in_features, x.bias is not None) for x in linears}
    for outputs, inputs, has_bias in sorted(few):
        sizes = ((NUM_ROWS, inputs), (outputs, inputs), *([(outputs,)] if has_bias else []))
        name = f"product of {inputs} inputs, {outputs} outputs{' with bias' if has_bias else ''}"
        yield Check(f"{name}, integers", sizes, 1, _multiplied, is_shared=False)
        yield Check(name, sizes, 1, _multiplied, 8 * inputs * UNIT, is_shared=False)
    slots = (*skeleton.resident_slots, *(slot for layer in skeleton.layer_slots for slot in layer))
    for source in dict.fromkeys(_few_outputs(x.source) for x in slots if _is_packed(x.source)):
        outputs, inputs = source.shape
        name = f"{inputs} inputs, {outputs} outputs in the layout {_layout(source)}"
        yield Check(f"unpacking of {name}", ((NUM_ROWS, 1), source), 1, _unpacked)
        operands = (NUM_ROWS, inputs), source
        yield Check(f"product of {name}", operands, 1, _multiplied, 8 * inputs * UNIT, is_shared=False)


def _products_by_head(skeleton: Skeleton) -> Iterator[Check]:
    """Of latent attention: with the matrices of keys, which are turned, and of values."""
    config = skeleton.config
    if any(map(is_latent, skeleton.model.modules())):
        heads, rank = int(config.num_attention_heads), int(config.kv_lora_rank)
        for inputs, outputs, axis in ((config.qk_nope_head_dim, rank, 1), (rank, config.v_head_dim, 2)):
            sizes = (NUM_ROWS, heads, inputs), (heads, *((inputs, outputs) if axis == 1 else (outputs, inputs)))
            call = partial(_multiplied_by_head, axis)
            yield Check(f"products by head of {sizes}", sizes, 1, call, 8 * inputs * UNIT, is_shared=False)


def _multiplied_by_head(
    axis: int, backend: Backend, _: Sequence[int], rows: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """`axis` of the matrices has the inputs."""
    return backend.linear_by_head(rows.transpose(0, 1), matrices.transpose(axis, 2))


def _is_packed(source: object) -> TypeGuard[Dequantized]:
    return isinstance(source, Dequantized) and source.is_packed


def _few_outputs(source: Dequantized) -> Dequantized:
    """The layout of a matrix of no file, if possible with few outputs."""
    whole, axis, parts = source.shape[0], -1 if source.is_transposed else 0, dict[str, TensorPlace]()
    few = math.lcm(MANY, 2 * getattr(source, "half", 1))  # with all rows of a head, as `Blocks` has them
    outputs = few if whole % few == 0 else whole
    for field in fields(source):
        if isinstance(place := getattr(source, field.name), TensorPlace):
            shape = list(place.shape)
            if field.name != "groups" and shape and shape[axis] * outputs % whole == 0:
                shape[axis] = shape[axis] * outputs // whole
            parts[field.name] = place_of(place.dtype, *shape)
    return replace(source, **parts)


def _layout(source: Dequantized) -> str:
    values = (getattr(source, field.name) for field in fields(source))
    parts = [value.dtype if isinstance(value, TensorPlace) else value for value in values]
    return f"{type(source).__name__} {parts}"


def _unpacked(backend: Backend, _: Sequence[int], rows: torch.Tensor, matrix: Any) -> torch.Tensor:
    """The rows themselves; only the matrix is compared."""
    with computing_by("reference") as reference:
        plain = reference.written_out(matrix, rows.dtype)
    if not torch.equal(backend.written_out(matrix, rows.dtype), plain):
        raise ArithmeticError("weights have other bits than the reference's")
    return rows


def _multiplied(
    backend: Backend, _: Sequence[int], rows: torch.Tensor, matrix: Any, *bias: torch.Tensor
) -> torch.Tensor:
    if backend.name == "reference":
        return backend.linear(rows, matrix, *bias)
    out = backend.multiply(rows, matrix, *bias)
    if not isinstance(matrix, torch.Tensor):
        with computing_by("reference") as reference:
            plain = reference.written_out(matrix, rows.dtype)
        if not torch.equal(out, backend.multiply(rows, plain, *bias)):
            raise ArithmeticError("products with packed weights have other bits than with these written out")
    return out


def _experts(skeleton: Skeleton) -> Iterator[Check]:
    """Three experts, of which each row chooses two."""
    few = dict[tuple[Dequantized | tuple[int, ...], bool], None]()
    for slot in (slot for layer in skeleton.layer_slots for slot in layer):
        if (stack := stack_of(slot.module, slot.source)) is not None:
            is_turned = bool(slot.module.is_transposed) and not isinstance(stack.parts[0], Transposed)
            few |= dict.fromkeys((_few_of_expert(part, is_turned), is_turned) for part in _parts(stack.parts[0]))
    for matrix, is_turned in few:
        shape = matrix.shape if isinstance(matrix, Dequantized) else matrix
        outputs, inputs = reversed(shape) if is_turned else shape
        layout = f" in the layout {_layout(matrix)}" if isinstance(matrix, Dequantized) else ""
        name = f"{inputs} inputs, {outputs} outputs of experts{layout}{', transposed' if is_turned else ''}"
        if layout:
            yield Check(f"unpacking of {name}", ((NUM_ROWS, 1), matrix), 1, _unpacked)
        operands, call = ((NUM_ROWS, inputs), matrix, matrix, matrix), partial(_chosen, is_turned)
        yield Check(f"product of {name}", operands, 1, call, 8 * inputs * UNIT, is_shared=False)


def _few_of_expert(part: TensorSource, is_turned: bool) -> Dequantized | tuple[int, ...]:
    """The layout of an expert's matrix, or the shape in which it is stored, if possible with few outputs."""
    if _is_packed(part) and not is_turned:  # otherwise it is written out
        return _few_outputs(part)
    inputs, outputs = part.shape if is_turned else part.shape[::-1]
    few = min(outputs, MANY + outputs % MANY)
    return (inputs, few) if is_turned else (few, inputs)


def _chosen(
    is_turned: bool, backend: Backend, numbers: Sequence[int], rows: torch.Tensor, *matrices: Any
) -> torch.Tensor:
    """Both products of each row."""
    matrices = tuple(matrix.t() for matrix in matrices) if is_turned else matrices
    chosen = _choices(numbers, 2, rows.device)
    if backend.groups_experts:
        tiles = backend.expert_tiles(chosen, 3)
        out = backend.multiply_grouped(rows, Stack.of(matrices), tiles)
        return out[tiles.entries].view(len(rows), -1)
    by_expert = torch.stack([_multiplied(backend, numbers, rows, matrix) for matrix in matrices], 1)
    return by_expert[torch.arange(len(rows), device=rows.device)[:, None], chosen].flatten(1)


def _parts(source: TensorSource) -> Iterator[TensorSource]:
    """The matrices that products take of an expert's parameter."""
    for part in source.parts if isinstance(source, Joined) else (source,):
        yield part.matrix if isinstance(part, Transposed) else part


def _choices(numbers: Sequence[int], k: int, device: torch.device) -> torch.Tensor:
    """Of `k` + 1 experts by each row."""
    return torch.tensor([[(number + i) % (k + 1) for i in range(k)] for number in numbers]).to(device)


def _combined(backend: Backend, numbers: Sequence[int], made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of integers whose sums are exact in every type."""
    made = made.clamp(-1, 1)
    k, by_expert, flat = made.shape[1], torch.empty_like(made).flatten(0, 1), made.flatten(0, 1)
    tiles = backend.expert_tiles(chosen := _choices(numbers, k, made.device), k + 1)
    by_expert[tiles.entries] = flat
    return backend.combine(by_expert, tiles, chosen, weights, k + 1)


def _parts_of_rows(skeleton: Skeleton) -> Iterator[Check]:
    """Norms, gates and rotary embeddings are rounded up to three times; sums of integers are exact."""
    shape, heads, eps = skeleton.kv_shape(), int(skeleton.config.num_attention_heads), finfo(skeleton.dtype).eps
    error = 1.5 * eps + 64 * UNIT
    modules = dict(skeleton.model.get_decoder().named_modules())
    norms = [x for x in modules.values() if "norm" in type(x).__name__.lower()]
    rows = sorted({tuple(x.weight.shape) for x in norms if getattr(x, "weight", None) is not None})
    for row, kind, num_by_row in product(rows, NORMS, (1, 2) if shape.states else (1,)):  # the second is a gate
        sizes = (*[(NUM_ROWS, *row)] * num_by_row, row)
        call = partial(_normed, kind)
        yield Check(f"norm of {sizes}, {kind}", sizes, num_by_row, call, error, is_of_each=True)
    widths = {x.in_features for name, x in modules.items() if name.endswith("down_proj") and isinstance(x, nn.Linear)}
    if experts := [x for x in modules.values() if has_own_products(x)]:
        widths |= {x.down_proj.shape[1 if x.is_transposed else 2] for x in experts}
        k = int(getattr(skeleton.config, "num_experts_per_tok", 2))
        sizes = (NUM_ROWS, k, int(skeleton.config.hidden_size)), (NUM_ROWS, k)
        yield Check(f"sums of experts' outputs of {sizes}", sizes, 2, _combined)
    for width, activation in product(sorted(widths), ACTIVATIONS):
        sizes = ((NUM_ROWS, width), (NUM_ROWS, width))
        yield Check(f"gate of {sizes}, {activation}", sizes, 2, partial(_gated, activation), error, is_of_each=True)
    for kind in ROTARIES if shape.num_layers else ():
        table = (NUM_ROWS, shape.head_dim // (2 if kind.table is Table.HALF else 1))
        sizes = (NUM_ROWS, heads, shape.head_dim), (NUM_ROWS, shape.num_kv_heads, shape.head_dim), table, table
        yield Check(f"rotary embeddings of {sizes}, {kind}", sizes, 4, partial(_turned, kind), 8 * eps)


def _normed(kind: Norm, backend: Backend, _: Sequence[int], *operands: torch.Tensor) -> torch.Tensor:
    rows, *gate, weight = operands
    return backend.norm(rows, weight, 1e-6, kind, *gate)


def _gated(activation: str, backend: Backend, _: Sequence[int], gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    return backend.gate(gates, ups, activation)


def _turned(kind: Rotary, backend: Backend, _: Sequence[int], *operands: torch.Tensor) -> torch.Tensor:
    queries, keys = (heads.transpose(0, 1)[None] for heads in operands[:2])
    cos, sin = (table[None].clamp(-1, 1) for table in operands[2:])
    return torch.cat([x[0].transpose(0, 1).flatten(1) for x in backend.rotate(queries, keys, cos, sin, kind)], 1)


def _recurrence(skeleton: Skeleton) -> Iterator[Check]:
    if (shape := skeleton.kv_shape().states) is not None:
        sizes = (NUM_ROWS, shape.num_inputs), (NUM_ROWS, shape.num_heads), (NUM_ROWS, shape.num_heads), shape.size
        call = partial(_recurred, shape.num_key_heads)
        yield Check(f"recurrence of {shape.num_key_heads} key heads, {sizes}", sizes, 3, call, 2.0**-10)


def _recurred(num_key_heads: int, backend: Backend, rows: Sequence[int], *operands: torch.Tensor) -> torch.Tensor:
    """Each row takes two steps after the committed state."""
    qkv, decay, beta, state = (x if x.dtype == torch.float64 else x.float() for x in operands)
    places = np.arange(len(rows)) % 4 + 1
    first, second = ([np.arange(len(rows)), before, places] for before in (COMMITTED + 0 * places, places))
    steps = np.stack((np.stack(first, 1), np.stack(second, 1)), 1).reshape(-1, 3)
    states = state.new_zeros(len(state), 5, *state.shape[1:])
    states[:, COMMITTED] = state
    own = StateSteps(torch.empty(0), steps, 5, torch.empty(0))
    return backend.recur(qkv, decay.abs().clamp(max=1.0), beta.abs(), own, states, num_key_heads, 0)


def _attention(skeleton: Skeleton) -> Iterator[Check]:
    """With queries of 0 all keys count alike: one too few or too many changes each result."""
    config, shape, modules = skeleton.config, skeleton.kv_shape(), list(skeleton.model.modules())
    heads, softcap = int(config.num_attention_heads), float(getattr(config, "attn_logit_softcapping", None) or 0.0)
    width = shape.head_dim + (shape.value_dim if any(map(is_latent, modules)) else 0)
    has_sinks = any("sinks" in module._parameters for module in modules)
    own, by_row = replace(shape, num_layers=1, states=None), [(NUM_ROWS, heads, width)]
    by_row += [(NUM_ROWS, *size[2:]) for size in own.sizes(1)]
    windows = (0, WINDOW) if getattr(config, "sliding_window", None) else (0,)
    for window in windows if shape.num_layers else ():
        rules = width**-0.5, window, softcap, has_sinks
        name = f"attention of {heads} heads of {width} to {shape.num_kv_heads}, scale, window, softcap, sinks {rules}"
        sizes = (*by_row, *own.sizes(CONTEXT + 2 * NUM_ROWS))
        yield Check(f"{name}, queries 0", sizes, 3, partial(_attended, own, rules, 0.0))
        yield Check(name, sizes, 3, partial(_attended, own, rules, 1.0), 256 * width * UNIT)


def _attended(
    shape: KVShape,
    rules: tuple[float, int, float, bool],
    factor: float,  # of queries
    backend: Backend,
    rows: Sequence[int],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *memory: torch.Tensor,
) -> torch.Tensor:
    """Attention of nodes of two binary trees, one after a short path and one after a long one; a chain is a context."""
    short, long = (KVSlot(shape, 0, queries.device) for _ in range(2))
    short.place(KVMemory(*memory), 0, NUM_ROWS)
    long.place(short.memory, NUM_ROWS, CONTEXT + 2 * NUM_ROWS)
    segments = []
    for is_long, own in groupby(rows, lambda row: row < NUM_NODES):
        nodes = [row if is_long else row - NUM_NODES for row in own]
        places = {node: place for place, node in enumerate(nodes)}
        parents = [places.get((node - 1) // 2, -1) for node in nodes]
        slot, base = (long, CONTEXT) if is_long else (short, 5)
        if len(nodes) > 1 and parents == list(range(-1, len(nodes) - 1)):
            segments.append(Segment.context(slot, base, nodes))
        else:
            segments.append(Segment.tree(slot, base, Tree.of(nodes, parents, [0.0] * len(nodes))))
    (chunk,) = Batch(segments, None, queries.device).chunks
    *numbers, has_sinks = rules
    sinks = queries.new_zeros(queries.shape[1], dtype=torch.float32) if has_sinks else None
    return backend.attend(chunk, 0, queries * factor, keys, values, *numbers, sinks)
