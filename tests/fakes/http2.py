"""Frames of HTTP/2 and headers of gRPC calls, as bytes, for clients that break the rules."""

from __future__ import annotations

import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1  # flags
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4  # settings
CHECK = "/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def head(path: str, fields: Iterable[tuple[str, str]] = ()) -> bytes:
    """The block of a gRPC call's headers; characters are bytes."""
    usual = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    every = [*usual, ("content-type", "application/grpc"), *fields]
    return b"".join(literal(name.encode(), value.encode("latin-1")) for name, value in every)


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2), lengths of up to 126 or more in two bytes."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    return bytes((number,)) if number < 127 else bytes((127, (number - 127) & 0x7F | 0x80, (number - 127) >> 7))
