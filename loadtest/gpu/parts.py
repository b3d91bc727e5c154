"""Parts of the GPU check that need no large model: kernels, exactness, and the cost of a draft step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import LlamaConfig, PretrainedConfig

from bough.model.backend import backend_of, load
from bough.model.backends import triton
from bough.model.batch.batch import Batch, BatchPart, Segment
from bough.model.batch.path_spans import Paths
from bough.model.batch.state_steps import chain_steps
from bough.model.checkpoint.tensor_source import FreshMemory, ReusedMemory
from bough.model.kv.session_kv import KVArena, KVSlot
from bough.model.loading.loading import build_skeleton
from bough.model.quant.format import Dequantized
from bough.model.quant.formats import SAMPLES
from bough.model.running.device import gpu_libraries, working_on
from bough.model.running.runner import ResidentModel
from bough.model.sizes.memory_budget import free_device_bytes
from bough.runtime.machine import free_memory, usable_cpus
from bough.sizing.placement import Tier
from bough.trees.tree import Tree
from loadtest.gpu.random_models import Machine, planned, repeated, streamed, write_random
from loadtest.gpu.reference import attend_by_mask, attend_on_cpu, kernels_by_torch
from target_worker.kv.kv_offload import memory_on_host
from target_worker.link.streams import DeviceStreams
from target_worker.sweep.streamed_model import StreamedModel

REPEATS = 20
HEAD_START_CYCLES = 100_000_000  # the GPU waits some 50 ms while the host launches the timed kernels
TREE, BASE, NUM_ROWS = 40, 70, 160
DRAFT_FRONTIERS, DRAFT_CONTEXT = ((1,), (5,), (16,), (40,), (3, 9)), 512  # rows of each session in a step
CLOSE = 0.02  # tolerance of attention in bfloat16, whose resolution is 0.004 to 0.016 there
CLOSE_LOGITS = 0.05  # tolerance relative to the largest logit, as other row counts round differently


def describe(device: torch.device) -> str:
    """The device's name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def machine_of(device: torch.device) -> dict[str, Any]:
    """The device's name, and other facts on which figures and bits depend."""
    found: dict[str, Any] = {"torch": torch.__version__, "cpus": usable_cpus(), "free_host_gb": free_memory() // 10**9}
    if device.type != "cpu":
        found |= {
            "libraries": gpu_libraries(),
            "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
            "free_device_gb": free_device_bytes(device) // 10**9,
        }
    return {"device": describe(device), "machine": found}


def milliseconds(act: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, averaged over several after a warm-up."""
    repeats = REPEATS if device.type != "cpu" else 1
    for _ in range(min(repeats, 3)):
        act()
    _finish(device)
    began = time.perf_counter()
    for _ in range(repeats):
        act()
    _finish(device)
    return round((time.perf_counter() - began) / repeats * 1e3, 3)


def device_milliseconds(act: Callable[[], object], device: torch.device) -> float:
    """GPU milliseconds of one call, averaged over several, without the host's time to launch it."""
    if device.type == "cpu":
        return milliseconds(act, device)
    for _ in range(3):
        act()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    begun.record()
    for _ in range(REPEATS):
        act()
    ended.record()
    _finish(device)
    return round(float(begun.elapsed_time(ended)) / REPEATS, 4)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def attention(device: torch.device) -> dict[str, Any]:
    """Compare the kernel with the reference: 64 rows of a 70B over 1,024 keys in bfloat16; returns both times."""
    torch.manual_seed(0)
    base, size = (960, 64) if device.type != "cpu" else (60, 16)
    keys, values = torch.randn(2, base + size, 8, 128, device=device, dtype=torch.bfloat16)
    queries = torch.randn(size, 64, 128, device=device, dtype=torch.bfloat16)
    tree = _comb(size)
    piece, rules = BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), base, tree)), (128**-0.5, 0, 0.0, None)
    paths = Paths.of([piece], [0]).on(device)
    by_mask = partial(attend_by_mask, queries, keys, values, paths, *rules)
    kernel: Callable[[], torch.Tensor] = partial(attend_on_cpu, queries, keys, values, piece, *rules)
    if device.type != "cpu":
        from bough.model.gpu.attention_triton import attend_by_triton

        kernel = partial(attend_by_triton, queries, keys, values, paths, *rules)
    with working_on(device):
        difference = float((kernel().float() - by_mask()).abs().max())
        return {
            "largest_difference": round(difference, 6),
            "is_close": difference < CLOSE,
            "kernel_ms": device_milliseconds(kernel, device),
            "by_mask_ms": milliseconds(by_mask, device),
        }


