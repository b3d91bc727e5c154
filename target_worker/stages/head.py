"""The head of a target that spans machines: who its stages are, which layers they hold, and the ring to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bough.config.processes import TargetConfig
from bough.model.sizes.target_limits import KVRoom
from bough.processes.process import stage
from bough.protocol.messages import Timings
from bough.security.access import Access
from bough.sizing.placement import gigabytes
from bough.sizing.stage_split import StageRoom, require_layers, split_layers
from bough.telemetry.metrics import counter
from target_worker.stages.measured import Needs
from target_worker.stages.remote import OtherStages
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Assignment, Roster, StageFacts, StageFigures
from target_worker.stages.service import StagesService
from target_worker.stages.slots import SlotLog
from target_worker.sweep.held_layers import HeldLayers
from target_worker.sweep.streamed_model import StageLayers

logger = logging.getLogger(__name__)
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

POLL_SECONDS = 0.1
NANO = 1e-9
HOP_SECONDS = 0.002  # of hidden states to the next member, before it has been measured


class StagesHead:
    """Created on the event loop, before the model is loaded on another thread."""

    def __init__(self, config: TargetConfig) -> None:
        self.ring = Ring(Access.of(config), is_head=True)
        self.log = SlotLog()
        self.others = OtherStages(self.ring, self.log, self.trouble)
        self.service: StagesService | None = None  # once the head knows its own model
        self.address = ""  # at which the last stage reaches this process
        self._num_members = config.stages
        self._loop = asyncio.get_running_loop()
        self._roster: Roster | None = None
        self._running: Future[None] | None = None

    @property
    def roster(self) -> Roster:
        """The list of stages, which `admit` makes."""
        assert self._roster is not None, "stages are admitted first"
        return self._roster

    def admit(self, facts: StageFacts) -> None:
        """Let stages with equal facts join; any thread."""
        self._roster = Roster(facts, self._num_members)
        self.service = StagesService(self.ring, self._roster)

    def split(self, whole: HeldLayers, own: StageRoom, room: KVRoom) -> list[StageLayers]:
        """Wait for all stages, and decide the layers of each member; blocks the loading thread.

        `own` is what the head offers. Raises ConfigError if there are too few layers, or memory is too small.
        """
        sizes, config = [layer.num_bytes for layer in whole.layers], whole.config
        require_layers(len(sizes), self._num_members)  # rather than once the last one has joined
        stage(f"waiting for {self._num_members - 1} stages (--stage-of {self.address})")
        while (rooms := self.roster.wait_complete(POLL_SECONDS)) is None:
            pass
        members = [own, *rooms]
        needs = [Needs.of(whole, each, room, is_head=each is own) for each in members]
        left = [
            each._replace(memory_bytes=max(0, each.memory_bytes - own_needs.buffer_bytes))
            for each, own_needs in zip(members, needs, strict=True)
        ]
        ranges = loaded_split(self.roster.figures(), len(sizes)) or split_layers(
            sizes, [each.kv_bytes for each in needs], left, HOP_SECONDS
        )
        parts = [StageLayers(each.start, each.stop, len(sizes)) for each in ranges]
        limits = config.max_context, config.max_nodes, config.max_sweep_tokens, config.rows
        self.roster.assign([Assignment(i, part.first, part.end, *room, *limits) for i, part in enumerate(parts) if i])
        for part, each in zip(parts, members, strict=True):
            size = gigabytes(sum(sizes[part.first : part.end]))
            logger.info("%s: layers %d to %d, %s", each.name, part.first, part.end - 1, size)
        return parts

    def connect(self) -> None:
        """Connect the ring, and wait until all stages have loaded their layers; blocks the loading thread."""
        self._running = asyncio.run_coroutine_threadsafe(self.ring.run(self._members, lambda: b""), self._loop)
        stage("waiting until the stages have loaded their layers")
        while not self.ring.epoch:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the ring; not on the event loop."""
        if self._running is not None:
            self._running.cancel()
        asyncio.run_coroutine_threadsafe(self.ring.close(), self._loop).result()

    def trouble(self) -> str:
        """Which stage is missing, or why the ring is down; empty while all is well."""
        return self.roster.missing() or self.ring.why_down

    def devices_in_words(self, own: str) -> str:
        """The devices of stages that differ from the head's `own`, and so may give other bits."""
        return "".join(
            f", layers {each.first_layer} to {each.end_layer - 1} on {each.device}"
            for each in self.roster.figures()
            if each.device != own
        )

    def notes(self) -> list[str]:
        """What each stage holds, and where the time of its last pass went."""
        found = [f"not usable now: {missing}"] if (missing := self.trouble()) else []
        timings = self.others.timings
        for number, each in enumerate(self.roster.figures(), start=1):
            held = f"layers {each.first_layer} to {each.end_layer - 1}, {gigabytes(each.memory_bytes)}"
            spent = timings[number - 1] if number <= len(timings) else Timings()
            spends = f"{spent.wait_ns * NANO:.3f} s waiting for weights, {spent.compute_ns * NANO:.3f} s computing"
            found.append(f"stage {number}: {held}; last sweep: {spends}")
        if timings:
            seconds = self.others.network_seconds
            found.append(f"between the stages: {seconds:.3f} s of the last sweep, with the network")
        return found

    def _members(self) -> list[str] | None:
        others = self.roster.members()
        return None if others is None else [self.address, *others]


def loaded_split(stages: Sequence[StageFigures], num_layers: int) -> list[range]:
    """The split by which all stages have loaded their layers, for a head that starts again; empty if there is none."""
    ends = [stages[0].first_layer, *(each.end_layer for each in stages)]
    is_split = all(each.first_layer == before < each.end_layer for each, before in zip(stages, ends, strict=False))
    return [range(*pair) for pair in pairwise((0, *ends))] if is_split and ends[0] and ends[-1] == num_layers else []


class StageCollector(Collector):
    """Metrics of each stage, which the head exports."""

    def __init__(self, stages: StagesHead, model_name: str) -> None:
        self._stages, self._model_name = stages, model_name

    def collect(self) -> Iterator[Metric]:
        figures, totals = self._stages.roster.figures(), self._stages.others.totals
        layers = [each.end_layer - each.first_layer for each in figures]
        yield self._by_stage(GaugeMetricFamily, "bough_stage_layers", "Layers that a stage holds", layers)
        sizes = [each.memory_bytes for each in figures]
        yield self._by_stage(GaugeMetricFamily, "bough_stage_bytes", "Memory of a stage's layers and their KV", sizes)
        wait, compute = ([each.wait_ns * NANO for each in totals], [each.compute_ns * NANO for each in totals])
        text = "Time in which a stage waited for weights"
        yield self._by_stage(CounterMetricFamily, "bough_stage_wait_seconds", text, wait)
        yield self._by_stage(
            CounterMetricFamily, "bough_stage_compute_seconds", "Time in which a stage computed", compute
        )
        text, seconds = "Time of sweeps between the stages", self._stages.others.total_network_seconds
        yield counter("bough_stage_network_seconds", text, {"model_name": self._model_name}, seconds)

    def _by_stage(self, kind: type[Family], name: str, text: str, values: Sequence[float]) -> Family:
        family = kind(name, text, labels=["model_name", "stage"])
        for number, value in enumerate(values, start=1):
            family.add_metric([self._model_name, str(number)], value)
        return family
