"""What members of a ring send one another, as plain values: hellos, and frames that are cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bough.errors import InvalidRequest

PIECE_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 512 * 1024 * 1024
MAX_MEMBERS = 64
MAX_EPOCH = 2**63 - 1  # leaves room in uint64 for the next one
MAX_ADDRESS_LENGTH = 256  # characters


class Frame(NamedTuple):
    """One message around the ring."""

    header: bytes  # opaque to the ring; usually some KB
    body: bytes | memoryview  # hidden states; contiguous
    arrived_ns: int = 0  # time.perf_counter_ns at the member that has received it


class Hello(NamedTuple):
    """The first message of a link: it begins an epoch at its receiver."""

    epoch: int  # from 1; higher than all before
    members: tuple[str, ...]  # addresses in order, the head's first
    number: int  # place of the receiver among the members
    payload: bytes = b""  # opaque to the ring

    def validate(self) -> None:
        """Raises InvalidRequest naming the field."""
        if not 1 <= self.epoch <= MAX_EPOCH:
            raise InvalidRequest("hello.epoch", f"must be 1 to {MAX_EPOCH}", self.epoch)
        if not 2 <= len(self.members) <= MAX_MEMBERS:
            raise InvalidRequest("hello.members", f"must be 2 to {MAX_MEMBERS} addresses", len(self.members))
        for index, address in enumerate(self.members):
            if not 1 <= len(address) <= MAX_ADDRESS_LENGTH or not address.isprintable():
                problem = f"must be 1 to {MAX_ADDRESS_LENGTH} printable characters"
                raise InvalidRequest(f"hello.members[{index}]", problem, repr(address[:MAX_ADDRESS_LENGTH]))
        if not 0 <= self.number < len(self.members):
            raise InvalidRequest("hello.number", f"must be 0 to {len(self.members) - 1}", self.number)

    def name(self, number: int) -> str:
        """A member as errors name it; numbers continue around the ring."""
        number %= len(self.members)
        return f"{f'stage {number}' if number else 'the head'} at {self.members[number]}"

    @property
    def next_number(self) -> int:
        """The place of the receiver's successor."""
        return (self.number + 1) % len(self.members)


class Piece(NamedTuple):
    """A part of a frame, small enough for a message."""

    frame: int  # number of the frame in its epoch, from 1
    offset: int  # bytes of the frame before this piece
    header_bytes: int  # of the whole frame
    body_bytes: int  # of the whole frame
    header: bytes
    body: bytes  # empty while bytes of the header are missing


class Heartbeat(NamedTuple):
    """The sender lives."""


class RingEnd(NamedTuple):
    """The epoch is over."""

    why: str


def require_sizes(header_bytes: int, body_bytes: int) -> None:
    """Raises InvalidRequest for a frame that is too large."""
    if header_bytes > MAX_HEADER_BYTES:
        raise InvalidRequest("piece.header_bytes", f"must be at most {MAX_HEADER_BYTES}", header_bytes)
    if body_bytes > MAX_BODY_BYTES:
        raise InvalidRequest("piece.body_bytes", f"must be at most {MAX_BODY_BYTES}", body_bytes)


def pieces(number: int, frame: Frame, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a frame, the one with this number, into at least one piece."""
    header, body = memoryview(frame.header), memoryview(frame.body)
    begin, size = 0, header.nbytes + body.nbytes
    body = body.cast("B") if body.nbytes else memoryview(b"")  # an empty view of several dimensions cannot be cast
    while True:
        end = min(begin + piece_bytes, size)
        in_body = slice(max(0, begin - len(header)), max(0, end - len(header)))
        yield Piece(number, begin, len(header), len(body), bytes(header[begin:end]), bytes(body[in_body]))
        begin = end
        if begin == size:
            return


class Assembler:
    """Joins pieces to frames, and checks that none is missing, repeated or too large."""

    def __init__(self) -> None:
        self._frame = 1  # number of the present frame
        self._filled = 0  # bytes of it that have come
        self._header, self._body = bytearray(), memoryview(b"")  # with the announced sizes

    def add(self, piece: Piece) -> Frame | None:
        """The frame that this piece completes, if it does. Raises InvalidRequest naming the field."""
        if piece.frame != self._frame:
            raise InvalidRequest("piece.frame", f"must be {self._frame}", piece.frame)
        if piece.offset != self._filled:
            raise InvalidRequest("piece.offset", f"must be {self._filled}", piece.offset)
        if not self._filled:
            require_sizes(piece.header_bytes, piece.body_bytes)
            self._header = bytearray(piece.header_bytes)
            self._body = memoryview(np.empty(piece.body_bytes, np.uint8))  # type: ignore[arg-type]  # it is a buffer
        for name, now, first in (
            ("header_bytes", piece.header_bytes, len(self._header)),
            ("body_bytes", piece.body_bytes, len(self._body)),
        ):
            if now != first:
                raise InvalidRequest(f"piece.{name}", f"must be {first}, as in the frame's first piece", now)
        self._fill(piece)
        if self._filled < piece.header_bytes + piece.body_bytes:
            return None
        frame = Frame(bytes(self._header), self._body)
        self._frame, self._filled, self._body = self._frame + 1, 0, memoryview(b"")
        return frame

    def _fill(self, piece: Piece) -> None:
        in_header = max(0, len(self._header) - self._filled)  # bytes of the header that are missing
        in_body = len(self._header) + len(self._body) - self._filled - in_header
        if len(piece.header) > in_header:
            raise InvalidRequest("piece.header", f"must have at most {in_header} bytes", len(piece.header))
        in_body = in_body if len(piece.header) == in_header else 0
        if len(piece.body) > in_body:
            raise InvalidRequest("piece.body", f"must have at most {in_body} bytes", len(piece.body))
        if not piece.header and not piece.body and in_header + in_body:
            raise InvalidRequest("piece.body", "must not be empty, unless the frame is", 0)
        at = self._filled
        self._header[at : at + len(piece.header)] = piece.header
        at = max(0, at - len(self._header))
        self._body[at : at + len(piece.body)] = piece.body
        self._filled += len(piece.header) + len(piece.body)
