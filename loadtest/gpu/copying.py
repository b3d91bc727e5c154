"""Measures the bandwidth of copies and of pinning host memory; part of `loadtest.gpu`."""

from __future__ import annotations

import time
from typing import Any

import torch

from target_worker.link.streams import DeviceStreams

COPIES = 10


def bandwidth(streams: DeviceStreams, num_bytes: int) -> float:
    """Bytes per second of copies from pinned memory to the device; closes the streams."""
    try:
        source = torch.frombuffer(streams.host_memory(num_bytes), dtype=torch.uint8)
        target = streams.device_memory(num_bytes)
        streams.copy(source, target, None).done.synchronize()
        began, copies = time.perf_counter(), [streams.copy(source, target, None) for _ in range(COPIES)]
        copies[-1].done.synchronize()
        return len(copies) * num_bytes / (time.perf_counter() - began)
    finally:
        streams.close()


def pinning(streams: DeviceStreams, num_bytes: int) -> dict[str, Any]:
    """Seconds of pinning host memory; closes the streams."""
    began = time.perf_counter()
    try:
        streams.host_memory(num_bytes)
        seconds = time.perf_counter() - began
        return {"gigabytes": num_bytes / 1e9, "seconds": round(seconds, 3), "is_pinned": streams.unpinned_bytes == 0}
    finally:
        streams.close()
