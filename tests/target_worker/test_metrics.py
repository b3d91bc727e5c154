"""/metrics: the counters that a sweep moves, and a port that cannot be had."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

from bough.errors import ConfigError
from bough.protocol.messages import Timings, Verdict
from target_worker.kv.slot_pool import PoolFigures
from target_worker.scheduler.job import Swept
from target_worker.service import Metrics, TargetLoad
from tests.fakes.waiting import block_until


def test_sweeps_are_counted_and_reported() -> None:
    metrics = Metrics("tiny")
    metrics.watch(lambda: TargetLoad(PoolFigures(5, 2, 3, 1000, 250, 300, 77, 6, 90, 30, 8), 4, 9))
    metrics.serve("127.0.0.1", 0)
    try:
        for _ in range(2):
            timings = Timings(2_000_000_000, 0, 500_000_000, 1_500_000_000, 1_800_000_000, 1000, 1, 1_000_000_000)
            metrics.observe(3, 64, Swept(timings, lambda _: Verdict((), 0, ()), 30))
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        other = Metrics("other")
        with pytest.raises(ConfigError, match=rf"--metrics-port: cannot listen on 127\.0\.0\.1:{metrics.port}"):
            other.serve("127.0.0.1", metrics.port)
    finally:
        metrics.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {
        re.sub(r'{(engine="0",)?model_name="tiny"}', "", name): float(value)
        for name, value in values.items()
        if "created" not in name
    }
    rows = {name: values.pop(name) for name in [*values] if name.startswith("bough_sweep_rows_bucket")}
    assert rows['bough_sweep_rows_bucket{le="32.0",model_name="tiny"}'] == 0
    assert rows['bough_sweep_rows_bucket{le="64.0",model_name="tiny"}'] == 2
    calls = {name: values.pop(name) for name in [*values] if name.startswith("bough_sweep_calls_bucket")}
    assert [calls[f'bough_sweep_calls_bucket{{le="{le}",model_name="tiny"}}'] for le in ("2.0", "4.0")] == [0, 2]
    assert values == {
        "bough_sweep_calls_count": 2,
        "bough_sweep_calls_sum": 6,
        "bough_sweep_rows_count": 2,
        "bough_sweep_rows_sum": 128,
        "bough_link_bytes_total": 2000,
        "bough_link_seconds_total": 3.6,
        "bough_link_ideal_seconds_total": 2.0,
        "bough_wait_seconds_total": 1.0,
        "bough_compute_seconds_total": 3.0,
        "bough_kv_copied_bytes_total": 60,
        "bough_sweeps_total": 2,
        "bough_sweep_tokens_total": 128,
        "bough_link_efficiency": 0.5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_requests_running": 4,
        "vllm:num_requests_waiting": 9,
        "vllm:prefix_cache_queries_total": 90,
        "vllm:prefix_cache_hits_total": 60,
        "bough_kv_bytes": 1000,
        "bough_kv_cached_tokens": 77,
        "bough_kv_evictions_total": 6,
        "vllm:num_preemptions_total": 8,
        'bough_kv_slots{model_name="tiny",state="held"}': 2,
        'bough_kv_slots{model_name="tiny",state="idle"}': 3,
        'bough_kv_used_bytes{model_name="tiny",state="held"}': 250,
        'bough_kv_used_bytes{model_name="tiny",state="idle"}': 300,
    }


def test_without_a_port_there_is_no_server() -> None:
    metrics = Metrics("tiny")
    metrics.serve("127.0.0.1", -1)
    assert metrics.port == -1
    metrics.close()


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took a thread, and kept it for as long as the process lived."""
    monkeypatch.setattr("bough.telemetry.metrics.MAX_SECONDS", 0.2)
    metrics = Metrics("tiny")
    metrics.serve("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", metrics.port), timeout=10) as silent:
            assert silent.recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as reply:
            assert b"bough_sweeps_total" in reply.read()
    finally:
        metrics.close()


def half_a_request(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"GET /metrics HTTP/1.1\r\n")
    return connection


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return bytes(reply.read())


def test_unfinished_requests_are_limited_and_block_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 of them had 120 threads: the port needs no key."""
    monkeypatch.setattr("bough.telemetry.metrics.MAX_CONNECTIONS", 4)
    metrics = Metrics("tiny")
    metrics.serve("127.0.0.1", 0)
    before = threading.active_count()
    halves = [half_a_request(metrics.port) for _ in range(40)]
    try:
        assert b"bough_sweeps_total" in scraped(metrics.port)
        assert [half.recv(1) for half in halves[:36]] == [b""] * 36, "the oldest give way"
        block_until(lambda: threading.active_count() <= before + 4)
    finally:
        for half in halves:
            half.close()
        metrics.close()


def test_a_slowly_sent_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time limit was restarted with every byte."""
    monkeypatch.setattr("bough.telemetry.metrics.MAX_SECONDS", 0.5)
    metrics = Metrics("tiny")
    metrics.serve("127.0.0.1", 0)
    try:
        with half_a_request(metrics.port) as half:
            half.setblocking(False)
            for _ in range(600):
                with suppress(BlockingIOError):
                    try:
                        half.sendall(b"x")
                        assert half.recv(1) == b""
                    except ConnectionError:
                        pass
                    break
                time.sleep(0.05)
            else:
                pytest.fail("it goes on")
    finally:
        metrics.close()
