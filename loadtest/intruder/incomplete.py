"""Fills a gRPC server's memory as a stranger can: connections with streams of messages that never end.

    python -m loadtest.intruder.incomplete --process PID --port 7411 --connections 50 --streams 4096

The client writes its own HTTP/2 frames and sends all that the server's flow control allows. Ends with one JSON line:

grown_mib     growth of the process's resident memory at most, in MiB
sent_mib      MiB that the server took from the client
open_streams  streams that the server had not ended at the end
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bough.config.flag_parser import FlagParser
from loadtest.fuzz.grpc_door import ACK, GOAWAY, PING, PREFACE, SETTINGS, _frame, _literal

DATA, HEADERS, RST_STREAM, WINDOW_UPDATE = 0, 1, 3, 8
END_HEADERS, END_STREAM = 4, 1
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4  # settings
DEFAULT_WINDOW = 65_535  # bytes, before the server's settings
FRAME_BYTES = 16_384
MIB = 1 << 20
ADDRESS = "127.0.0.2"  # of strangers, which share what the server allows to one address
CHECK = "/grpc.health.v1.Health/Check"


def rss_bytes(process_id: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * 4096


def head(path: str, fields: Iterable[tuple[str, str]] = ()) -> bytes:
    """The block of a call's headers."""
    usual = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    every = [*usual, ("content-type", "application/grpc"), *fields]
    return b"".join(_literal(name.encode(), value.encode()) for name, value in every)


class Stranger:
    """One connection, whose streams each send a message of `declared` bytes up to its last byte but one."""

    def __init__(self, path: str, fields: Sequence[tuple[str, str]] = (), declared: int = 4 * MIB) -> None:
        self._head, self._declared = head(path, fields), declared
        self._window, self._initial_window = DEFAULT_WINDOW, DEFAULT_WINDOW
        self.windows: dict[int, int] = {}  # of open streams
        self._left: dict[int, int] = {}  # bytes that each stream has yet to send
        self.max_streams = 0  # as the server limits them; 0 before it has said so
        self.num_sent = 0
        self._may_send = asyncio.Event()
        self.has_ended = False

    async def run(self, port: int, num_streams: int, acks: bool = True) -> None:
        """Send until cancelled, or until the server ends the connection; an ended stream is replaced by a new one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ADDRESS, 0))
        try:
            writer.write(PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 2**31 - 1)))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(reader, writer, acks))
                tasks.create_task(self._write(writer, num_streams, acks))
        except* (OSError, asyncio.IncompleteReadError):
            self.has_ended = True
        finally:
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter, num_streams: int, acks: bool) -> None:
        next_stream = 1
        while True:
            self._may_send.clear()
            if self.max_streams or not acks:
                limit = min(num_streams, self.max_streams) if acks else num_streams
                while len(self.windows) < limit:
                    self._open(writer, next_stream)
                    next_stream += 2
            self._send(writer)
            await writer.drain()
            await self._may_send.wait()

    def _open(self, writer: asyncio.StreamWriter, stream: int) -> None:
        writer.write(_frame(HEADERS, END_HEADERS, stream, self._head))
        self.windows[stream], self._left[stream] = self._initial_window, self._declared + 5 - 1

    def _send(self, writer: asyncio.StreamWriter) -> None:
        for stream, left in self._left.items():
            while (size := min(left, self.windows[stream], self._window, FRAME_BYTES)) > 0:
                is_first = left == self._declared + 4
                begin = struct.pack(">BI", 0, self._declared)[:size] if is_first else b""
                writer.write(_frame(DATA, 0, stream, begin + bytes(size - len(begin))))
                left -= size
                self._left[stream] = left
                self.windows[stream] -= size
                self._window -= size
                self.num_sent += size

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, acks: bool) -> None:
        while True:
            first = await reader.readexactly(9)
            self._take(first, await reader.readexactly(int.from_bytes(first[:3], "big")), writer, acks)
            self._may_send.set()

    def _take(self, first: bytes, payload: bytes, writer: asyncio.StreamWriter, acks: bool) -> None:
        kind, flags, stream = first[3], first[4], int.from_bytes(first[5:], "big")
        if kind == SETTINGS and not flags & ACK:
            for place in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, place)
                if name == MAX_CONCURRENT_STREAMS:
                    self.max_streams = value
                if name == INITIAL_WINDOW_SIZE:
                    for each in self.windows:
                        self.windows[each] += value - self._initial_window
                    self._initial_window = value
            if acks:
                writer.write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            writer.write(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE and stream in self.windows:
            self.windows[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.windows.pop(stream, None)
            self._left.pop(stream, None)
        elif kind == GOAWAY:
            raise ConnectionResetError(payload[8:].decode(errors="replace"))


async def attack(
    process_id: int, port: int, strangers: Sequence[Stranger], num_streams: int, seconds: float, acks: bool = True
) -> dict[str, float]:
    """Let all connections send for `seconds`, and return the figures."""
    before = peak = rss_bytes(process_id)
    tasks = [asyncio.create_task(one.run(port, num_streams, acks)) for one in strangers]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not all(task.done() for task in tasks):
        await asyncio.sleep(0.05)
        peak = max(peak, rss_bytes(process_id))
    figures = {
        "grown_mib": round((peak - before) / MIB, 1),
        "sent_mib": round(sum(one.num_sent for one in strangers) / MIB, 1),
        "open_streams": sum(len(one.windows) for one in strangers if not one.has_ended),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def main() -> int:
    """Print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--process", type=int, required=True, help="process id of the server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default=CHECK, help="method that is called")
    parser.add_argument("--key", default="", help="shown with each call")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4096, help="of each connection")
    parser.add_argument("--declared", type=int, default=4 * MIB, help="bytes of each message")
    parser.add_argument("--no-acks", action="store_true", help="never acknowledge the server's settings")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    fields = [("authorization", f"Bearer {given.key}")] if given.key else []
    strangers = [Stranger(given.path, fields, given.declared) for _ in range(given.connections)]
    figures = attack(given.process, given.port, strangers, given.streams, given.seconds, not given.no_acks)
    print(json.dumps(asyncio.run(figures)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
