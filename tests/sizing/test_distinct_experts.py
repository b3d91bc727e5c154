"""Distinct experts by rows, and what a sweep of them takes, learnt from sweeps of other sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from bough.sizing.distinct_experts import OVERLAPS, DistinctExperts, Mixture, distinct_share
from bough.sizing.sweep_times import SweepTimes, grid

MOST = 512
MIXTURE = Mixture(num_experts=64, num_chosen=4)
FEW_ROWS = (2, 3, 4, 5, 8)
NUM_LAYERS = 24


class Router:
    """A text's rows, whose k of the experts in each layer are the highest of the layer's biases plus noise."""

    def __init__(self, seed: int, bias: float) -> None:
        self._random = np.random.default_rng(seed)
        self._biases = bias * self._random.normal(size=(NUM_LAYERS, 1, MIXTURE.num_experts))

    def ratio(self, num_rows: int) -> float:
        """Distinct experts of so many rows, over those of one."""
        scores = self._biases + self._random.gumbel(size=(NUM_LAYERS, num_rows, MIXTURE.num_experts))
        chosen: NDArray[np.int64] = np.argsort(-scores, axis=-1)[:, :, : MIXTURE.num_chosen]
        distinct = sum(len(np.unique(layer)) for layer in chosen)
        return distinct / (NUM_LAYERS * MIXTURE.num_chosen)


def learnt(router: Router, sizes: list[int]) -> DistinctExperts:
    experts = DistinctExperts(MIXTURE, grid(1, MOST))
    for size in sizes:
        experts.observe(size, router.ratio(size))
    return experts


def test_rows_without_overlap_choose_independently() -> None:
    shares = distinct_share(4 / 64, [1, 2, 256])
    assert shares == pytest.approx([1 / 16, 1 - (15 / 16) ** 2, 1 - (15 / 16) ** 256])
    assert distinct_share(4 / 64, [1, 2, 256], 1e-9) == pytest.approx(shares, rel=1e-6), "and nearly so with hardly any"


@pytest.mark.parametrize("overlap", [0.1, 0.5, 0.9])
def test_an_overlap_is_the_correlation_of_two_rows_choices(overlap: float) -> None:
    one, two, many = distinct_share(0.25, [1, 2, 400], overlap)
    both = 2 * one - two  # probability that both rows choose an expert
    assert one == pytest.approx(0.25)
    assert (both - one * one) / (one * (1 - one)) == pytest.approx(overlap)
    assert two < many < 1


def test_shares_are_those_of_experts_with_probabilities_of_a_beta_distribution() -> None:
    share, overlap = 0.125, 0.3
    scale = (1 - overlap) / overlap
    probabilities = np.random.default_rng(0).beta(share * scale, (1 - share) * scale, 400_000)
    for rows in (2, 5, 40):
        drawn = float(np.mean(1 - (1 - probabilities) ** rows))
        assert distinct_share(share, rows, overlap) == pytest.approx(drawn, rel=0.01)  # 6 standard errors


@pytest.mark.parametrize("bias", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("sizes", [[48], [200, 1, 1], [16, 64, 24]])
def test_few_rows_are_predicted_from_sweeps_of_many(bias: float, sizes: list[int]) -> None:
    """These texts' probabilities have no beta distribution; independent choices may be wrong by 0.6."""
    router, unknown = Router(1, bias), learnt(Router(1, bias), [])
    experts = learnt(router, sizes)
    for size in FEW_ROWS:
        true = np.mean([router.ratio(size) for _ in range(8)])
        error, before = (abs(math.log(each.at(size) / true)) for each in (experts, unknown))
        assert error < 0.25, size
        assert error < 0.5 * before + 0.02, size


def test_before_the_first_sweep_choices_are_independent() -> None:
    experts = learnt(Router(0, 2.0), [1, 1])
    assert experts.overlap == 0.0, "one row says nothing"
    assert experts.at(4) == pytest.approx(16 * (1 - (15 / 16) ** 4))


@pytest.mark.parametrize("ratio", [0.0, 0.5, 4.1, 17.0, math.nan, math.inf, -1.0])
def test_impossible_counts_are_ignored(ratio: float) -> None:
    """None, fewer than one row's, more than four rows can choose, more than there are, and no numbers."""
    experts = learnt(Router(0, 2.0), [48])
    before = experts.overlap
    for _ in range(100):
        experts.observe(4, ratio)
    experts.observe(400, 16.1)
    assert experts.overlap == before > 0


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(72, 10), (64, 4)])
def test_sweeps_that_choose_all_experts_count(num_experts: int, num_chosen: int) -> None:
    """1 / (10 / 72) is less than 7.2."""
    experts = DistinctExperts(Mixture(num_experts, num_chosen), grid(1, MOST))
    experts.observe(8, 1.5)
    before = experts.overlap
    experts.observe(MOST, num_experts / num_chosen)
    assert experts.overlap < before


def test_a_model_whose_rows_choose_all_experts_is_like_a_dense_one() -> None:
    experts = DistinctExperts(Mixture(4, 4), grid(1, MOST))
    experts.observe(8, 1.0)
    assert experts.ratios == pytest.approx(1.0)


