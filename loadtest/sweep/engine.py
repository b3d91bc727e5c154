"""A target that `loadtest.sweep` measures, in a process that reads commands from standard input.

    python -m loadtest.sweep.engine --model FOLDER --resident-layers 0 ...

A command is a JSON list of a name and numbers; each is answered by one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from bough.config.processes import TargetConfig, parse
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.runtime.host_memory import large_pages
from bough.trees.tree import Tree
from target_worker.link.direct_io import Disk
from target_worker.link.host_layers import Ring
from target_worker.worker import TargetWorker

NUM_RAW_SLABS = 16
PROMPT = list(range(100, 164))


def random_tree(num_nodes: int, root: int, seed: int) -> Tree:
    """A random tree about as deep as best-first trees: 10 levels with 64 nodes."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    tokens = [root] + [1000 + node for node in range(1, num_nodes)]
    return Tree.of(tokens, parents, [0.0] * num_nodes)


class Engine:
    """The target worker without gRPC."""

    def __init__(self, flags: list[str]) -> None:
        self._config = parse(TargetConfig, "bench", flags, {})
        self._worker = TargetWorker(self._config, "bench")
        self._tokens, self._held, self._round = list(PROMPT), 0, 0
        self._raw_memory: memoryview | None = None

    def sweep(self, num_tokens: int, repeats: int) -> list[dict[str, float]]:
        """Run rounds of one session with trees of `num_tokens` nodes, sampling and commits included."""
        figures = []
        for _ in range(repeats):
            context = Context.of(ScopedId("bench"), self._tokens, self._held, len(PROMPT))
            tree = random_tree(num_tokens, self._tokens[-1], seed=self._round)
            call = VerifyCall(context, 1, self._round, tree, SamplingParams(temperature=0.0))
            result = self._worker.verify(call).result()
            accepted = [int(tree.tokens[node]) for node in result.verdict.accepted_nodes]
            self._tokens += [*accepted, result.verdict.bonus_token]
            self._held, self._round, timings = result.held_length, self._round + 1, result.timings
            figures.append(
                {
                    "seconds": timings.total_ns / 1e9,
                    "wait_seconds": timings.wait_ns / 1e9,
                    "link_seconds": timings.link_ns / 1e9,
                    "link_bytes": timings.link_bytes,
                }
            )
        return figures

    def raw(self) -> dict[str, float]:
        """Read the bytes of a sweep without computing: the second of two rounds, as in service."""
        layers = [self._worker.held.layers[index] for index in self._worker.held.placement.streamed]
        if self._raw_memory is None:
            self._raw_memory = large_pages(NUM_RAW_SLABS * max(layer.num_bytes for layer in layers))
            np.frombuffer(self._raw_memory, np.uint8)[:] = 0  # touched first: page faults would count as reading
        memory = self._raw_memory
        disk = Disk(extent.file for layer in layers for extent in layer.extents)
        with Ring(layers, disk, NUM_RAW_SLABS, self._config.link_threads, lambda _: memory) as ring:
            for _ in range(2):
                busy_before, began = _busy_seconds(), time.perf_counter()
                for index in range(len(layers)):
                    with ring.layer(index):
                        pass
                seconds, processor_seconds = time.perf_counter() - began, _busy_seconds() - busy_before
        disk.close()
        num_bytes = sum(extent.num_bytes for layer in layers for extent in layer.extents)
        return {"seconds": seconds, "bytes": num_bytes, "processor_seconds": processor_seconds}

    def close(self) -> None:
        """End the worker's threads."""
        self._worker.close()


def _busy_seconds() -> float:
    """Busy seconds of all processors since boot, as direct reads cost mostly kernel time."""
    user, nice, system, _idle, _waiting, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Answer commands until standard input ends; first prints that the first token is there."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries may print
        engine = Engine(sys.argv[1:])
        engine.sweep(1, 1)  # computes the prompt, too
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            name, *numbers = json.loads(line)
            answer: Any = getattr(engine, name)(*numbers)
            print(json.dumps(answer), file=answers, flush=True)
        engine.close()


if __name__ == "__main__":
    main()
