"""Measures the speed of disk, memory, device link and matrix products, in about a second each."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from bough.errors import ConfigError
from bough.model.checkpoint.tensor_source import ReusedMemory
from bough.model.quant.format import Dequantized
from bough.model.running.batch_invariance import Product
from bough.model.threads import compute_with
from bough.runtime.host_memory import large_pages
from bough.sizing.cost_model import Speed

PROBE_SECONDS = 0.3  # of each measurement except the disk's
DISK_SECONDS = 1.5
THIRD = 100  # samples in a third of the disk measurement
PIECE_BYTES = 8 * 1024 * 1024  # of one read, as in the target worker
STAND_IN_BYTES = 256 * 1024 * 1024  # of a temporary file that is read if there are no weights yet
COPY_BYTES = 128 * 1024 * 1024
CACHE_BYTES = 64 * 1024 * 1024  # products alternate between more weights than caches hold, as in a sweep
MAX_MATRIX_ELEMENTS = 1 << 24  # larger matrices are not faster, and take longer to measure


def find_device(wants_gpu: bool) -> torch.device:
    """The device to measure."""
    return torch.device("cuda" if wants_gpu and has_gpu() else "cpu")


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """Number of GPUs that torch can use."""
    return torch.cuda.device_count()


def disk_speed(path: Path, num_threads: int) -> Speed:
    """Bytes per second of reading a GGUF file or weights in a folder, bypassing the page cache; or a temporary file
    there.

    Raises:
        ConfigError: the folder can neither be read nor written.
    """
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if files:
            return _read_speed(files, num_threads, "the weights")
        with _stand_in(path) as file:
            return _read_speed([file], num_threads, "a temporary file")
    except OSError as exc:
        raise ConfigError(f"--link-speed: must be given in GB/s, as {path} cannot be measured: {exc}") from exc


def memory_speed(device: torch.device) -> Speed:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _least_seconds(lambda: target.copy_(source), device, PROBE_SECONDS)
    return Speed(2 * COPY_BYTES / seconds, "measured: a copy, bytes read and written")


def host_link_speed(device: torch.device) -> Speed:
    """Bytes per second from pinned host memory to a device with its own memory."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = _least_seconds(lambda: target.copy_(source, non_blocking=True), device, PROBE_SECONDS)
    return Speed(COPY_BYTES / seconds, "measured: copies from pinned memory")


def crossing_speed(first: str, second: str) -> Speed:
    """Bytes per second from an accelerator's memory to another's and back, each way."""
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=first)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=second)

    def there_and_back() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    seconds = _least_seconds(there_and_back, torch.device(first), PROBE_SECONDS)
    return Speed(2 * COPY_BYTES / seconds, f"measured: copies between {first} and {second}")


