"""Tree attention on the CPU for tensors, computed by `bough.model.cpu.attention_kernel`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from bough.model.batch.batch import Chunk
from bough.model.batch.path_spans import PathSpans
from bough.model.cpu.attention_kernel import Rules, attend, share_attention, store
from bough.model.cpu.jit import pointer
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import counters

# Numbers of the types that the kernel reads: bfloat16 and float16 are passed as their bits.
KINDS: dict[torch.dtype, np.uint16 | np.int16 | np.float32] = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
}
_shares: dict[torch.dtype, Any] = {}  # pointers to `share_attention`, by these types


def attend_over(
    spans: PathSpans, layer: int, num_kv_heads: int, value_dim: int, queries: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attention (num_rows, num_heads, value_dim) of queries (num_rows, num_heads, ...); 0 in rows of no piece."""
    num_rows, num_heads, _ = queries.shape
    flat, kind, num_threads = queries.reshape(num_rows, -1).contiguous(), KINDS[queries.dtype], numba.get_num_threads()
    out = torch.zeros(-(-num_rows // LANES), num_heads * value_dim, LANES)
    scale, window, softcap, sinks = rules
    own_sinks = np.full(num_heads, -np.inf, np.float32) if sinks is None else sinks.numpy()
    own_rules = Rules(num_kv_heads, np.float32(scale), window, np.float32(softcap), own_sinks)
    arguments = num_threads, _bits(flat).numpy(), spans, kind, layer, own_rules, out.numpy()
    taken = counters(num_threads)[0]
    if queries.dtype not in _shares:
        _shares[queries.dtype] = pointer(share_attention, taken, 0, *arguments)
    attend(_shares[queries.dtype], taken, *arguments)
    rows = out.transpose(1, 2).reshape(-1, out.shape[1])[:num_rows]
    return rows.to(queries.dtype).view(num_rows, num_heads, value_dim)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """A view with a type that numpy has, and by which the kernel tells both kinds of 16 bits apart."""
    views = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return numbers.view(views.get(numbers.dtype, numbers.dtype))


def attend_in_slots(
    chunk: Chunk, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rules: Any
) -> torch.Tensor:
    """Attention of all pieces of a chunk at once; `rules` are scale, window, softcap and sinks, which may be None.

    queries (num_rows, num_heads, head_dim), keys and values as in `store`. Where queries are wider than values, they
    are as wide as a key and a value, and the value is the key's second part.
    """
    kind = KINDS[keys.dtype]
    spans, number = chunk.spans(layer)
    store(spans, kind, number, *(_bits(numbers).numpy() for numbers in (keys, values)))
    return attend_over(spans, number, *values.shape[1:], queries, *rules)
