"""What is learnt of sweeps and draft steps, from synthetic ones whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.cost_curve import CostCurve
from bough.sizing.sweep_times import SweepTimes

MOST = 1024
Rows = Callable[[np.random.Generator, int], int]


def any_rows(random: np.random.Generator, _: int) -> int:
    return int(2 ** random.uniform(0, 9))


class Machine:
    """Sweeps of max(link, fixed + row * rows) seconds, each part with noise of a tenth, and with outliers."""

    def __init__(self, seed: int, link: float, fixed: float, row: float, outliers: float = 0.02) -> None:
        self.random = np.random.default_rng(seed)
        self.link, self.fixed, self.row, self.outliers = link, fixed, row, outliers
        self.seen: list[int] = []

    def seconds(self, rows: int) -> float:
        return max(self.link, self.fixed + self.row * rows)

    def sweep(self, times: SweepTimes, rows: int, step: int = 1) -> None:
        compute = (self.fixed + self.row * (-(-rows // step) * step)) * self._noise()
        if self.random.random() < self.outliers:
            compute *= 4.0
        total = max(self.link * self._noise(), compute)
        times.observe(rows, total, total - compute, 1000 if self.link else 0)
        self.seen.append(rows)

    def _noise(self) -> float:
        return float(np.exp(self.random.normal(0, 0.1)))


def after(machine: Machine, num: int, rows: Rows = any_rows, step: int = 1) -> SweepTimes:
    times = SweepTimes(step, MOST)
    for number in range(num):
        machine.sweep(times, rows(machine.random, number), step)
    return times


def check_curve(times: SweepTimes) -> CostCurve:
    curve = times.curve()
    assert curve is not None
    curve.validate("cost")
    return curve


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("link", "fixed", "row", "step"),
    [(1.0, 0.1, 0.005, 1), (0.0, 0.1, 0.005, 1), (0.5, 0.01, 0.004, 1), (4.0, 0.13, 0.0041, 8), (0.2, 0.1, 0.002, 128)],
)
def test_sweep_times_are_learnt_from_measurements(seed: int, link: float, fixed: float, row: float, step: int) -> None:
    machine = Machine(seed, link, fixed, row)
    curve = check_curve(after(machine, 300, step=step))
    for rows in set(machine.seen):
        assert curve(rows) == pytest.approx(machine.seconds(-(-rows // step) * step), rel=0.07)
    errors = [curve(rows) / machine.seconds(-(-rows // step) * step) - 1 for rows in machine.seen]
    assert abs(np.mean(errors)) < 0.04


def test_the_knee_is_where_computing_takes_longer_than_the_link() -> None:
    assert after(Machine(0, 1.0, 0.1, 0.005), 300).knee == pytest.approx(180, rel=0.1)
    assert after(Machine(0, 0.0, 0.1, 0.005), 300).knee == math.inf, "nothing crosses a link"
    assert after(Machine(0, 0.5, 1.0, 0.005), 300).knee == math.inf, "no sweep has ever waited"
    assert after(Machine(0, 50.0, 0.1, 0.005), 300).knee == math.inf, "nor does any take longer than the link"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [lambda *_: 64, any_rows])
@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_change_of_the_link_is_followed_within_five_sweeps(seed: int, rows: Rows, times: float) -> None:
    machine = Machine(seed, 3.0, 0.1, 0.001, outliers=0.0)
    learnt = after(machine, 60, rows)
    machine.link *= times
    for number in range(5):
        machine.sweep(learnt, rows(machine.random, number))
    assert check_curve(learnt)(64) == pytest.approx(machine.seconds(64), rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_core_is_noticed_at_all_rows(seed: int) -> None:
    machine = Machine(seed, 0.2, 0.1, 0.005, outliers=0.0)
    learnt = after(machine, 60, lambda _, number: [1, 40, 64, 300][number % 4])
    machine.fixed, machine.row = 2 * machine.fixed, 2 * machine.row
    for _ in range(5):
        machine.sweep(learnt, 64)
    for rows in (40, 64, 300):
        assert check_curve(learnt)(rows) == pytest.approx(machine.seconds(rows), rel=0.15)


@pytest.mark.parametrize("num_before", [5, 40])
def test_a_clear_change_is_followed_after_two_sweeps_in_both_directions(num_before: int) -> None:
    """Also soon after the start, when a step's residuals could pass for what is usual."""
    times = SweepTimes(1, MOST)
    for number in range(num_before):
        times.observe(8, 1.0 + 0.02 * (number % 3), 0.0)
    for seconds in (2.0, 1.0):
        for factor in (1.0, 1.05):
            times.observe(8, factor * seconds, 0.0)
        assert check_curve(times)(8) == pytest.approx(seconds, rel=0.15), seconds


