"""The head of a target that spans machines: who its stages are, which layers they hold, and the ring to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bough.config.processes import TargetConfig
from bough.model.sizes.target_limits import KVRoom
from bough.processes.process import stage
from bough.protocol.generation import StageStatus
from bough.protocol.messages import Timings
from bough.security.access import Access
from bough.sizing.placement import gigabytes
from bough.sizing.stage_split import StageRoom, require_layers, split_layers, stage_load
from bough.telemetry.metrics import counter
from bough.telemetry.spans import FinishedSpan
from target_worker.stages.measured import Needs
from target_worker.stages.remote import OtherStages, StageTimes
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Assignment, Roster, StageFacts, StageFigures
from target_worker.stages.service import StagesService
from target_worker.stages.slots import SlotLog
from target_worker.sweep.held_layers import HeldLayers

logger = logging.getLogger(__name__)
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

POLL_SECONDS = 0.1
NANO = 1e-9
HOP_SECONDS = 0.002  # of hidden states to the next member, before it has been measured


class Split(NamedTuple):
    """What the members of a target hold."""

    ranges: list[range]  # layers of each, the head's first
    room: KVRoom  # of all
    max_context: int  # tokens of the longest session


class StagesHead:
    """Created on the event loop, before the model is loaded on another thread."""

    def __init__(self, config: TargetConfig) -> None:
        self.ring = Ring(Access.of(config), is_head=True)
        self.log = SlotLog()
        self.others = OtherStages(self.ring, self.log, self.trouble)
        self.service: StagesService | None = None  # once the head knows its own model
        self.address = ""  # at which the last stage reaches this process
        self.layers: Sequence[range] = ()  # of each stage, once they are divided
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

    def split(self, whole: HeldLayers, own: StageRoom, room: KVRoom, asked: TargetConfig) -> Split:
        """Wait for all stages, and decide what each member holds; blocks the loading thread.

        `own` is what the head offers, and `asked` are its settings without defaults. Stages that have loaded their
        layers keep them, and KV memory of the size that an earlier head chose, if that fits this one.

        Raises ConfigError if there are too few layers, or memory is too small.
        """
        sizes, config = [layer.num_bytes for layer in whole.layers], whole.config
        require_layers(len(sizes), self._num_members)  # rather than once the last one has joined
        stage(f"waiting for {self._num_members - 1} stages (--stage-of {self.address})")
        while (rooms := self.roster.wait_complete(POLL_SECONDS)) is None:
            pass
        members = [own, *rooms]
        split = loaded_split([each.figures for each in self.roster.calls()], len(sizes))
        if split is None or not is_kept(split, whole, own, room, asked):
            needs = [Needs.of(whole, config, each, room, is_head=each is own) for each in members]
            left = [own_needs.left(each) for own_needs, each in zip(needs, members, strict=True)]
            ranges = split_layers(sizes, [each.kv_bytes for each in needs], left, HOP_SECONDS)
            split = Split(ranges, room, config.max_context)
        limits = *split.room, split.max_context, config.max_nodes, config.max_sweep_tokens, config.rows
        stages = [*enumerate(split.ranges)][1:]
        self.roster.assign([Assignment(number, each.start, each.stop, *limits) for number, each in stages])
        for layers, each in zip(split.ranges, members, strict=True):
            size = gigabytes(sum(sizes[layers.start : layers.stop]))
            logger.info("%s: layers %d to %d, %s", each.name, layers.start, layers.stop - 1, size)
        self.layers = split.ranges[1:]
        return split

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
            for each in (call.figures for call in self.roster.calls())
            if each.device != own
        )

    def statuses(self, times: StageTimes) -> tuple[StageStatus, ...]:
        """What each stage holds, and its part of `times`."""
        spent = times.stages or (Timings(),) * len(self.layers)
        return tuple(
            StageStatus(
                call.address,
                own.start,
                own.stop,
                call.figures.memory_bytes,
                each.wait_ns,
                each.compute_ns,
                each.queue_ns,
            )
            for call, own, each in zip(self.roster.calls(), self.layers, spent, strict=False)
        )

    def spans(self) -> list[FinishedSpan]:
        """The last pass through the stages, and each one's part. As clocks differ, hops are shown equally long."""
        last, found = self.others.last, list[FinishedSpan]()
        hop_ns = last.network_ns // (len(last.stages) + 1)
        ended_ns = last.began_ns
        for number, each in enumerate(self.statuses(last), start=1):
            began_ns = ended_ns + hop_ns + each.queue_ns
            ended_ns = began_ns + each.wait_ns + each.compute_ns
            attributes = {
                "bough.stage.first_layer": each.first_layer,
                "bough.stage.last_layer": each.end_layer - 1,
                "bough.stage.queue_seconds": each.queue_ns * NANO,
                "bough.stage.wait_seconds": each.wait_ns * NANO,
                "bough.stage.compute_seconds": each.compute_ns * NANO,
            }
            found.append(FinishedSpan(f"stage {number}", began_ns, ended_ns, attributes))
        network = {"bough.stages.network_seconds": last.network_ns * NANO}
        return [FinishedSpan("stages", last.began_ns, ended_ns + hop_ns, network), *found]

    def _members(self) -> list[str] | None:
        others = self.roster.members()
        return None if others is None else [self.address, *others]


