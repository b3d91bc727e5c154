"""The gated delta rule on the CPU: steps of a recurrence along the paths of a tree, in a fixed order of sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch

from bough.model.cpu.jit import strict, strict_inner

EPSILON = np.float32(1e-6)
LEAST_WORK = 1 << 21  # numbers of passed states; with fewer, starting other threads takes too long
_threads = ThreadPoolExecutor(thread_name_prefix="delta-rule")  # starts threads when they are needed


@strict_inner
def _inverse_norm(numbers: Any, begin: Any, end: Any) -> Any:
    """1 over the length of a row's vector."""
    squares = np.float32(0)
    for i in range(begin, end):
        squares += numbers[i] * numbers[i]
    return np.float32(1) / np.sqrt(squares + EPSILON)


@strict_inner
def _step(state: Any, keys: Any, values: Any, decay: Any, beta: Any, delta: Any) -> None:
    """Decay the state by `decay`, then move its answer to the key towards the value by `beta`."""
    delta[:] = np.float32(0)
    for k in range(len(keys)):
        for v in range(len(values)):
            state[k, v] *= decay
            delta[v] += state[k, v] * keys[k]
    for v in range(len(values)):
        delta[v] = (values[v] - delta[v]) * beta
    for k in range(len(keys)):
        for v in range(len(values)):
            state[k, v] += keys[k] * delta[v]


@strict_inner
def _ask(state: Any, queries: Any, out: Any) -> None:
    """The state's answer to a query."""
    out[:] = np.float32(0)
    for k in range(len(queries)):
        for v in range(len(out)):
            out[v] += state[k, v] * queries[k]


@strict
def _run(
    heads: Any,
    qkv: Any,
    decay: Any,
    beta: Any,
    steps: Any,
    states: Any,
    num_key_heads: Any,
    begin: Any,
    out: Any,
) -> None:
    """Take the steps (row, state before, state after) for the heads from heads[0] to heads[1]; see `run_on_cpu`."""
    num_heads, _, key_dim, value_dim = states.shape
    scale = np.float32(1) / np.sqrt(np.float32(key_dim))
    for head in range(heads[0], heads[1]):
        first_query = head // (num_heads // num_key_heads) * key_dim
        first_key = num_key_heads * key_dim + first_query
        first_value = 2 * num_key_heads * key_dim + head * value_dim
        delta, scaled = np.empty(value_dim, np.float32), np.empty(key_dim, np.float32)
        for step in range(len(steps)):
            row, before, after = steps[step, 0], steps[step, 1], steps[step, 2]
            state, numbers = states[head, after], qkv[row]
            if before != after:
                state[:] = states[head, before]
            inverse = _inverse_norm(numbers, first_key, first_key + key_dim)
            for k in range(key_dim):
                scaled[k] = numbers[first_key + k] * inverse
            values = numbers[first_value : first_value + value_dim]
            _step(state, scaled, values, decay[row, head], beta[row, head], delta)
            if row >= begin:
                inverse = _inverse_norm(numbers, first_query, first_query + key_dim)
                for k in range(key_dim):
                    scaled[k] = numbers[first_query + k] * inverse * scale
                _ask(state, scaled, out[row - begin, head])


def run_on_cpu(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    steps: np.ndarray[Any, np.dtype[np.int64]],
    states: torch.Tensor,
    num_key_heads: int,
    begin: int,
) -> torch.Tensor:
    """Take steps of the gated delta rule (`Backend.recur` has the shapes); all is contiguous and float32."""
    out = torch.empty(len(qkv) - begin, states.shape[0], states.shape[3])
    arrays = [numbers.numpy() for numbers in (qkv, decay, beta)]
    work = len(steps) * states[:, 0].numel()
    shares = np.linspace(0, len(states), 1 + (numba.get_num_threads() if work > LEAST_WORK else 1)).astype(int)
    arguments = *arrays, steps, states.numpy(), num_key_heads, begin, out.numpy()
    own, *others = pairwise(shares.tolist())
    running = [_threads.submit(_run, heads, *arguments) for heads in others]
    _run(own, *arguments)
    for share in running:
        share.result()
    return out
