"""The gated delta rule on a GPU: one Triton kernel takes all steps of some rows, the counterpart of `delta_rule`.

A program has some values of one head, and keeps their state in registers from step to step. The state of a node with
several children is written to its place, and read there again. A state's columns are independent, and every step has
the same arithmetic. So a row's bits depend on its path alone, in any tree and with any division of a prompt.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.model.cpu.delta_rule import EPSILON

MOST_VALUES = 8  # values of a program: its part of a state must fit in the registers of one warp
NUM_WARPS = 1  # sums over keys then need no barrier
# As in `attention_triton`: programs specialised on these might round differently.
_VARYING = ("num_steps", "num_places", "begin")


@triton.jit
def _normed(cells: tl.tensor, is_key: tl.tensor, epsilon: tl.tensor) -> tl.tensor:
    """A vector of `is_key` numbers divided by its length."""
    vector = tl.load(cells, mask=is_key, other=0.0)
    return vector * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(vector * vector, 0) + epsilon))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def run_steps(
    qkv: tl.tensor,  # (num_rows, 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM) float32, as all but `table`
    decay: tl.tensor,  # (num_rows, NUM_HEADS)
    beta: tl.tensor,  # (num_rows, NUM_HEADS)
    table: tl.tensor,  # (num_steps, 5) int32, as in `DeviceSteps`
    states: tl.tensor,  # (NUM_HEADS, num_places, KEY_DIM, VALUE_DIM)
    out: tl.tensor,  # (num_rows - begin, NUM_HEADS, VALUE_DIM)
    num_steps: tl.tensor,
    num_places: tl.tensor,
    begin: tl.tensor,  # first row whose output is wanted
    epsilon: tl.tensor,
    scale: tl.tensor,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUES: tl.constexpr,  # of a program
) -> None:
    head, keys, values = tl.program_id(0), tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    is_cell = is_key[:, None] & is_value[None, :]
    cells = (
        states + head.to(tl.int64) * num_places * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    )
    query_begin = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for step in range(num_steps):
        row, before, after = tl.load(table + 5 * step), tl.load(table + 5 * step + 1), tl.load(table + 5 * step + 2)
        is_read, is_written = tl.load(table + 5 * step + 3), tl.load(table + 5 * step + 4)
        numbers = qkv + row.to(tl.int64) * (2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM)
        query = _normed(numbers + query_begin + keys, is_key, epsilon) * scale
        key = _normed(numbers + NUM_KEY_HEADS * KEY_DIM + query_begin + keys, is_key, epsilon)
        value = tl.load(numbers + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values, mask=is_value, other=0.0)
        if is_read:
            tl.debug_barrier()  # other threads of the program may have written it
            state = tl.load(cells + before.to(tl.int64) * (KEY_DIM * VALUE_DIM), mask=is_cell, other=0.0)
        state = state * tl.load(decay + row * NUM_HEADS + head)
        delta = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta + row * NUM_HEADS + head)
        state = state + key[:, None] * delta[None, :]
        tl.store(cells + after.to(tl.int64) * (KEY_DIM * VALUE_DIM), state, mask=is_cell & (is_written != 0))
        answer = tl.sum(state * query[:, None], 0)
        place = out + ((row - begin).to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + values
        tl.store(place, answer, mask=is_value & (row >= begin))


def take_steps(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    table: torch.Tensor,
    states: torch.Tensor,
    num_key_heads: int,
    begin: int,
) -> torch.Tensor:
    """Take the steps of a `DeviceSteps.table` (`Backend.recur` has the other shapes); all is contiguous."""
    num_heads, num_places, key_dim, value_dim = states.shape
    out = qkv.new_empty(len(decay) - begin, num_heads, value_dim)
    sizes = step_constants(num_key_heads, num_heads, key_dim, value_dim)
    grid = num_heads, triton.cdiv(value_dim, sizes["VALUES"])
    numbers = len(table), num_places, begin, float(EPSILON), key_dim**-0.5
    run_steps[grid](qkv, decay, beta, table, states, out, *numbers, **sizes, **OPTIONS)
    return out


OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}  # the default differs between versions of Triton


def step_constants(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Compile-time constants, which depend only on the model."""
    return {
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": triton.next_power_of_2(key_dim),
        "VALUES": min(MOST_VALUES, triton.next_power_of_2(value_dim)),
    }
