"""Serves Prometheus metrics at http://HOST:PORT/metrics, for all processes that have any."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bough.config.addresses import bare, joined
from bough.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # after which a silent connection is closed


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
        """Serve /metrics from a separate thread; port 0 takes a free one, -1 serves none.

        With `context`, which is called for each connection, only HTTPS is spoken.

        Raises:
            ConfigError: the port is in use.
        """
        if port < 0:
            return
        try:
            self._server = start_http_server(port, bare(host), self.registry)
        except OSError as exc:
            raise ConfigError(
                f"--metrics-port: cannot listen on {joined(host, port)}: {exc}; 0 takes a free one"
            ) from exc
        server, _ = self._server
        _keep_waiting_short(server, context)
        if (app := server.get_app()) is not None:
            server.set_app(_as_plain_text(app))

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


def _keep_waiting_short(server: WSGIServer, context: Callable[[], ssl.SSLContext] | None) -> None:
    """Accept connections in threads, each of which does its own handshake and ends when the client is silent."""
    listener = server.socket

    def accept() -> tuple[socket.socket, Any]:
        connection, peer = listener.accept()
        connection.settimeout(SILENT_SECONDS)
        if context is None:
            return connection, peer
        return context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer

    def tell(_: Any, peer: Any) -> None:
        logger.warning("/metrics could not be served to %s: %s", peer, sys.exception())

    server.get_request = accept  # type: ignore[method-assign]
    server.handle_error = tell  # type: ignore[method-assign, assignment]


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


def gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    """A gauge with one value."""
    metric = GaugeMetricFamily(name, text, labels=[*labels])
    metric.add_metric([*labels.values()], value)
    return metric


def counter(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    """A counter with one value; Prometheus appends `_total` to its name."""
    metric = CounterMetricFamily(name, text, labels=[*labels])
    metric.add_metric([*labels.values()], value)
    return metric