def test_successive_outliers_change_little() -> None:
    machine = Machine(0, 1.0, 0.1, 0.001, outliers=0.0)
    learnt = after(machine, 60)
    before = check_curve(learnt)(64)
    for seconds in (5.0, 17.0, 9.0):
        learnt.observe(64, seconds, seconds - 0.2, 1000)
    assert check_curve(learnt)(64) == pytest.approx(before, rel=0.1)


def test_sweeps_limited_by_computing_do_not_make_the_link_look_slow() -> None:
    """Trees once grew and grew: each sweep took longer than the last, and so the link seemed to."""
    machine = Machine(0, 1.0, 0.1, 0.005)
    learnt = after(machine, 60)
    for rows in (400, 600, 800, 1000) * 50:
        machine.sweep(learnt, rows)
    assert check_curve(learnt)(1) == pytest.approx(1.0, rel=0.1)
    assert learnt.knee == pytest.approx(180, rel=0.15)
    alone = SweepTimes(1, MOST)
    for rows in (400, 600, 800, 1000) * 10:
        machine.sweep(alone, rows)
    assert check_curve(alone)(1) < check_curve(alone)(400), "of the link nothing is known, and nothing made up"
    assert alone.knee == math.inf


def test_a_link_that_became_faster_than_computing_is_not_overestimated() -> None:
    machine = Machine(0, 3.0, 0.1, 0.02, outliers=0.0)
    learnt = after(machine, 60)
    machine.link = 0.1
    for _ in range(5):
        machine.sweep(learnt, 64)
    assert check_curve(learnt)(1) < 1.7


def test_one_sweep_of_one_row_does_not_change_the_knee() -> None:
    """A knee of 7 rows was once derived from it, of 190 in truth."""
    prior = CostCurve((1, 257), (0.1, 1.1))
    learnt = SweepTimes(1, MOST, prior)
    assert check_curve(learnt)(257) == pytest.approx(1.1), "what is given"
    learnt.observe(1, 1.0, 0.8, 1000)
    curve = check_curve(learnt)
    assert curve(1) == pytest.approx(1.0), "the link's"
    assert 100 < learnt.knee < 240
    assumed = SweepTimes(1, MOST)
    assert assumed.curve() is None
    assumed.observe(1, 1.0, 0.87, 1000)
    assert 150 < assumed.knee < 300


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_a_scale_measured_at_a_bad_moment_is_corrected_after_two_sweeps(error: float) -> None:
    """A start while other programs ran once made sweeps seem twice as long for most of an answer."""
    machine = Machine(0, 0.0, 0.1, 0.005, outliers=0.0)
    given = CostCurve((1, 257), (error * machine.seconds(1), error * machine.seconds(257)))
    learnt = SweepTimes(1, MOST, given)
    for _ in range(2):
        machine.sweep(learnt, 16)
    for rows in (8, 16, 64):
        assert check_curve(learnt)(rows) == pytest.approx(machine.seconds(rows), rel=0.2)


def test_trees_shrink_until_a_sweep_waits_if_the_link_was_underestimated() -> None:
    """Trees of the assumed knee compute for as long as the link seemed to take, which says nothing of the link."""
    machine = Machine(0, 1.0, 0.1, 0.01, outliers=0.0)
    given = CostCurve((1, 257), (machine.fixed + machine.row, machine.fixed + 257 * machine.row))
    learnt = SweepTimes(1, MOST, given, 1000, 1.5)
    assert learnt.knee == pytest.approx(140, rel=0.05)
    for _ in range(12):
        machine.sweep(learnt, round(learnt.knee))
    assert learnt.knee == pytest.approx(90, rel=0.15)
    assert check_curve(learnt)(1) == pytest.approx(1.0, rel=0.1)


def test_few_row_counts_rescale_the_given_curve_and_keep_its_shape() -> None:
    prior = CostCurve((1, 65, 129), (0.1, 0.1, 0.2))
    learnt = SweepTimes(1, MOST, prior)
    for _ in range(20):
        learnt.observe(1, 0.3, 0.0)
    curve = check_curve(learnt)
    assert [curve(rows) for rows in (1, 64, 129)] == pytest.approx([0.3, 0.3, 0.6], rel=0.05)


