"""What a soak takes for a leak."""

from __future__ import annotations

from loadtest.locust.samples import Sample
from loadtest.served.soak import SNAPSHOTS, Snapshot, Snapshots, _growth, keys_beyond, leaks, tasks_in

METRICS = """
# HELP bough_event_loop_tasks Tasks of the orchestrator's event loop
# TYPE bough_event_loop_tasks gauge
bough_event_loop_tasks{model_name="m"} 37.0
bough_event_loop_tasks_else{model_name="m"} 5.0
"""
SECONDS = 600.0


def grown(figure: str, by_minute: int) -> list[str]:
    """Leaks of an orchestrator of which one figure grows, and moves up and down with what is in flight."""

    def at(moment: float) -> Snapshot:
        figures = {"tasks": 20, "descriptors": 40, "threads": 9, "memory_bytes": 10**8}
        figures[figure] += round(by_minute * moment / 60) + round(moment) % 7
        return {"orchestrator-2": figures, "index": {"keys": 10 + round(moment), "memory_bytes": 10**8}}

    moments = [SECONDS * number / SNAPSHOTS for number in range(1, SNAPSHOTS + 1)]
    return leaks(_growth([(moment, at(moment)) for moment in moments], SECONDS), in_flight=16)


def test_tasks_are_read_from_prometheus_metrics() -> None:
    assert tasks_in(METRICS) == 37


def test_growth_over_time_is_a_leak_and_requests_in_flight_are_not() -> None:
    """The soak's first line promised tasks, of which nothing was read."""
    for figure in ("tasks", "descriptors", "threads"):
        assert grown(figure, by_minute=0) == []
        (leak,) = grown(figure, by_minute=10)
        assert leak.startswith(f"orchestrator-2: {figure} grew by "), leak
    assert grown("memory_bytes", by_minute=2 * 2**20) == []
    assert len(grown("memory_bytes", by_minute=20 * 2**20)) == 1


def test_memory_of_the_index_may_only_grow_with_its_keys() -> None:
    """Nothing of the index could ever fail."""
    assert leaks({"index": {"memory_bytes": 80 * 2**20, "keys": 20_000}}) == []
    (leak,) = leaks({"index": {"memory_bytes": 80 * 2**20, "keys": 0}})
    assert leak.startswith("index: memory_bytes grew by ")
    assert leaks({"index": {"memory_bytes": 100 * 2**20, "keys": 20_000}})
    (leak,) = leaks({"index": {"descriptors": 40}}, in_flight=16)
    assert leak == "index: descriptors grew by 40"


def indexed(seconds: int, left: int = 0, stays: float = 600.0) -> list[str]:
    """What is found where ten requests a second leave three keys each for `stays` seconds, and `left` for good."""
    began = 1000.0
    samples = [Sample("grpc", began=began + number / 10, seconds=0.5) for number in range(10 * seconds)]

    def keys(moment: float) -> int:
        ended = [moment - number / 10 - 0.5 for number in range(round(10 * moment))]
        return 8 + sum(3 * (age < stays) + left for age in ended)

    moments = [float(seconds * number / 10) for number in range(1, 11)]
    snapshots: Snapshots = [(moment, {"index": {"keys": keys(moment)}}) for moment in moments]
    return keys_beyond(snapshots, samples, began)


def test_keys_belong_to_requests_that_can_be_resumed() -> None:
    """Keys of finished requests stay for ten minutes, so only a longer soak reveals those that stay longer."""
    assert indexed(seconds=600) == indexed(seconds=1500) == []
    (leak,) = indexed(seconds=1500, stays=3600.0)
    assert leak.startswith("index: 45008 keys at 1500 s"), leak
    assert indexed(seconds=600, stays=3600.0) == []
    assert indexed(seconds=1500, left=1)
    assert indexed(seconds=300, left=1), "a key too many of each request shows at once"
    assert keys_beyond([], [], 0.0) == []


def test_a_soak_too_short_to_detect_growth_does_not_pass() -> None:
    (leak,) = leaks(_growth([], SECONDS))
    assert "too short" in leak