def matrix_speed(
    matrices: Sequence[tuple[int, int]],
    rows: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    product: Product,
) -> Speed:
    """Operations per second of products of rows[0] rows with a layer's matrices, (outputs, inputs).

    Other row counts are measured too and described, to show what padding costs.
    """
    shapes = Counter((min(outputs, MAX_MATRIX_ELEMENTS // inputs), inputs) for outputs, inputs in matrices)
    layer_elements = sum(outputs * inputs * count for (outputs, inputs), count in shapes.items())
    seconds = dict.fromkeys(rows, 0.0)
    for (outputs, inputs), count in shapes.items():
        copies = -(-CACHE_BYTES // (outputs * inputs * dtype.itemsize))
        weights = torch.ones(copies, outputs, inputs, dtype=dtype, device=device)
        for num_rows in rows:
            seconds[num_rows] += count * _product_seconds(product, weights, num_rows, PROBE_SECONDS / len(shapes))
    first, *others = (2.0 * num_rows * layer_elements / seconds[num_rows] for num_rows in rows)
    more = "".join(f"; of {n} rows {speed / 1e12:.3g} TFLOP/s" for n, speed in zip(rows[1:], others, strict=True))
    name = str(dtype).removeprefix("torch.")
    return Speed(first, f"measured: products of {rows[0]} rows with a layer's matrices, {name}{more}")


def _product_seconds(product: Product, weights: torch.Tensor, num_rows: int, limit_seconds: float) -> float:
    """Seconds of one product, the shortest of many, as other processes may be computing."""
    hidden = torch.ones(num_rows, weights.shape[2], dtype=weights.dtype, device=weights.device)
    order = itertools.cycle(weights)
    return _compute_seconds(lambda: product(hidden, next(order), None), weights.device, limit_seconds)


def unpack_speed(packed: Dequantized, dtype: torch.dtype, device: torch.device) -> Speed:
    """Bytes per second of dequantizing a matrix, such as the largest of a model, which exceeds a GPU's cache."""
    raw = [part.to(device) for part in packed.random(np.random.default_rng(0))]
    num_bytes = math.prod(packed.shape) * dtype.itemsize
    memory = ReusedMemory(torch.empty(packed.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        packed.value(raw, dtype, memory)

    seconds = _compute_seconds(write_out, device, PROBE_SECONDS)
    outputs, inputs = packed.shape
    return Speed(num_bytes / seconds, f"measured: {outputs} x {inputs} written out, bytes written")


def _compute_seconds(action: Callable[[], object], device: torch.device, limit_seconds: float) -> float:
    """The shortest time, with all threads or with one.

    If other processes compute too, threads that wait for one another can take many times as long; see
    docs/decisions/022-threads.md.
    """
    if device.type != "cpu":
        return _least_seconds(action, device, limit_seconds)
    num_threads, least = torch.get_num_threads(), float("inf")
    try:
        for threads in {num_threads, 1}:
            compute_with(threads)
            least = min(least, _least_seconds(action, device, limit_seconds / 2))
    finally:
        compute_with(num_threads)
    return least


def _least_seconds(action: Callable[[], object], device: torch.device, limit_seconds: float) -> float:
    """The shortest of several runs after a warm-up, as other work of the machine only adds time."""

    def run() -> float:
        begin = perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - begin

    run()
    deadline = perf_counter() + limit_seconds
    least = run()
    while perf_counter() < deadline:
        least = min(least, run())
    return least


def _read_speed(files: Sequence[Path], num_threads: int, what: str) -> Speed:
    """Speed of reading parts of the files in order, several at a time, until the time is up."""
    descriptors = []
    try:
        for file in files:
            descriptors.append((*_open(file), file.stat().st_size))
        pieces = itertools.cycle(
            [
                (d, begin)
                for d, _, size in descriptors
                for begin in range(0, max(size - PIECE_BYTES, 0) + 1, PIECE_BYTES)
            ]
        )
        with ThreadPoolExecutor(num_threads) as threads:
            jobs = (pieces, threading.Lock(), perf_counter() + DISK_SECONDS)
            reads = [*itertools.chain(*threads.map(lambda _: _read_until(*jobs), range(num_threads)))]
        how = "past the page cache" if all(direct for _, direct, _ in descriptors) else "through the page cache"
    finally:
        for descriptor, *_ in descriptors:
            os.close(descriptor)
    return Speed(best_rate(reads), f"measured: {num_threads} threads reading {what} {how}")


class Read(NamedTuple):
    """A completed read."""

    begin: float  # seconds
    end: float
    num_bytes: int


def _read_until(pieces: Iterator[tuple[int, int]], lock: threading.Lock, deadline: float) -> list[Read]:
    """Reads of one thread."""
    reads: list[Read] = []
    memory = large_pages(PIECE_BYTES)
    while not reads or reads[-1].end < deadline:
        with lock:
            descriptor, offset = next(pieces)
        begin = perf_counter()
        num_bytes = os.preadv(descriptor, [memory], offset)
        reads.append(Read(begin, perf_counter(), num_bytes))
    return reads


def best_rate(reads: Sequence[Read]) -> float:
    """Bytes per second in the best third of the time, as disks stall at times.

    A read's bytes are spread evenly over its duration, since concurrent reads may all end at once.
    """
    begins, ends, sizes = np.array(reads).T
    times, step = np.linspace(begins.min(), ends.max(), 3 * THIRD + 1, retstep=True)
    lasting = np.maximum(ends - begins, 1e-9)
    arrived = (np.clip((times[:, None] - begins) / lasting, 0.0, 1.0) * sizes).sum(1)
    return float((arrived[THIRD:] - arrived[:-THIRD]).max() / (THIRD * step))


def _open(file: Path) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache."""
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor, False


@contextmanager
def _stand_in(folder: Path) -> Iterator[Path]:
    """A temporary file of incompressible bytes."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="bough-plan-") as stream:
        block = os.urandom(PIECE_BYTES)
        for _ in range(STAND_IN_BYTES // PIECE_BYTES):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
        yield Path(stream.name)