def _comb(size: int) -> Tree:
    """A tree of a chain with a leaf at each node."""
    parents = [-1] + [max(node - 2, 0) if node % 2 else max(node - 1, 0) for node in range(1, size)]
    return Tree.of(list(range(size)), parents, [0.0] * size)


def equality(
    machine: Machine,
    config: PretrainedConfig,
    num_compared: int,
    folder: Path,
    new_streams: Callable[[torch.device], DeviceStreams],
) -> list[dict[str, Any]]:
    """Compare logits of a tree's last nodes with plain decoding, bit for bit, for several placements.

    All nodes' are also compared with those by torch's operators in place of kernels, which sum in other orders.
    """
    checkpoint = write_random(folder / "written", config, machine.device)
    checkpoint = repeated(checkpoint, config.num_hidden_layers, folder / "read")
    layer_bytes = max(layer.num_bytes for layer in planned(build_skeleton(checkpoint, torch.bfloat16)))
    cases, first, all_stream = [], None, config.num_hidden_layers + 2
    by_torch = replace(machine, host_memory=all_stream * layer_bytes, streams=new_streams(machine.device))
    with patch.object(triton, "kernels", kernels_by_torch), streamed(checkpoint, by_torch, 2 * NUM_ROWS) as model:
        wanted = _tree_logits(model, _arena(model, None)).float()
    for host_layers, kv_tier in ((all_stream, "device"), (3, "device"), (all_stream, "host")):  # 3: one, and two slabs
        small = replace(machine, host_memory=host_layers * layer_bytes, streams=new_streams(machine.device))
        kv_streams = new_streams(machine.device) if kv_tier == "host" else None
        try:
            with streamed(checkpoint, small, 2 * NUM_ROWS, kv_streams) as model:
                arena = _arena(model, kv_streams)
                logits = _tree_logits(model, arena)
                difference = float((logits.float() - wanted).abs().max())
                nodes = range(TREE - num_compared, TREE)
                equal = sum(torch.equal(logits[node], _plain_logits(model, arena, node)) for node in nodes)
                placement = model.tiers.placement
        finally:
            if kv_streams is not None:
                kv_streams.close()
        cases.append(
            {
                "layers": {tier.value: len(placement.layers(tier)) for tier in Tier},
                "kv": kv_tier,
                "compared": num_compared + 1,  # the whole tree is compared with the first placement's as well
                "equal": equal + int(first is None or torch.equal(first, logits)),
                "from_torch": round(difference, 6),
                "is_close": difference <= CLOSE_LOGITS * float(wanted.abs().max()),  # false for NaN
            }
        )
        first = logits if first is None else first
    return cases


def _arena(model: StreamedModel, kv_streams: DeviceStreams | None) -> KVArena:
    """A KV arena for two sessions, in the memory that the model expects."""
    shape = model.skeleton.kv_shape()
    if kv_streams is None:
        return KVArena(shape, shape.empty(2 * NUM_ROWS, model.device))
    return KVArena(shape, memory_on_host(shape, 2 * NUM_ROWS, kv_streams))


def _tree(size: int = TREE) -> Tree:
    rng = np.random.default_rng(1)
    parents = [-1] + [int(rng.integers(max(0, node - 6), node)) for node in range(1, size)]
    return Tree.of([7 + node for node in range(size)], parents, [0.0] * size)


