"""Compares layers on a second GPU with all layers on one; part of `python -m loadtest.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.kv.session_kv import KVArena, split_memory
from bough.model.loading.loading import build_skeleton
from loadtest.gpu.parts import chains, describe
from loadtest.gpu.random_models import Machine, planned, repeated, streamed, write_random
from target_worker.kv.kv_offload import memory_on_host
from target_worker.link.streams import DeviceStreams

NUM_ROWS, NODES, REPEATS = 64, 24, 10
CLOSE = 0.05  # tolerance relative to the largest logit, as other GPUs sum in other orders


class _Case(NamedTuple):
    """A placement of layers and KV."""

    elsewhere: Mapping[int, torch.device]
    is_kv_on_host: bool


def second_gpu(
    machine: Machine,
    second: torch.device,
    config: LlamaConfig,
    folder: Path,
    new_streams: Callable[[torch.device], DeviceStreams],
) -> dict[str, Any]:
    """Compare logits and sweep times with every other layer on the second GPU to all layers on the first.

    This is repeated with KV on the host.
    """
    checkpoint = write_random(folder / "written", config, machine.device)
    checkpoint = repeated(checkpoint, config.num_hidden_layers, folder / "read")
    every_other = dict.fromkeys(range(1, config.num_hidden_layers, 2), second)
    alone, *others = (
        _swept(checkpoint, machine, case, new_streams)
        for case in (_Case({}, False), _Case(every_other, False), _Case(every_other, True))
    )
    largest = float(alone.logits.abs().max())
    return {
        "second": describe(second),
        "layers_there": len(every_other),
        "is_equal": all(torch.equal(alone.logits, other.logits) for other in others),
        "is_close": all(float((other.logits - alone.logits).abs().max()) <= CLOSE * largest for other in others),
        "sweep_ms": [round(1e3 * swept.seconds, 3) for swept in (alone, *others)],
    }


class _Swept(NamedTuple):
    logits: torch.Tensor
    seconds: float  # of a sweep


def _swept(
    checkpoint: Checkpoint, machine: Machine, case: _Case, new_streams: Callable[[torch.device], DeviceStreams]
) -> _Swept:
    layers = planned(build_skeleton(checkpoint, torch.bfloat16))
    host = (len(layers) + 2) * max(layer.num_bytes for layer in layers)
    small = replace(machine, host_memory=host, streams=new_streams(machine.device))
    with ExitStack() as stack:
        kv: dict[torch.device, DeviceStreams] = {}
        if case.is_kv_on_host:
            for device in {machine.device, *case.elsewhere.values()}:
                kv[device] = new_streams(device)
                stack.callback(kv[device].close)
        kv_elsewhere = {layer: kv[device] for layer, device in case.elsewhere.items() if kv}
        model = stack.enter_context(
            streamed(checkpoint, small, NUM_ROWS, kv.get(machine.device), case.elsewhere, kv_elsewhere)
        )
        shape = model.skeleton.kv_shape()
        memory = (
            memory_on_host(shape, NUM_ROWS, kv[machine.device], kv_elsewhere)
            if kv
            else split_memory(shape, NUM_ROWS, machine.device, case.elsewhere)
        )
        slot = KVArena(shape, memory).take(NUM_ROWS)
        batch = Batch([Segment.tree(slot, 0, chains(NODES))], model.rows, model.device)
        logits = model.sweep(batch)[0].cpu().clone()
        repeats = REPEATS if model.device.type != "cpu" else 1  # its times mean nothing
        began = time.perf_counter()
        for _ in range(repeats):
            model.sweep(batch)
        return _Swept(logits, (time.perf_counter() - began) / repeats)