def loaded_split(stages: Sequence[StageFigures], num_layers: int) -> Split | None:
    """The split by which all stages have loaded their layers, for a head that starts again; None if there is none."""
    ends = [stages[0].first_layer, *(each.end_layer for each in stages)]
    is_split = all(each.first_layer == before < each.end_layer for each, before in zip(stages, ends, strict=False))
    (kv, *others) = {(KVRoom(each.num_rows, each.num_states), each.max_context) for each in stages}
    if others or not (is_split and ends[0] and ends[-1] == num_layers):
        return None
    return Split([range(*pair) for pair in pairwise((0, *ends))], *kv)


def is_kept(split: Split, whole: HeldLayers, own: StageRoom, room: KVRoom, asked: TargetConfig) -> bool:
    """Whether the split of loaded stages fits a head that starts again; arguments are as of `StagesHead.split`.

    By default KV memory depends on what is free at a start: other rows would make all stages start again, too.
    """
    config, now = replace(whole.config, max_context=split.max_context), whole.config
    if (asked.kv_memory or asked.kv_sessions) and split.room != room:
        return False
    if (asked.max_context and config != now) or split.room.num_rows < split.max_context + config.max_nodes:
        return False
    needs, sizes = Needs.of(whole, config, own, split.room, is_head=True), [layer.num_bytes for layer in whole.layers]
    return stage_load(sizes, needs.kv_bytes, split.ranges[0], needs.left(own)) is not None


class StageCollector(Collector):
    """Metrics of each stage, which the head exports."""

    def __init__(self, stages: StagesHead, model_name: str) -> None:
        self._stages, self._model_name = stages, model_name

    def collect(self) -> Iterator[Metric]:
        total = self._stages.others.total
        stages = self._stages.statuses(total)
        layers = [each.end_layer - each.first_layer for each in stages]
        yield self._by_stage(GaugeMetricFamily, "bough_stage_layers", "Layers that a stage holds", layers)
        sizes = [each.memory_bytes for each in stages]
        yield self._by_stage(GaugeMetricFamily, "bough_stage_bytes", "Memory of a stage's layers and their KV", sizes)
        wait, compute = [each.wait_ns * NANO for each in stages], [each.compute_ns * NANO for each in stages]
        text = "Time in which a stage waited for weights"
        yield self._by_stage(CounterMetricFamily, "bough_stage_wait_seconds", text, wait)
        yield self._by_stage(
            CounterMetricFamily, "bough_stage_compute_seconds", "Time in which a stage computed", compute
        )
        text = "Time of sweeps between the stages"
        yield counter("bough_stage_network_seconds", text, {"model_name": self._model_name}, total.network_ns * NANO)

    def _by_stage(self, kind: type[Family], name: str, text: str, values: Sequence[float]) -> Family:
        family = kind(name, text, labels=["model_name", "stage"])
        for number, value in enumerate(values, start=1):
            family.add_metric([self._model_name, str(number)], value)
        return family
