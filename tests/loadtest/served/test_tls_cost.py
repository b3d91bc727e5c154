"""What TLS adds is measured on connections that do speak it."""

from __future__ import annotations

from loadtest.served.tls import DOORS, HANDSHAKES, PLAIN, measure, summary


async def test_calls_through_each_door_are_paired() -> None:
    calls, first = await measure(20, seed=1)
    assert {name: len(each) for name, each in calls.items()} == dict.fromkeys((PLAIN, *DOORS), 20)
    assert {len(each) for each in first.values()} == {HANDSHAKES}


def test_what_is_added_is_the_median_of_pairs() -> None:
    calls = {PLAIN: [1e-3, 3e-3, 2e-3], "tls": [1.1e-3, 3.1e-3, 2.1e-3], "mutual": [1.2e-3, 9e-3, 2.2e-3]}
    told = summary(calls, {PLAIN: [0.001]}, round_seconds=0.1, seed=1)
    assert told["plain_us"] == 2000
    assert told["added_us"]["mutual"]["median"] == 200
    assert told["share_of_round"] == 0.004
