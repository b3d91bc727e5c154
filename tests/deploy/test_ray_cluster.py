"""A Ray cluster of three hosts, each a network namespace: nothing is lost when it is disturbed. Takes seven minutes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("ray")

from loadtest.cluster.__main__ import STEPS, has_failed, run_trial
from loadtest.cluster.hosts import missing


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing()), reason="needs root and network namespaces")
async def test_no_token_is_lost_while_hosts_and_replicas_fail_and_return() -> None:
    figures = await run_trial(seed=1)
    assert not has_failed(figures), json.dumps(figures)
    assert figures["placement_is_right"]
    assert figures["http_answer_is_equal"], "through Serve's proxy the text is that of gRPC"
    assert figures["steps_seconds"].keys() == {*STEPS}
    assert figures["streams_finished"] > 10
    assert figures["tokens"] > 400


def test_the_trial_detects_failures() -> None:
    """A verdict that saw nothing would pass everything."""
    good = {
        "placement_is_right": True, "http_answer_is_equal": True, "cuts_were_cuts": True, "failed_streams": {},
        "replicas_stayed": True,
        "hung_streams": 0, "unequal_streams": 0, "lost_tokens": 0, "repeated_tokens": 0,
    }  # fmt: skip
    assert not has_failed(good)
    for name in good:
        bad = 1 if name.endswith(("streams", "tokens")) else False
        assert has_failed({**good, name: bad}), name
