"""The head's list of its stages: which process has which place, and which place is empty.

A stage calls every two seconds for its whole life. One that has not called for some seconds has lost its place, which
the next process gets with the same layers. The list knows no network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from threading import Condition
from typing import NamedTuple

from bough.errors import InvalidRequest, PairingError, Unavailable
from bough.sizing.stage_split import StageRoom
from target_worker.stages.frames import MAX_ADDRESS_LENGTH

LEASE_SECONDS = 5.0  # after a stage's last call, until its place is free for another process
MAX_ID_LENGTH = 64  # characters
MAX_TEXT_LENGTH = 4096  # characters of a fact or a note


class Contradiction(NamedTuple):
    """A fact in which a stage differs from its head."""

    field: str
    must: str
    was: str


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What must be equal in all members of a target, as it decides tokens."""

    bough_version: str
    code: str  # hash over the code that computes
    checkpoint: str  # hash
    tokenizer: str  # hash
    dtype: str  # of hidden states
    arithmetic: str  # other facts that decide the bits of results

    def contradiction(self, other: StageFacts) -> Contradiction | None:
        """The first fact in which another member differs from this one."""
        for field in fields(self):
            must, was = getattr(self, field.name), getattr(other, field.name)
            if must != was:
                return Contradiction(field.name, must, was)
        return None


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What a stage does now, for people, and for a head that starts again."""

    first_layer: int = 0
    end_layer: int = 0  # the layer after its last one; equal to the first before it has layers
    memory_bytes: int = 0  # that its layers and their keys and values take
    device: str = ""  # as far as it decides the bits of results
    num_rows: int = 0  # as in its `Assignment`, and the next two
    num_states: int = 0
    max_context: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of a stage in the ring, and its layers."""

    number: int  # from 1; the head's is 0
    first_layer: int
    end_layer: int  # the layer after its last one
    num_rows: int  # of keys and values in each layer
    num_states: int  # recurrent states in each layer that has them
    max_context: int  # tokens of a session; this and what follows are the head's limits, which decide memory
    max_nodes: int  # of a tree
    max_sweep_tokens: int
    product_rows: int  # of a matrix product


@dataclass(frozen=True, slots=True)
class JoinCall:
    """A stage's call: it wants a place, or keeps it."""

    stage_id: str  # random for each process
    address: str  # where the other members reach it
    facts: StageFacts
    room: StageRoom
    figures: StageFigures

    def validate(self) -> None:
        """Raises InvalidRequest naming the field."""
        _require_text("stage_id", self.stage_id, MAX_ID_LENGTH)
        _require_text("address", self.address, MAX_ADDRESS_LENGTH)
        if not self.address.rpartition(":")[2].isdecimal():
            raise InvalidRequest("address", "must be HOST:PORT", repr(self.address))
        parts = {"facts": asdict(self.facts), "room": self.room._asdict(), "figures": asdict(self.figures)}
        for name, part in parts.items():
            for field, value in part.items():
                if isinstance(value, str):
                    _require_text(f"{name}.{field}", value, MAX_TEXT_LENGTH, least=0)
                elif not (math.isfinite(value) and value >= 0):
                    raise InvalidRequest(f"{name}.{field}", "must be a finite number from 0", value)


def _require_text(name: str, text: str, most: int, least: int = 1) -> None:
    if not least <= len(text) <= most or not text.isprintable():
        raise InvalidRequest(name, f"must be {least} to {most} printable characters", repr(text[:MAX_ADDRESS_LENGTH]))


@dataclass(slots=True)
class _Place:
    number: int
    call: JoinCall | None = None  # the last one of the stage that has the place, or had it last
    seen: float = -math.inf  # when that was, on the roster's clock
    assignment: Assignment | None = None

    @property
    def name(self) -> str:
        mine = self.assignment
        return f"stage {self.number}" + (f" (layers {mine.first_layer} to {mine.end_layer - 1})" if mine else "")


class Roster:
    """The places of a target's stages, at its head. Thread-safe."""

    def __init__(self, facts: StageFacts, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_stages` counts the head, as --stages does; `clock` is in seconds."""
        self._facts, self._clock = facts, clock
        self._places = [_Place(number) for number in range(1, num_stages)]
        self._joined = Condition()

    def join(self, call: JoinCall) -> Assignment | int:
        """Give a stage its place, or keep it; returns its layers, or before `assign` how many stages are missing.

        Raises:
            PairingError: names the fact in which the stage differs from the head.
            Unavailable: all places are taken.
        """
        if (contradiction := self._facts.contradiction(call.facts)) is not None:
            field, must, was = contradiction
            raise PairingError(f"{field}: must be {must!r} as at the head, got {was!r} at {call.address}")
        with self._joined:
            place = self._place_of(call)
            place.call, place.seen = call, self._clock()
            self._joined.notify_all()
            return place.assignment or sum(not self._is_live(each) for each in self._places)

    def wait_complete(self, timeout_seconds: float) -> list[StageRoom] | None:
        """Block until every place has a live stage; their rooms in order, or None at the timeout."""
        with self._joined:
            if not self._joined.wait_for(lambda: all(map(self._is_live, self._places)), timeout_seconds):
                return None
            if not any(place.assignment for place in self._places):  # those that have layers keep their order
                self._places.sort(key=lambda place: place.call.figures.first_layer if place.call is not None else 0)
                for number, place in enumerate(self._places, start=1):
                    place.number = number
            return [place.call.room for place in self._places if place.call is not None]

    def assign(self, assignments: Sequence[Assignment]) -> None:
        """Set the layers of all places, in their order."""
        with self._joined:
            for place, assignment in zip(self._places, assignments, strict=True):
                assert place.number == assignment.number, "assignments are in the order of their places"
                place.assignment = assignment

    def members(self) -> list[str] | None:
        """Addresses of all stages in order; None unless every place has layers and a live stage."""
        with self._joined:
            live = [place for place in self._places if place.assignment is not None and self._is_live(place)]
            addresses = [place.call.address for place in live if place.call is not None]
            return addresses if len(addresses) == len(self._places) else None

    def missing(self) -> str:
        """Which stages are missing, and where they were last; empty if none is."""
        with self._joined:
            return "; ".join(self._missing(place) for place in self._places if not self._is_live(place))

    def calls(self) -> list[JoinCall]:
        """The last calls of the stages, in order; without places that were never taken."""
        with self._joined:
            return [place.call for place in self._places if place.call is not None]

    def _place_of(self, call: JoinCall) -> _Place:
        """The stage's own place, that of its address (it was restarted), or the first free one."""
        for fits in (
            lambda place: place.call is not None and place.call.stage_id == call.stage_id,
            lambda place: place.call is not None and place.call.address == call.address,
            lambda place: not self._is_live(place),
        ):
            if (place := next(filter(fits, self._places), None)) is not None:
                return place
        addresses = ", ".join(place.call.address for place in self._places if place.call is not None)
        raise Unavailable(f"all places of stages are taken, by {addresses}; raise --stages at the head for one more")

    def _is_live(self, place: _Place) -> bool:
        return self._clock() - place.seen <= LEASE_SECONDS

    def _missing(self, place: _Place) -> str:
        if place.call is None:
            return f"{place.name} is missing: it has not joined yet"
        seconds = self._clock() - place.seen
        return f"{place.name} is missing: last seen {seconds:.0f} s ago at {place.call.address}"
