"""How rows are put together to attend, and shared out among threads."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.batch.batch import Batch, Segment
from bough.model.batch.path_spans import SPAN_ROWS, PathSpans
from bough.model.kv.session_kv import KVShape, KVSlot
from bough.trees.tree import Tree

CPU = torch.device("cpu")


def spans_of(sizes: Sequence[int], num_kv_heads: int) -> PathSpans:
    """Of sessions with chains of these sizes."""
    slots = [KVSlot(KVShape(1, num_kv_heads, 8, torch.float32), 100, CPU) for _ in sizes]
    chains = [Tree.of(range(size), range(-1, size - 1), [0.0] * size) for size in sizes]
    segments = [Segment.tree(slot, 10, chain) for slot, chain in zip(slots, chains, strict=True)]
    return Batch(segments, None, CPU).chunks[0].spans(0)[0]


@pytest.fixture
def threads() -> Sequence[int]:
    """Numbers of threads that can be tried here."""
    return range(1, numba.config.NUMBA_NUM_THREADS + 1)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), num_kv_heads=st.integers(1, 8))
def test_every_row_attends_once_for_each_head(sizes: list[int], num_kv_heads: int) -> None:
    """With any cuts: a task is of one session, and has no more rows than attend together."""
    spans = spans_of(sizes, num_kv_heads)
    seen = np.zeros((sum(sizes), num_kv_heads), np.int64)
    for piece, begin, end, head in spans.tasks:
        first, last = spans.ranges[piece, :2]
        assert first <= begin < end <= last
        assert end - begin <= SPAN_ROWS
        seen[begin:end, head] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("sizes", [[16], [15], [5, 1, 30]])
def test_threads_have_equal_numbers_of_rows(sizes: list[int], threads: Sequence[int]) -> None:
    """Three heads for two threads: one head's rows are divided, no thread waits for a whole one."""
    before = numba.get_num_threads()
    try:
        for num_threads in threads:
            numba.set_num_threads(num_threads)
            tasks = spans_of(sizes, 3).tasks
            ends = np.cumsum(tasks[:, 2] - tasks[:, 1])
            assert {3 * sum(sizes) * thread // num_threads for thread in range(1, num_threads)} <= set(ends.tolist())
    finally:
        numba.set_num_threads(before)
