"""Quantizes matrices to integers, scales and offsets in 4 or 8 bits. Uses no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

GROUP_SIZES = {4: 32, 8: 64}  # inputs that share a scale: 5 and 8.25 bits per weight
SCALE_BYTES = {4: 4, 8: 2}  # per group: scale and offset, or the scale alone
NUM_FITS = 3  # of scale and offset to the integers
RANGE = (1.0,)  # initial grid for the fit: a group's whole range
SHRUNKEN = (1.0, 0.9, 0.8, 0.7)  # smaller initial grids: outliers are clipped, and the rest is rounded more finely


class Layout(NamedTuple):
    """A way to pack a matrix."""

    bits: int
    group_size: int

    @property
    def bits_per_weight(self) -> float:
        """Average including scales and offsets."""
        return self.bits + 8 * SCALE_BYTES[self.bits] / self.group_size


def quantize(
    weight: torch.Tensor, bits: int, group_size: int | None = None, ranges: Sequence[float] = RANGE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a matrix (rows, columns): the integers and scales of `bough_format.Packed`.

    In 4 bits, a group's scale and offset start from each of `ranges` and are then refined a few times by least squares;
    the best fit is taken for each group.
    """
    rows, columns = weight.shape
    fit = _fit(weight, Layout(bits, group_size or GROUP_SIZES[bits]), ranges)
    if bits == 8:
        return fit.integers.to(torch.int8).view(rows, columns), fit.scales.half()[None]
    low, high = fit.integers.to(torch.uint8).chunk(2, dim=2)
    return (low | high << 4).view(rows, columns // 2), torch.stack((fit.scales, fit.offsets)).half()


def rounding_error(weight: torch.Tensor, layout: Layout, ranges: Sequence[float] = RANGE) -> float:
    """Relative squared error of a packed matrix; 0 if the matrix is 0."""
    total = float(weight.float().square().sum())
    return float(_fit(weight, layout, ranges).errors.sum()) / total if total else 0.0


def _fit(weight: torch.Tensor, layout: Layout, ranges: Sequence[float]) -> _RoundedGroups:
    groups = weight.float().view(len(weight), -1, layout.group_size)
    if layout.bits == 8:
        return _RoundedGroups.symmetric(groups)
    lowest, highest = groups.amin(2), groups.amax(2)
    best: _RoundedGroups | None = None
    for part in ranges:
        offsets = _half(lowest + (highest - lowest) * (1 - part) / 2)
        fit = _RoundedGroups.round(groups, _half((highest - lowest) * part / 15), offsets)
        best = fit if best is None else best.better(fit)
        for _ in range(NUM_FITS):
            fit = _RoundedGroups.round(groups, *fit.least_squares(groups))
            best = best.better(fit)
    assert best is not None, "there is at least one range"
    return best


class _RoundedGroups(NamedTuple):
    """Integers (rows, groups, size) for scales and offsets (rows, groups), and their errors."""

    integers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    errors: torch.Tensor  # (rows, groups), sums of squares

    @classmethod
    def symmetric(cls, groups: torch.Tensor) -> _RoundedGroups:
        """8 bits, scaled by the largest value: fitting has no measurable benefit."""
        scales = _half(groups.abs().amax(2) / 127)
        integers = (groups / _or_one(scales)[:, :, None]).round_().clamp_(-127, 127)
        errors = (integers * scales[:, :, None] - groups).square_().sum(2)
        return cls(integers, scales, torch.zeros_like(scales), errors)

    @classmethod
    def round(cls, groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> _RoundedGroups:
        """4 bits, rounded to the nearest."""
        steps = (groups - offsets[:, :, None]) / _or_one(scales)[:, :, None]
        integers = steps.round_().clamp_(0, 15)
        errors = (integers * scales[:, :, None] + offsets[:, :, None] - groups).square_().sum(2)
        return cls(integers, scales, offsets, errors)

    def least_squares(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least-squares scales and offsets for the integers."""
        mean, target = self.integers.mean(2), groups.mean(2)
        spread = self.integers - mean[:, :, None]
        variance = spread.square().sum(2)
        scales = _half((spread * groups).sum(2) / _or_one(variance))
        return scales, _half(target - scales * mean)

    def better(self, other: _RoundedGroups) -> _RoundedGroups:
        """The better fit of each group."""
        is_other = other.errors < self.errors
        return _RoundedGroups(
            torch.where(is_other[:, :, None], other.integers, self.integers),
            *(torch.where(is_other, theirs, mine) for mine, theirs in zip(self[1:], other[1:], strict=True)),
        )


def _or_one(values: torch.Tensor) -> torch.Tensor:
    """Replace 0 by 1, for division."""
    return torch.where(values == 0, 1, values)


def _half(scales: torch.Tensor) -> torch.Tensor:
    """Round to float16, as stored."""
    return scales.half().float()
