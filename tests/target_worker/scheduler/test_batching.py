"""The calls of a sweep: none starves, trees come before prompts, and equal prefixes are computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.prefix_hash import common_length, whole_blocks
from target_worker.kv.slot_index import Text
from target_worker.scheduler.batching import Part, choose
from target_worker.scheduler.prefix_sharing import choose_shared

ROOM, MAX_NODES, ROWS = 64, 24, 8


@dataclass(eq=False)
class Call:
    """A call with nothing behind it."""

    text: Text
    num_nodes: int = 1
    num_cached: int = 0
    num_in_sweep: int = 0
    num_sweeps_skipped: int = 0
    sweeps: list[int] = field(default_factory=list)  # of which it had a part
    answered: int | None = None

    @property
    def num_remaining(self) -> int:
        return len(self.text.tokens) - self.num_cached


def prompt(num_tokens: int, num_nodes: int = 1, start: int = 0) -> Call:
    """All different, unless they have a common prefix."""
    return Call(Text([*range(start, start + num_tokens)]), num_nodes)


Chooser = Callable[[list[Call]], list[Part[Call]]]


def plainly(calls: list[Call]) -> list[Part[Call]]:
    return choose(calls, ROOM, inf)


def linear(num_tokens: int) -> float:
    """Seconds of a sweep where products take their time, and the link at least ten."""
    return max(10.0, -(-num_tokens // ROWS) * 1.0)


def sharing(calls: list[Call]) -> Chooser:
    """As the engine does: copying what any of all these holds, then choosing."""

    def chooser(waiting: list[Call]) -> list[Part[Call]]:
        for call in waiting:
            common = ((common_length(call.text.tokens, other.text.tokens), other.num_cached) for other in calls)
            shared = (whole_blocks(min(lengths)) for lengths in common)
            call.num_cached = max(call.num_cached, *shared)
        return choose_shared(waiting, ROOM, inf, ROWS, linear)

    return chooser


def run(calls: list[Call], chooser: Chooser, num_sweeps: int = 10_000) -> int:
    """Sweeps until all are answered; the number of tokens in them."""
    num_tokens = 0
    for number in range(num_sweeps):
        waiting = [call for call in calls if call.answered is None]
        if not waiting:
            break
        parts = chooser(waiting)
        assert parts, "a sweep without parts"
        assert sum(part.num_tokens for part in parts) <= ROOM
        assert len({id(part.job) for part in parts}) == len(parts)
        for call in waiting:
            call.num_sweeps_skipped += 1
        for part in parts:
            call = part.job
            num_tokens += part.num_tokens
            assert 0 <= part.num_context <= call.num_remaining
            assert not part.has_tree or part.num_context == call.num_remaining
            assert part.num_tokens, "a part of nothing"
            call.num_cached += part.num_context
            call.num_sweeps_skipped = 0
            call.sweeps.append(number)
            call.answered = number if part.has_tree else None
    return num_tokens


knees = st.sampled_from([inf, 40.0, 20.0, 0.5])
sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(1, MAX_NODES)), min_size=1, max_size=12)


@given(sizes, knees)
def test_every_waiting_call_progresses_within_as_many_sweeps_as_there_are_calls(
    mix: list[tuple[int, int]], knee: float
) -> None:
    calls = [prompt(length, nodes, start=1000 * n) for n, (length, nodes) in enumerate(mix)]
    num_tokens = run(calls, lambda waiting: choose(waiting, ROOM, knee))
    assert num_tokens == sum(length + nodes for length, nodes in mix)
    for call in calls:
        gaps = [after - before for before, after in zip([-1, *call.sweeps], call.sweeps, strict=False)]
        assert max(gaps) <= len(calls)


@given(st.lists(st.integers(1, MAX_NODES), min_size=1, max_size=10), st.lists(st.integers(1, 400), max_size=4), knees)
def test_no_call_starves_while_others_keep_coming(trees: list[int], prompts: list[int], knee: float) -> None:
    """Sessions that decode without end, and prompts among them: a fixed order once kept the last ones out for good."""
    decoding = [Call(Text([]), nodes) for nodes in trees]
    calls = [*decoding, *(prompt(length) for length in prompts)]
    last = dict.fromkeys(map(id, calls), 0)
    order = list(calls)
    for number in range(1, 200):
        parts = choose(order, ROOM, knee)
        for call in order:
            call.num_sweeps_skipped += 1
        for part in parts:
            part.job.num_sweeps_skipped = 0
            part.job.num_cached += part.num_context
            last[id(part.job)] = number
            order.remove(part.job)  # comes again as the youngest
            if not part.has_tree or (not part.num_context and part.job in decoding):
                order.append(part.job)
        assert all(number - last[id(call)] <= len(calls) for call in order)


@given(sizes, knees)
def test_a_sweep_has_at_most_so_many_nodes(mix: list[tuple[int, int]], knee: float) -> None:
    """Only they have logits; a tree behind its context counts as well, and no call waits for longer."""
    calls = [prompt(length, nodes, start=1000 * n) for n, (length, nodes) in enumerate(mix)]

    def chosen(waiting: list[Call]) -> list[Part[Call]]:
        parts = choose(waiting, ROOM, knee, MAX_NODES)
        assert sum(part.job.num_nodes for part in parts if part.has_tree) <= MAX_NODES
        return parts

    run(calls, chosen)
    for call in calls:
        gaps = [after - before for before, after in zip([-1, *call.sweeps], call.sweeps, strict=False)]
        assert max(gaps) <= len(calls)


def test_a_tree_comes_before_a_long_prompt_which_gets_the_remaining_rows() -> None:
    long, tree = prompt(1000), Call(Text([]), 24)
    parts = plainly([long, tree])
    assert {id(part.job): part.num_tokens for part in parts} == {id(tree): 24, id(long): 40}


def test_a_prompt_with_running_answers_fills_the_sweep_up_to_the_knee() -> None:
    long, tree = prompt(1000), Call(Text([]), 4)

    def sizes(calls: list[Call], knee: float) -> list[int]:
        return [part.num_tokens for part in choose(calls, ROOM, knee)]

    assert sizes([tree, long], 30.0) == [4, 26]
    assert sizes([tree, long], 3.0) == [4, 4], "past the knee as much as the answers take"
    assert sizes([tree, long], 1000.0) == [4, ROOM - 4]
    assert sizes([long], 30.0) == [ROOM], "nobody waits for an answer but who asked"
    assert sizes([tree, prompt(1000), prompt(1000)], 24.0) == [4, 15, 5], (
        "each has half a share, and the first the rest"
    )


def test_many_trees_leave_a_prompt_its_share() -> None:
    calls = [prompt(1000), *(Call(Text([]), 16) for _ in range(7))]
    (part,) = [part for part in plainly(calls) if part.job is calls[0]]
    assert part.num_context >= ROOM // 8


def test_prompts_are_finished_one_after_another() -> None:
    calls = [prompt(100, start=1000 * n) for n in range(4)]
    run(calls, plainly)
    answered = sorted(call.answered for call in calls if call.answered is not None)
    assert answered[0] <= 2
    assert answered[-1] == -(-4 * 101 // ROOM) - 1, "and the last no later than if all had kept step"


def test_a_shared_prefix_is_computed_once() -> None:
    calls = [Call(Text([*range(32), 1000 + n])) for n in range(8)]
    assert run(calls, sharing(calls)) == 32 + 8 * 2
    assert {call.answered for call in calls[1:]} == {1}


def test_two_calls_that_fit_one_sweep_do_not_wait_if_the_link_is_the_limit() -> None:
    calls = [Call(Text([*range(20), 1000 + n])) for n in range(2)]
    assert run(calls, sharing(calls)) == 2 * 22
    assert {call.answered for call in calls} == {0}


def test_two_calls_that_fit_one_sweep_wait_if_computing_is_the_limit() -> None:
    calls = [Call(Text([*range(40), 1000 + n])) for n in range(2)]

    def slow(waiting: list[Call]) -> list[Part[Call]]:
        return choose_shared(waiting, ROOM, inf, ROWS, lambda num_tokens: num_tokens * 1.0)

    assert [part.job for part in slow(calls)] == calls[:1]


def test_a_short_prefix_is_not_waited_for() -> None:
    calls = [Call(Text([*range(ROWS - 1), *range(1000 * n, 1000 * n + 60)])) for n in range(1, 5)]
    assert len(sharing(calls)(calls)) == 4


families = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 120), st.integers(0, 60), st.integers(1, MAX_NODES)),
    min_size=1,
    max_size=10,
)


@given(families)
def test_sharing_never_increases_work_or_delays_a_call_for_long(mix: list[tuple[int, int, int, int]]) -> None:
    """Texts of three families, each a beginning in common of some length and an end of their own."""

    def calls() -> list[Call]:
        return [
            Call(
                Text([*range(1000 * family, 1000 * family + common), *range(10_000 * (n + 1), 10_000 * (n + 1) + own)]),
                nodes,
            )
            for n, (family, common, own, nodes) in enumerate(mix)
        ]

    alone, together = calls(), calls()
    assert run(together, sharing(together), num_sweeps=1000) <= run(alone, plainly, num_sweeps=1000)
    assert all(call.answered is not None for call in together)


@given(st.integers(2, 10), st.integers(0, 400), st.integers(0, 40), st.integers(1, MAX_NODES))
def test_waiting_for_anothers_work_delays_nobody(num_calls: int, common: int, own: int, nodes: int) -> None:
    """Calls with a common prefix: by sweep times, no later than had each computed all of it."""

    def calls() -> list[Call]:
        return [Call(Text([*range(common), *range(1000 * n, 1000 * n + own)]), nodes) for n in range(1, num_calls + 1)]

    def seconds(some: list[Call], chooser: Chooser) -> float:
        times: list[float] = []

        def timed(waiting: list[Call]) -> list[Part[Call]]:
            parts = chooser(waiting)
            times.append(linear(sum(part.num_tokens for part in parts)))
            return parts

        run(some, timed)
        return sum(times)

    together = calls()
    assert seconds(together, sharing(together)) <= seconds(calls(), plainly)
