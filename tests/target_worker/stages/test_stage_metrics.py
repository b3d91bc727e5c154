"""What a head reports of its stages: to metrics, to traces, and to people."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from bough.config.processes import TargetConfig, parse
from bough.errors import InvalidRequest
from bough.protocol.generation import StageStatus
from bough.protocol.messages import Timings
from bough.sizing.stage_split import StageRoom
from target_worker.stages.frames import Frame
from target_worker.stages.head import StageCollector, StagesHead
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.remote import OtherStages
from target_worker.stages.roster import JoinCall, StageFacts, StageFigures
from target_worker.stages.slots import ChangeKind, SlotLog

FACTS = StageFacts("0.1", "code", "checkpoint", "tokenizer", "bfloat16", "cpu")
FIGURES = [StageFigures(memory_bytes=700), StageFigures(memory_bytes=800)]
BATCH = cast(Any, SimpleNamespace(segments=(), num_tokens=1, num_rows=8))
SPENT = [Timings(3_000_000_000, 50, 1_000_000_000, 2_000_000_000), Timings()]


class FullRing:
    """A ring that takes no frame, in an epoch that goes on."""

    epoch, why_down = 1, ""

    def send(self, epoch: int, frame: Frame) -> None:
        raise InvalidRequest("body", "must be smaller", len(frame.body))


class EchoingRing:
    """A ring whose stages return what they get, with the times that they took."""

    epoch, why_down = 1, ""

    def __init__(self) -> None:
        self.away: list[tuple[Future[Frame], Frame]] = []

    def send(self, epoch: int, frame: Frame) -> None:
        given = pass_from_wire(frame.header, frame.body)
        self.away.append((Future(), Frame(*pass_to_wire(given._replace(timings=tuple(SPENT))))))

    def receiving(self, epoch: int, timeout_seconds: float) -> Future[Frame]:
        return self.away[-1][0]

    def back(self) -> None:
        future, frame = self.away.pop(0)
        future.set_result(frame)


@pytest.fixture
async def head() -> StagesHead:
    """Of two stages, after two passes."""
    head = StagesHead(parse(TargetConfig, "target_worker", ["--model", "m", "--stages", "3"], {}))
    head.admit(FACTS)
    head.layers = [range(2, 5), range(5, 9)]
    for number, figures in enumerate(FIGURES, start=1):
        head.roster.join(JoinCall(f"id {number}", f"host:{number}", FACTS, StageRoom("b", 1, 1e9, 0.25), figures))
    assert [each.wait_ns for each in head.statuses(head.others.last)] == [0, 0], "there was no pass yet"
    head.others = OtherStages(cast(Any, ring := EchoingRing()), SlotLog(), lambda: "")
    assert head.others.lost_kv()
    for _ in range(2):
        assert not head.others.lost_kv()
        sent = head.others.send(BATCH, torch.zeros(1, 8, 4))
        ring.back()
        assert head.others.receive(sent).shape == (1, 8, 4)
    return head


async def test_stages_are_described_with_their_part_of_the_last_sweep(head: StagesHead) -> None:
    first = StageStatus("host:1", 2, 5, 700, 1_000_000_000, 2_000_000_000, 50)
    assert head.statuses(head.others.last) == (first, StageStatus("host:2", 5, 9, 800))
    assert head.others.last.network_ns == 0, "stages that say that they took longer leave no time for the network"


async def test_stages_are_spans_of_a_sweep(head: StagesHead) -> None:
    """They lie in the time that the sweep was away from the head, with equal hops between them."""
    head.others.last = replace(head.others.last, network_ns=300, began_ns=5_000)
    whole, first, second = head.spans()
    assert (whole.name, whole.began_ns, whole.ended_ns) == ("stages", 5_000, 3_000_005_350)
    assert whole.attributes == {"bough.stages.network_seconds": pytest.approx(3e-7)}
    assert (first.name, first.began_ns, first.ended_ns) == ("stage 1", 5_150, 3_000_005_150)
    assert first.attributes == {
        "bough.stage.first_layer": 2,
        "bough.stage.last_layer": 4,
        "bough.stage.queue_seconds": pytest.approx(5e-8),
        "bough.stage.wait_seconds": 1.0,
        "bough.stage.compute_seconds": 2.0,
    }
    assert (second.name, second.began_ns, second.ended_ns) == ("stage 2", 3_000_005_250, 3_000_005_250)


async def test_stages_are_exported_separately(head: StagesHead) -> None:
    registry = CollectorRegistry()
    registry.register(StageCollector(head, "m"))
    lines = generate_latest(registry).decode().splitlines()
    values = {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}
    network = values.pop('bough_stage_network_seconds_total{model_name="m"}')
    assert values == {
        'bough_stage_layers{model_name="m",stage="1"}': 3,
        'bough_stage_layers{model_name="m",stage="2"}': 4,
        'bough_stage_bytes{model_name="m",stage="1"}': 700,
        'bough_stage_bytes{model_name="m",stage="2"}': 800,
        'bough_stage_wait_seconds_total{model_name="m",stage="1"}': 2,
        'bough_stage_wait_seconds_total{model_name="m",stage="2"}': 0,
        'bough_stage_compute_seconds_total{model_name="m",stage="1"}': 4,
        'bough_stage_compute_seconds_total{model_name="m",stage="2"}': 0,
    }
    assert network == pytest.approx(head.others.total.network_ns / 1e9)


def test_the_stages_kv_counts_as_lost_if_a_pass_could_not_be_sent() -> None:
    """The changes of slots that went with it are gone."""
    log = SlotLog()
    others = OtherStages(cast(Any, FullRing()), log, lambda: "")
    assert others.lost_kv()
    assert not others.lost_kv()
    log.add(log.number_slot(), ChangeKind.MOVED, 0, 4, 0)
    with pytest.raises(InvalidRequest, match="body"):
        others.send(BATCH, torch.zeros(1, 8, 4))
    assert others.progress() == 0
    assert others.lost_kv()


def test_the_stages_make_progress_until_all_passes_are_back() -> None:
    """A head that hangs does not take up what has come back, and must not be believed to wait for its stages."""
    others = OtherStages(cast(Any, ring := EchoingRing()), SlotLog(), lambda: "")
    assert others.lost_kv()
    assert others.progress() == 0
    for _ in range(2):
        others.send(BATCH, torch.zeros(1, 8, 4))
    ring.back()
    assert others.progress() > 0
    ring.back()
    assert others.progress() == 0
