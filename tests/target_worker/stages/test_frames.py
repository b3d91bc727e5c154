"""Frames cut into pieces and joined again; `test_ring.py` has the pieces that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest
from target_worker.stages import codec
from target_worker.stages.frames import Assembler, Frame, Heartbeat, Hello, Piece, RingEnd, pieces

FRAMES = st.lists(st.builds(Frame, st.binary(max_size=20), st.binary(max_size=40), st.just(0)), max_size=4)


@given(frames=FRAMES, piece_bytes=st.integers(1, 16))
def test_pieces_join_to_the_frames_that_were_cut(frames: list[Frame], piece_bytes: int) -> None:
    assembler, joined = Assembler(), []
    for number, frame in enumerate(frames, 1):
        for piece in pieces(number, frame, piece_bytes):
            assert len(piece.header) + len(piece.body) <= piece_bytes
            sent = codec.passed_from_wire(codec.passed_to_wire(piece))
            assert isinstance(sent, Piece)
            joined.append(assembler.add(sent))
    assert [frame for frame in joined if frame is not None] == frames
    assert all(frame is None or isinstance(frame.body, memoryview) for frame in joined)


@given(frames=FRAMES, piece_bytes=st.integers(1, 16), data=st.data())
def test_a_changed_number_is_detected(frames: list[Frame], piece_bytes: int, data: st.DataObject) -> None:
    """What comes is joined to the same frames, or refused by the name of a field."""
    sent = [piece for number, frame in enumerate(frames, 1) for piece in pieces(number, frame, piece_bytes)]
    index = data.draw(st.integers(0, len(sent) - 1)) if sent else 0
    for changed, piece in enumerate(sent):
        if changed == index:
            field = data.draw(st.sampled_from(["frame", "offset", "header_bytes", "body_bytes"]))
            sent[index] = piece._replace(**{field: data.draw(st.integers(0, 50) | st.just(2**64 - 1))})
    assembler, joined, refused = Assembler(), [], None
    for piece in sent:
        try:
            joined.append(assembler.add(piece))
        except InvalidRequest as exc:
            refused = exc
            break
    assert refused is None or refused.field.startswith("piece.")
    done = [frame for frame in joined if frame is not None]
    assert done == frames[: len(done)]


@pytest.mark.parametrize(
    "message",
    [
        Hello(7, ("a:1", "[::1]:2"), 1, b"payload"),
        Piece(2**63, 3, 4, 5, b"h", b"b"),
        Heartbeat(),
        RingEnd("stage 1 at a:1 ends"),
    ],
)
def test_messages_round_trip_over_the_wire(message: codec.Passed) -> None:
    assert codec.passed_from_wire(codec.passed_to_wire(message)) == message
