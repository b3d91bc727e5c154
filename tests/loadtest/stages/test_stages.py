"""Figures of a benchmark of two hosts follow from its runs, and its relay delays only the host that it should."""

from __future__ import annotations

import socket
import time
from threading import Thread

import pytest

from loadtest.stages.__main__ import has_failed
from loadtest.stages.relay import relayed
from loadtest.stages.speed import FAST, ONE_HOST, PLAIN, SELF, SLOW, Run, figures

RUNS = {
    (FAST, SELF): [Run(0.1, 8, [1, 2, 3]), Run(0.2, 10, [4, 5, 6])],
    (FAST, PLAIN): [Run(0.2, 1, [1, 2]), Run(0.4, 1, [4, 5])],
    (SLOW, SELF): [Run(0.2, 20, [1, 2, 3]), Run(0.2, 20, [4, 5, 6])],
    (SLOW, PLAIN): [Run(0.1, 1, [1, 2]), Run(0.1, 1, [4, 5])],
    (ONE_HOST, SELF): [Run(0.4, 60, [1, 2, 3]), Run(0.8, 60, [4, 5, 6])],
}


def test_ratios_are_of_answers_to_the_same_prompt() -> None:
    found = figures(RUNS)
    assert found["two_hosts_over_one"] == 4
    assert found["nodes"] == {FAST: 9, SLOW: 20, ONE_HOST: 60}
    assert found["self_sized_over_plain"] == {FAST: 2, SLOW: 0.5}
    assert found["unequal_answers"] == 0


def test_an_answer_that_differs_from_plain_decoding_is_counted() -> None:
    runs = {**RUNS, (ONE_HOST, SELF): [Run(0.4, 60, [1, 7, 3]), Run(0.8, 60, [4, 5, 6])]}
    assert figures(runs)["unequal_answers"] == 1


@pytest.mark.parametrize(
    ("found", "is_failure"),
    [
        ({"lost_tokens": 0, "hung_streams": 0, "self_sized_over_plain": {FAST: 1.2}}, False),
        ({"hung_streams": 1}, True),
        ({"failed_streams": {"Unavailable": 1}}, True),
        ({"self_sized_over_plain": {FAST: 1.2, SLOW: 0.9}}, True),
    ],
)
def test_a_lost_token_or_a_slower_tree_is_a_failure(found: dict[str, object], is_failure: bool) -> None:
    assert has_failed(found) == is_failure


def test_a_relay_delays_both_directions_of_the_slow_host_alone() -> None:
    def seconds(slow: str) -> float:
        server = socket.create_server(("127.0.0.1", 0))

        def echo() -> None:
            connection, _ = server.accept()
            while data := connection.recv(100):
                connection.sendall(data)
            server.close()
            connection.close()

        thread = Thread(target=echo)
        thread.start()
        port = relayed("127.0.0.1", server.getsockname()[:2], 0.2, slow)
        with socket.create_connection(("127.0.0.1", port)) as client:
            began = time.monotonic()
            client.sendall(b"tree")
            assert client.recv(100) == b"tree"
            taken = time.monotonic() - began
        thread.join()  # the end of a connection passes, too
        return taken

    assert seconds("127.0.0.1") >= 0.4
    assert seconds("127.0.0.2") < 0.4