def test_a_link_measured_before_the_first_sweep_is_used_until_sweeps_correct_it() -> None:
    learnt = SweepTimes(1, MOST, CostCurve((1, 257), (0.1, 1.1)), 1000, 2.0)
    assert (check_curve(learnt)(1), learnt.knee) == (pytest.approx(2.0), pytest.approx(487, rel=0.03))
    for _ in range(8):
        learnt.observe(64, 0.8, 0.45, 1000)
    assert check_curve(learnt)(1) == pytest.approx(0.8, rel=0.1)


def test_a_link_that_looked_slow_at_a_start_is_corrected_by_the_first_sweep_that_waits() -> None:
    """Processes that start together share the link: it once looked four times slower for ten rounds."""
    learnt = SweepTimes(1, MOST, CostCurve((1, 257), (0.1, 1.1)), 1000, 4.0)
    learnt.observe(32, 0.9, 0.3, 1000)
    assert check_curve(learnt)(1) == pytest.approx(0.9)
    learnt.observe(257, 1.3, 0.0, 1000)
    assert check_curve(learnt)(1) == pytest.approx(0.9), "a sweep that computed for longer says nothing"


def test_a_link_that_looked_slow_at_a_start_is_corrected_by_shorter_sweeps_that_compute() -> None:
    """Sizes at the knee of a link that looks slow compute for as long as the link is thought to take."""
    machine = Machine(0, 0.9, 0.1, 0.005, outliers=0.0)
    learnt = SweepTimes(1, MOST, CostCurve((1, 257), (0.1, 1.4)), 1000, 4.0)
    for _ in range(6):
        machine.sweep(learnt, min(512, int(learnt.knee)))
    assert check_curve(learnt)(1) == pytest.approx(0.9, rel=0.2)
    honest = SweepTimes(1, MOST, CostCurve((1, 257), (0.1, 1.4)), 1000, 0.9)
    honest.observe(257, 1.5, 0.0, 1000)
    assert check_curve(honest)(1) == pytest.approx(0.9), "a longer sweep disproves nothing"


def test_chosen_experts_increase_the_links_time() -> None:
    """All sweeps wait; the bytes, and so the seconds, grow with the rows, and one step of the link moves all."""
    learnt, random = SweepTimes(1, 512), np.random.default_rng(0)

    def sweep(rows: int, byte_seconds: float) -> None:
        num_bytes = int(1e6 * (1 - 0.9**rows))
        total = num_bytes * byte_seconds * float(np.exp(random.normal(0, 0.05)))
        learnt.observe(rows, total, 0.7 * total, num_bytes)

    for number in range(200):
        sweep([1, 2, 4, 8, 20, 60][number % 6], 1e-6)
    curve = check_curve(learnt)
    for rows in (1, 4, 8, 20, 60):
        assert curve(rows) == pytest.approx(1 - 0.9**rows, rel=0.12)
    for _ in range(5):
        sweep(8, 3e-6)
    assert check_curve(learnt)(60) == pytest.approx(3.0, rel=0.2)


anything = st.tuples(
    st.integers(1, 4000),
    st.floats(1e-6, 1e4),
    st.floats(0.0, 1.0),
    st.integers(0, 1 << 40),
)


@given(st.lists(anything, min_size=1, max_size=40), st.sampled_from([1, 8, 128]), st.booleans())
def test_any_samples_give_a_valid_curve(
    sweeps: list[tuple[int, float, float, int]], step: int, has_prior: bool
) -> None:
    times = SweepTimes(step, MOST, *((CostCurve((1, 100), (0.1, 0.5), step), 10, 2.0) if has_prior else ()))
    steps = SweepTimes(1, 64)
    for rows, total, waited, num_bytes in sweeps:
        times.observe(rows, total, waited * total, num_bytes)
        steps.observe(rows, total)
        check_curve(times)
        check_curve(steps)


def test_invalid_sweeps_are_ignored() -> None:
    times, steps = SweepTimes(1, MOST), SweepTimes(1, 64)
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, -1.0)):
        times.observe(rows, seconds, 0.0)
        steps.observe(rows, seconds)
    assert (times.curve(), steps.curve()) == (None, None)


def test_draft_steps_are_learnt_by_their_rows() -> None:
    steps, random = SweepTimes(1, 64), np.random.default_rng(0)
    for number in range(200):
        rows = [1, 2, 8, 16][number % 4]
        steps.observe(rows, (0.01 + 0.0004 * rows) * float(np.exp(random.normal(0, 0.1))))
    curve = check_curve(steps)
    for rows in (1, 2, 8, 16):
        assert curve(rows) == pytest.approx(0.01 + 0.0004 * rows, rel=0.06)
