"""Sizes of what a program of the GPU's attention kernel computes, which depend on the model alone."""

from __future__ import annotations

import triton

from bough.model.batch.gpu_paths import TILE_ROWS

BLOCK = 32  # keys in one step of the online softmax; 64 would exceed the registers
MIN_DOT = 16  # least rows and columns of a tensor core's tile
TILE_QUERIES = 64  # most rows times heads of a program, so that its results stay in registers
NUM_STAGES = 2


def heads_together(num_heads: int) -> int:
    """How many heads of latent attention one program computes: all that fill a tensor core's tile without remainder."""
    return max(size for size in range(1, MIN_DOT + 1) if num_heads % size == 0)


def tile_constants(group: int, head_dim: int, in_halves: bool, key_dim: int = 0) -> dict[str, int]:
    """Compile-time constants, which depend only on the model: few and many rows use the same program."""
    dim_padded, group_padded = max(MIN_DOT, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    most = min(TILE_QUERIES, TILE_QUERIES * 128 // dim_padded) if in_halves else MIN_DOT
    if TILE_ROWS * group_padded < most:  # a tile between both sizes would spill registers
        most = MIN_DOT
    rows = min(TILE_ROWS, max(1, max(most, MIN_DOT) // group_padded))
    return {
        "GROUP": group,
        "BLOCK": BLOCK,
        "ROWS": rows,
        "GROUP_PADDED": max(group_padded, MIN_DOT // rows),
        "DIM_PADDED": dim_padded,
        "KEY_DIM": key_dim,
        "KEY_PADDED": max(MIN_DOT, triton.next_power_of_2(key_dim)),
    }


def launch_options(constants: dict[str, int], in_halves: bool) -> dict[str, object]:
    """Compiler options, which depend only on the model, as `tile_constants` do.

    No family's kernel spills registers with so many warps (`python -m loadtest.gpu.compile_kernels`): small tiles spill
    with many warps, large ones with few, and heads of 256 with 8. Float32 uses one stage, as its tiles fill the shared
    memory of a small GPU.
    Fusing of products and sums is set, because its default differs between versions of Triton, and with it the bits.
    """
    tile = constants["ROWS"] * constants["GROUP_PADDED"] * constants["DIM_PADDED"]
    most = 4 if constants["DIM_PADDED"] == 256 else 8
    num_warps = min(most, max(1, tile // 512)) if in_halves else 4
    return {"num_warps": num_warps, "num_stages": NUM_STAGES if in_halves else 1, "enable_fp_fusion": True}
