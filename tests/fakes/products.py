"""Matrix products of `bough.model.cpu` by several threads, on arrays of any supported type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bough.model.cpu.gemm_parallel import share_product
from bough.model.cpu.jit import strict

_share_product = strict(share_product.py_func)  # compiled for calls from Python


def project(taken: Any, num_threads: int, rows: Any, num_rows: int, matrix: Any, bias: Any, out: Any) -> None:
    """Compute `share_product` with `num_threads` threads; `taken` is a row of `work_stealing.counters`."""
    with ThreadPoolExecutor(num_threads) as threads:
        work = [
            threads.submit(_share_product, taken, thread, num_threads, rows, num_rows, matrix, bias, out)
            for thread in range(num_threads)
        ]
        for each in work:
            each.result()
