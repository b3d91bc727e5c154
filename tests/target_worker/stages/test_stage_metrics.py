"""The metrics of stages, which their head exports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from bough.errors import InvalidRequest
from bough.protocol.messages import Timings
from target_worker.stages.frames import Frame
from target_worker.stages.head import StageCollector
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.remote import OtherStages
from target_worker.stages.roster import StageFigures
from target_worker.stages.slots import ChangeKind, SlotLog

FIGURES = [StageFigures(2, 5, 700, "a CPU"), StageFigures(5, 9, 800, "a CPU")]
BATCH = cast(Any, SimpleNamespace(segments=(), num_tokens=1, num_rows=8))
SPENT = [Timings(total_ns=3_000_000_000, wait_ns=1_000_000_000, compute_ns=2_000_000_000), Timings()]


class FullRing:
    """A ring that takes no frame, in an epoch that goes on."""

    epoch, why_down = 1, ""

    def send(self, epoch: int, frame: Frame) -> None:
        raise InvalidRequest("body", "must be smaller", len(frame.body))


class EchoingRing:
    """A ring whose stages return what they get, with the times that they took."""

    epoch, why_down = 1, ""

    def send(self, epoch: int, frame: Frame) -> None:
        given = pass_from_wire(frame.header, frame.body)
        self.frame = Frame(*pass_to_wire(given._replace(timings=tuple(SPENT))))

    def receive(self, epoch: int, timeout_seconds: float) -> Frame:
        return self.frame


def test_stages_are_exported_separately() -> None:
    others = OtherStages(cast(Any, EchoingRing()), SlotLog(), lambda: "")
    assert others.lost_kv()
    for _ in range(2):
        assert not others.lost_kv()
        assert others(BATCH, torch.zeros(1, 8, 4)).shape == (1, 8, 4)
    registry, roster = CollectorRegistry(), SimpleNamespace(figures=lambda: FIGURES)
    head = SimpleNamespace(roster=roster, others=others)
    registry.register(StageCollector(cast(Any, head), "m"))
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
    assert network == pytest.approx(others.total_network_seconds)


def test_the_stages_kv_counts_as_lost_if_a_pass_could_not_be_sent() -> None:
    """The changes of slots that went with it are gone."""
    log = SlotLog()
    others = OtherStages(cast(Any, FullRing()), log, lambda: "")
    assert others.lost_kv()
    assert not others.lost_kv()
    log.add(log.number_slot(), ChangeKind.MOVED, 0, 4, 0)
    with pytest.raises(InvalidRequest, match="body"):
        others(BATCH, torch.zeros(1, 8, 4))
    assert others.progress() == 0
    assert others.lost_kv()
