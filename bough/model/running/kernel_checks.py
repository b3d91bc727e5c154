"""Checks of kernels at the shapes of a model: values against the reference's, and a row's bits among other rows.

Every check computes random numbers, and then numbers whose sums are exact in float32 in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from bough.model.architecture.latent import is_latent
from bough.model.backend import Backend, computing_by
from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVMemory, KVShape, KVSlot
from bough.model.loading.loading import Skeleton
from bough.trees.tree import Tree

NUM_ROWS, NUM_NODES = 256, 70  # rows of a check, and how many of them attend as one tree; the others are another
# Rows whose bits must be the same without the others: 1, 8, 64, and a path of the tree, at several places.
FEWER = ([0], [NUM_NODES, *range(7)], [*range(NUM_NODES, NUM_NODES + 24), *range(40)], [0, 1, 3, 7, 16, 34, 69])
MANY = 256  # outputs of a matrix: more of them are computed alike
CONTEXT, WINDOW = 1100, 300  # keys before a tree, as attention divides long paths; and how many a row sees
UNIT = 2.0**-24  # of rounding in float32

Compute = Callable[[Backend, Sequence[int]], torch.Tensor]  # results of some of NUM_ROWS rows


class Check(NamedTuple):
    """A kernel at one shape of a model."""

    name: str  # with shape and type
    make: Callable[[float], Compute]  # with random numbers if this is 1.0, or exact ones if it is 0.0
    error: float  # of sums of random numbers, before they are rounded to the compute type
    is_shared: bool  # whether the backend to fall back to has the same kernel

    def run(self, backend: Backend) -> None:
        """Raises ArithmeticError for a wrong result, or what the kernel raises."""
        for randomness in (1.0, 0.0):
            compute = self.make(randomness)
            found = compute(backend, range(NUM_ROWS))
            for rows in FEWER:
                if not torch.equal(compute(backend, rows), _rows(found, rows)):
                    raise ArithmeticError(f"{len(rows)} rows have other bits than among {NUM_ROWS}")
            with computing_by("reference") as reference:
                wanted = compute(reference, range(NUM_ROWS)).double()
            rounding = wanted.abs() * (torch.finfo(found.dtype).eps / 2 + 2 * UNIT)
            excess = (found.double() - wanted).abs() - rounding - self.error * randomness
            if not bool((excess <= 2.0**-16).all()):  # which is not so for NaN either
                raise ArithmeticError(f"values are up to {float(excess.max()):.3g} further off than rounding")


def checks_of(skeleton: Skeleton, device: torch.device) -> tuple[Check, ...]:
    """Checks of the kernels that a model needs on a device."""
    return (*_products(skeleton, device), *_attention(skeleton, device))


def _numbers(size: Sequence[int], generator: torch.Generator, randomness: float) -> torch.Tensor:
    """Integers up to 8, or random numbers if `randomness` is 1.0."""
    integers = torch.randint(-8, 9, tuple(size), generator=generator, dtype=torch.float32)
    return torch.lerp(integers, torch.randn(tuple(size), generator=generator), randomness)


def _rows(numbers: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return numbers[torch.tensor(rows).to(numbers.device)]


def _products(skeleton: Skeleton, device: torch.device) -> Iterator[Check]:
    modules = (skeleton.model.get_output_embeddings(), *(each for layer in skeleton.layers for each in layer.modules()))
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    few = {(min(x.out_features, MANY + x.out_features % MANY), x.in_features, x.bias is not None) for x in linears}
    for outputs, inputs, has_bias in sorted(few):
        name = f"product of {inputs} inputs, {outputs} outputs{' with bias' if has_bias else ''}, {skeleton.dtype}"
        make = partial(_product, outputs, inputs, has_bias, skeleton.dtype, device)
        yield Check(name, make, 8 * inputs**1.5 * UNIT, is_shared=False)  # errors of either sign add up like a root


def _product(
    outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype, device: torch.device, randomness: float
) -> Compute:
    generator = torch.Generator().manual_seed(inputs)
    sizes = ((NUM_ROWS, inputs), (outputs, inputs), (outputs,))
    given, matrix, bias = (_numbers(size, generator, randomness).to(dtype).to(device) for size in sizes)
    given[0], matrix[0] = 1.0, 1.0  # whose product is the number of inputs

    def compute(backend: Backend, rows: Sequence[int]) -> torch.Tensor:
        own = _rows(given, rows), matrix, bias if has_bias else None
        if backend.name != "reference":
            return backend.multiply(*own)
        return backend.linear(*(numbers.double() for numbers in own if numbers is not None))

    return compute


def _attention(skeleton: Skeleton, device: torch.device) -> Iterator[Check]:
    """Without randomness queries are 0, so that all keys count alike: one too few or too many changes the result."""
    config, shape, modules = skeleton.config, skeleton.kv_shape(), list(skeleton.model.modules())
    heads, softcap = int(config.num_attention_heads), float(getattr(config, "attn_logit_softcapping", None) or 0.0)
    width = shape.head_dim + (shape.value_dim if any(map(is_latent, modules)) else 0)
    sinks = torch.zeros(heads, device=device) if any("sinks" in module._parameters for module in modules) else None
    windows = (0, WINDOW) if getattr(config, "sliding_window", None) else (0,)
    for window in windows if shape.num_layers else ():
        name = (
            f"attention of {heads} heads of {width} to {shape.num_kv_heads} with {'no ' if sinks is None else ''}sinks"
        )
        rules, own = (width**-0.5, window, softcap, sinks), replace(shape, num_layers=1, states=None)
        make = partial(_attended, own, (NUM_ROWS, heads, width), rules, device)
        yield Check(
            f"{name}, window {window}, softcap {softcap:g}, {shape.dtype}", make, 16 * width * UNIT, is_shared=True
        )


def _attended(
    shape: KVShape, size: tuple[int, ...], rules: tuple[Any, ...], device: torch.device, randomness: float
) -> Compute:
    """Attention of the nodes of two binary trees, one after a short path and one after a long one."""
    generator = torch.Generator().manual_seed(size[2])

    def eighths(size: Sequence[int]) -> torch.Tensor:
        return (_numbers(size, generator, 0.0) / 8).to(shape.dtype).to(device)

    memory = KVMemory(*map(eighths, shape.sizes(CONTEXT + 2 * NUM_ROWS)))
    short, long = (KVSlot(shape, 0, device) for _ in range(2))
    short.place(memory, 0, NUM_ROWS)
    long.place(memory, NUM_ROWS, CONTEXT + 2 * NUM_ROWS)
    queries = torch.randn(size, generator=generator).mul(randomness).to(shape.dtype).to(device)
    numbers = queries, *(eighths((NUM_ROWS, *sizes[2:])) for sizes in shape.sizes(1))

    def compute(backend: Backend, rows: Sequence[int]) -> torch.Tensor:
        segments = []
        for is_long, own in groupby(rows, lambda row: row < NUM_NODES):
            nodes = [row if is_long else row - NUM_NODES for row in own]
            places = {node: place for place, node in enumerate(nodes)}
            tree = Tree.of(nodes, [places.get((node - 1) // 2, -1) for node in nodes], [0.0] * len(nodes))
            segments.append(Segment.tree(long, CONTEXT, tree) if is_long else Segment.tree(short, 5, tree))
        (chunk,) = Batch(segments, None, device).chunks
        return backend.attend(chunk, 0, *(_rows(each, rows) for each in numbers), *rules)

    return compute
