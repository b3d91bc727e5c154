"""A TCP relay that delays what passes, as the kernel may have no queue for that."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

CHUNK_BYTES = 1 << 16
Pending = SimpleQueue[tuple[float, bytes]]  # when to pass a chunk on; an empty one ends the connection


def relayed(host: str, upstream: tuple[str, int], delay_seconds: float = 0.0, slow: str = "") -> int:
    """Pass connections to a new port of `host` on to `upstream`, until this process ends; returns the port.

    Connections from the host `slow` have the delay in each direction. Threads keep time better than an event loop.
    """
    server = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            near, (peer, *_) = server.accept()
            try:
                far = socket.create_connection(upstream)
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pending: Pending = SimpleQueue()
                _start(_read, source, pending, delay_seconds if peer == slow else 0.0)
                _start(_write, pending, sink)

    _start(accept)
    return int(server.getsockname()[1])


def _start(work: Callable[..., None], *arguments: object) -> None:
    Thread(target=work, args=arguments, daemon=True).start()


def _read(source: socket.socket, pending: Pending, delay_seconds: float) -> None:
    data = b"-"
    while data:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        pending.put((time.monotonic() + delay_seconds, data))


def _write(pending: Pending, sink: socket.socket) -> None:
    with suppress(OSError):
        while (due := pending.get())[1]:
            time.sleep(max(0.0, due[0] - time.monotonic()))
            sink.sendall(due[1])
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)  # its reader then ends the other direction