def _tree_logits(model: StreamedModel, arena: KVArena) -> torch.Tensor:
    """Logits of a tree's nodes, in a sweep with another session's context."""
    prompt = list(range(BASE))
    slot, other = arena.take(NUM_ROWS), arena.take(NUM_ROWS)
    segments = [
        Segment.context(slot, 0, prompt),
        Segment.context(other, 0, [3, 2, 1]),
        Segment.tree(slot, BASE, _tree()),
    ]
    logits = model.sweep(Batch(segments, model.rows, model.device))[0]
    for used in (slot, other):
        arena.give_back(used)
    return logits


def _plain_logits(model: StreamedModel, arena: KVArena, node: int) -> torch.Tensor:
    """Logits of a node whose path is decoded one token at a time."""
    slot, prompt, tree = arena.take(NUM_ROWS), list(range(BASE)), _tree()
    model.sweep(Batch([Segment.context(slot, 0, prompt)], model.rows, model.device))
    logits = torch.empty(0)
    for depth, step in enumerate(tree.path(node)):
        root = Tree.root(int(tree.tokens[step]))
        logits = model.sweep(Batch([Segment.tree(slot, BASE + depth, root)], model.rows, model.device))[0][0]
    arena.give_back(slot)
    return logits


def draft_steps(device: torch.device, config: LlamaConfig, folder: Path) -> list[dict[str, Any]]:
    """Time of a draft step by rows: launched kernel by kernel, and with CUDA graphs if possible."""
    one_layer = LlamaConfig.from_dict({**config.to_dict(), "num_hidden_layers": 1})
    checkpoint = repeated(
        write_random(folder / "written", one_layer, device), config.num_hidden_layers, folder / "read"
    )
    model = ResidentModel(build_skeleton(checkpoint, torch.bfloat16), device)
    shape, num_rows = model.skeleton.kv_shape(), DRAFT_CONTEXT + max(map(max, DRAFT_FRONTIERS))
    num_slots = max(map(len, DRAFT_FRONTIERS))
    arena = KVArena(shape, shape.empty(1 + num_slots * num_rows, device))
    arena.take(1)  # the row that warm-up writes
    slots = [arena.take(num_rows) for _ in range(num_slots)]
    for slot in slots:
        slot.keys.normal_()
        slot.values.normal_()
    batches = [_frontier(slots, widths, device) for widths in DRAFT_FRONTIERS]
    eager = [(milliseconds(partial(model.logits, batch), device), model.logits(batch).clone()) for batch in batches]
    model.warm_up(slots[0].memory)
    rows = []
    for widths, batch, (eager_ms, logits) in zip(DRAFT_FRONTIERS, batches, eager, strict=True):
        graph_ms = milliseconds(partial(model.logits, batch), device) if model.is_graphed else None
        difference, largest = (float(values.abs().max()) for values in (model.logits(batch) - logits, logits))
        rows.append(
            {
                "rows": widths,
                "eager_ms": eager_ms,
                "graph_ms": graph_ms,
                "largest_difference": round(difference, 6),
                "is_close": difference <= CLOSE_LOGITS * largest,  # false for NaN
            }
        )
    return rows


def _frontier(slots: Sequence[KVSlot], widths: Sequence[int], device: torch.device) -> Batch:
    """A draft step's frontier of several sessions, with the given number of rows each."""
    trees = [Tree.of(list(range(width)), [-1] + [0] * (width - 1), [0.0] * width) for width in widths]
    pairs = zip(slots, trees, strict=False)
    return Batch([Segment.tree(slot, DRAFT_CONTEXT, tree) for slot, tree in pairs], None, device)


HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128  # a 70B's


def chains(size: int) -> Tree:
    """A tree of three chains below the root."""
    return Tree.of(list(range(size)), [-1] + [max(0, node - 3) for node in range(1, size)], [0.0] * size)


