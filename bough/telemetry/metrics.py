"""Serves Prometheus metrics at http://HOST:PORT/metrics, for all processes that have any."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bough.config.addresses import bare, joined
from bough.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
NUM_PENDING = 128  # connections that wait to be accepted
MAX_SECONDS = 10.0  # after which a connection is closed


class MetricsServer:
    """The metrics of one process in `registry`, and their server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: tuple[WSGIServer, Thread] | None = None

    @property
    def port(self) -> int:
        """Port of /metrics; -1 if not served."""
        return int(self._server[0].server_port) if self._server else -1

    def serve(self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Serve /metrics from a separate thread; port 0 picks a free one, -1 serves none.

        With `context`, which is called for each connection, the server accepts only HTTPS.

        Raises:
            ConfigError: the port is in use.
        """
        if port < 0:
            return
        try:
            self._server = start_http_server(port, bare(host), self.registry)
        except OSError as exc:
            where = f"{joined(host, port)}: {exc}"
            raise ConfigError(
                f"--metrics-port: cannot listen on {where}; --host must be this machine's, 0 takes a free port"
            ) from exc
        server, _ = self._server
        _bound(server, context)
        if (app := server.get_app()) is not None:
            server.set_app(_as_plain_text(app))

    def name_backend(self, model_name: str, backend: str) -> None:
        """Export which implementation computes."""
        gauge = Gauge("bough_backend", "1 for what computes", ["model_name", "backend"], registry=self.registry)
        gauge.labels(model_name, backend).set(1)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


def _bound(server: WSGIServer, context: Callable[[], ssl.SSLContext] | None) -> None:
    """Limit the number of connections and their time, as each has a thread for its handshake and request.

    At the limit the oldest one is closed, so no client can block the others by keeping connections open.
    """
    listener, lock = server.socket, Lock()
    listener.listen(NUM_PENDING)
    ends: dict[socket.socket, float] = {}  # when each open connection will be closed, oldest first

    def accept() -> tuple[socket.socket, Any]:
        connection, peer = listener.accept()
        connection.settimeout(MAX_SECONDS)
        if context is not None:
            connection = context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with lock:
            ends[connection] = time.monotonic() + MAX_SECONDS
        end_overdue()
        return connection, peer

    def end_overdue() -> None:
        with lock:
            while ends and (len(ends) > MAX_CONNECTIONS or next(iter(ends.values())) < time.monotonic()):
                oldest = next(iter(ends))
                del ends[oldest]
                with suppress(OSError):  # the peer has left
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # wakes its thread, even during TLS

    def close(connection: Any) -> None:
        with lock:
            ends.pop(connection, None)
            connection.close()

    def log_error(_: Any, peer: Any) -> None:
        logger.warning("/metrics could not be served to %s: %s", peer, sys.exception())

    # The server calls service_actions twice a second.
    vars(server).update(get_request=accept, service_actions=end_overdue, close_request=close, handle_error=log_error)


def _as_plain_text(app: WSGIApplication) -> WSGIApplication:
    """The WSGI application without content negotiation.

    In OpenMetrics format, which Prometheus requests, prometheus_client would write `vllm_` for `vllm:` in names, so
    that vLLM's names would not be found.
    """

    def plain(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return app(environ | {"HTTP_ACCEPT": ""}, start_response)

    return plain


def metrics_url(address: str) -> str:
    """URL of an address in the index: HOST:PORT, or https://HOST:PORT with TLS; empty for none."""
    return f"{address if '://' in address else f'http://{address}'}/metrics" if address else ""


def metrics_note(address: str) -> tuple[str, ...]:
    """A note on where a process serves its metrics; empty without an address."""
    return (f"metrics at {metrics_url(address)}",) if address else ()


def labelled(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Labels of a metric. vLLM's metrics have the engine as a label; a process of bough has one engine."""
    return {**labels, "engine": "0"} if name.startswith("vllm:") else dict(labels)


def _single(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, labels: Mapping[str, str], value: float
) -> Metric:
    labels = labelled(name, labels)
    metric = family(name, text, labels=[*labels])
    metric.add_metric([*labels.values()], value)
    return metric


gauge = partial(_single, GaugeMetricFamily)  # a metric with one value
counter = partial(_single, CounterMetricFamily)  # the same; Prometheus appends `_total` to its name
