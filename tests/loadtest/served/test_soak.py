"""What a soak takes for a leak."""

from __future__ import annotations

from loadtest.served.soak import SNAPSHOTS, Snapshot, _growth, leaks, tasks_in

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


def test_tasks_are_read_of_the_figures_for_prometheus() -> None:
    assert tasks_in(METRICS) == 37


def test_what_grows_with_time_is_a_leak_and_what_is_in_flight_is_none() -> None:
    """The soak's first line promised tasks, of which nothing was read."""
    for figure in ("tasks", "descriptors", "threads"):
        assert grown(figure, by_minute=0) == []
        (leak,) = grown(figure, by_minute=10)
        assert leak.startswith(f"orchestrator-2: {figure} grew by "), leak
    assert grown("memory_bytes", by_minute=2 * 2**20) == []
    assert len(grown("memory_bytes", by_minute=20 * 2**20)) == 1