def contexts(device: torch.device, rows: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of a layer's attention for a tree of chains, by rows and context length."""
    torch.manual_seed(0)
    attend, found = attend_by_mask if device.type == "cpu" else triton.kernels().attend, []
    for length in lengths:
        keys, values = torch.randn(2, length + max(rows), KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for count in rows:
            queries = torch.randn(count, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
            piece = BatchPart(0, Segment.tree(KVSlot.__new__(KVSlot), length, chains(count)))
            paths = Paths.of([piece], [0]).on(device)
            act = partial(attend, queries, keys, values, paths, HEAD_DIM**-0.5, 0, 0.0, None)
            found.append({"rows": count, "context": length, "ms": device_milliseconds(act, device)})
    return found


RECURRENT_KEY_HEADS, RECURRENT_HEADS, RECURRENT_DIM, CONVOLUTION = 16, 32, 128, 3  # of Qwen3-Next
CLOSE_SUMS = 1e-4  # tolerance relative to the largest output: float32 sums in two orders, over as many steps as rows
LAYER_WEIGHTS = 855_638_016  # weights in a layer of a 70B
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def recurrence(device: torch.device, rows: Sequence[int]) -> list[dict[str, Any]]:
    """A layer's steps over text and over a tree: milliseconds, and the largest difference of the two ways."""
    torch.manual_seed(0)
    return [_recurrence_row(device, count, is_tree) for count in rows for is_tree in (False, True)]


def _recurrence_row(device: torch.device, count: int, is_tree: bool) -> dict[str, Any]:
    tree = Segment.tree(KVSlot.__new__(KVSlot), 0, chains(count))
    steps = BatchPart(0, tree).tree_steps(CONVOLUTION) if is_tree else chain_steps(count, CONVOLUTION)
    qkv = torch.randn(count, (2 * RECURRENT_KEY_HEADS + RECURRENT_HEADS) * RECURRENT_DIM, device=device)
    decay, beta = torch.rand(2, count, RECURRENT_HEADS, device=device)
    states = torch.zeros(RECURRENT_HEADS, steps.num_places, RECURRENT_DIM, RECURRENT_DIM, device=device)
    rest = states, RECURRENT_KEY_HEADS, 0
    acts = [
        partial(backend_of(device).recur, qkv, decay, beta, steps, *rest),
        partial(load("reference").recur, qkv, decay, beta, steps, *rest),
    ]
    with working_on(device):
        mine = acts[0]()
        states.zero_()
        theirs = acts[1]()
        difference, largest = float((mine - theirs).abs().max()), float(theirs.abs().max())
        return {
            "rows": count,
            "of": "a tree" if is_tree else "text",
            "largest_difference": difference,
            "is_close": difference <= CLOSE_SUMS * largest,  # false for NaN
            "kernel_ms": device_milliseconds(acts[0], device),
            "by_torch_ms": milliseconds(acts[1], device),
        }


def unpacking(device: torch.device, compared: tuple[int, int], timed: tuple[int, int]) -> list[dict[str, Any]]:
    """Compare the bits of matrices `compared` (outputs, inputs), and time those of `timed`, which exceed caches."""
    return [
        _unpacking_row(name, device, make(*compared), make(*timed), dtype)
        for name, make in SAMPLES.items()
        for dtype in DTYPES
    ]


def _unpacking_row(
    name: str, device: torch.device, small: Dequantized, large: Dequantized, dtype: torch.dtype
) -> dict[str, Any]:
    raw = small.random(np.random.default_rng(0))
    wanted = small.value(raw, dtype, FreshMemory(CPU))
    found = small.value([part.to(device) for part in raw], dtype, FreshMemory(device)).cpu()
    is_equal = torch.equal(found.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    raw = [part.to(device) for part in large.random(np.random.default_rng(0))]
    memory = ReusedMemory(torch.empty(large.scratch_bytes(dtype), dtype=torch.uint8, device=device))

    def write_out() -> None:
        memory.begin()
        large.value(raw, dtype, memory)

    ms = device_milliseconds(write_out, device)
    weights, packed_bytes = int(np.prod(large.shape)), sum(place.num_bytes for place in large.places)
    return {
        "format": name,
        "dtype": str(dtype).removeprefix("torch."),
        "is_equal": is_equal,
        "ms": ms,
        "gb_s": round((packed_bytes + 2 * weights) / ms / 1e6, 1) if ms else None,
        "ms_a_70b_layer": round(ms * LAYER_WEIGHTS / weights, 2),
    }