def test_texts_that_change_are_followed() -> None:
    experts = learnt(Router(0, 0.0), [24] * 64)
    assert experts.overlap < 0.1
    other = Router(0, 2.0)
    for _ in range(64):
        experts.observe(24, other.ratio(24))
    assert experts.overlap == pytest.approx(learnt(other, [24] * 64).overlap, abs=2 * OVERLAPS[1])


PARTS = np.array((0.02, 0.01, 0.0005))  # seconds: fixed, one row's experts, a row


@pytest.mark.parametrize("parts", [PARTS, PARTS * (4, 1, 1), PARTS * (0.2, 1, 4), PARTS * (1, 1, 0)], ids=str)
def test_seconds_are_divided_among_experts_rows_and_the_rest(parts: NDArray[np.float64]) -> None:
    router = Router(2, 1.5)
    experts = learnt(router, [8, 64] * 8)
    true = experts.seconds(parts)
    sizes = np.array((1.0, 24.0, 200.0))
    found = experts.fitted_parts(sizes, np.interp(sizes, grid(1, MOST), true), np.full(3, 8.0))
    assert (found >= 0).all()
    assert experts.seconds(found)[:8] == pytest.approx(true[:8], rel=0.15)


def test_no_part_takes_less_than_no_time() -> None:
    experts = learnt(Router(2, 1.5), [8])
    found = experts.fitted_parts(np.array((1.0, 64.0)), np.array((1.0, 1.01)), np.full(2, 32.0))
    assert (found >= 0).all()
    assert experts.seconds(found)[0] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("seen", [[48, 1, 1, 64], [200, 1, 24, 24], [1, 48, 16, 32]])
@pytest.mark.parametrize("bias", [1.0, 2.0])
def test_sweeps_of_few_rows_are_predicted_from_other_sizes(bias: float, seen: list[int]) -> None:
    """By the dense models' shape, between sizes that were seen, trees of two to five nodes would seem to pay less."""
    router, noise = Router(3, bias), np.random.default_rng(4)

    def seconds(rows: int, ratio: float) -> float:
        return float(PARTS @ (1, ratio, rows))

    mixed, dense = SweepTimes(1, MOST, mixture=MIXTURE), SweepTimes(1, MOST)
    for rows in seen * 3:
        ratio = router.ratio(rows)
        spent = seconds(rows, ratio) * float(np.exp(noise.normal(0, 0.03)))
        mixed.observe(rows, spent, expert_ratio=ratio)
        dense.observe(rows, spent, expert_ratio=ratio)
    errors = {}
    for name, times in (("mixed", mixed), ("dense", dense)):
        curve = times.curve()
        assert curve is not None
        curve.validate("cost")
        true = [seconds(rows, np.mean([router.ratio(rows) for _ in range(8)])) for rows in FEW_ROWS]
        errors[name] = max(abs(math.log(curve(rows) / each)) for rows, each in zip(FEW_ROWS, true, strict=True))
    assert errors["mixed"] < 0.1
    assert errors["mixed"] < errors["dense"]


def test_counted_experts_change_nothing_of_dense_models() -> None:
    counted, plain = SweepTimes(8, MOST), SweepTimes(8, MOST)
    for rows in (40, 1, 1, 24, 300, 24):
        counted.observe(rows, 0.1 + rows / 300, 0.01, 1000, expert_ratio=2.0)
        plain.observe(rows, 0.1 + rows / 300, 0.01, 1000)
    assert counted.curve() == plain.curve()
    assert counted.expert_ratio(4) == 0.0


def test_bytes_of_experts_follow_the_rows_that_choose_them() -> None:
    """Four of 64 experts a row: a row reads a sixteenth of them, many rows nearly all."""
    experts = DistinctExperts(Mixture(64, 4, fixed_bytes=1000, expert_bytes=64_000), grid(1, MOST))
    num_bytes = dict(zip(grid(1, MOST).tolist(), experts.link_bytes(), strict=True))
    assert num_bytes[1] == pytest.approx(1000 + 4000)
    assert num_bytes[2] == pytest.approx(1000 + 64_000 * (1 - (60 / 64) ** 2))
    assert 64_900 < num_bytes[256] <= 65_000


def test_times_of_experts_over_a_link_are_predicted_for_sizes_without_samples() -> None:
    """The shape of bytes is expected, and one sweep shows the link's speed: the other times follow."""
    mixture, router = Mixture(64, 4, 1000, 64_000), Router(5, 1.5)
    times = SweepTimes(1, MOST, mixture=mixture)

    def num_bytes(rows: int) -> float:
        return 1000 + 4000 * router.ratio(rows)

    for _ in range(4):
        ratio = router.ratio(16)
        crossed = 1000 + 4000 * ratio
        times.observe(16, 0.01 * crossed, 0.009 * crossed, round(crossed), ratio)
    curve = times.curve()
    assert curve is not None
    for rows in (1, 4, 64):
        assert curve(rows) == pytest.approx(0.01 * np.mean([num_bytes(rows) for _ in range(8)]), rel=0.12)
    assert times.expert_ratio(16) == pytest.approx(router.ratio(16), rel=0.1)
