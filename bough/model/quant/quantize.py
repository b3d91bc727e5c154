"""Which integers, scales and offsets stand for a matrix in 4 or 8 bits. Knows no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

GROUP_SIZES = {4: 32, 8: 64}  # inputs that share a scale: 5 and 8.25 bits for a weight
SCALE_BYTES = {4: 4, 8: 2}  # of each group: scale and offset, or the scale alone
NUM_FITS = 3  # of scale and offset to the integers
RANGE = (1.0,)  # a group's whole range, as the grid begins that scales are fitted from
SHRUNKEN = (1.0, 0.9, 0.8, 0.7)  # parts of it: what lies beyond is cut off, and the rest rounded less


class Layout(NamedTuple):
    """How a matrix can be packed."""

    bits: int
    group_size: int

    @property
    def bits_per_weight(self) -> float:
        """Scales and offsets included."""
        return self.bits + 8 * SCALE_BYTES[self.bits] / self.group_size


def quantize(
    weight: torch.Tensor, bits: int, group_size: int | None = None, ranges: Sequence[float] = RANGE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a matrix (rows, columns): the integers and the scales of `bough_format.Packed`.

    In 4 bits a group's scale and offset begin as `ranges` of its own say, each in turn, and are then fitted to the
    integers by least squares a few times over; the best of all these is taken, group by group.
    """
    rows, columns = weight.shape
    fit = _fit(weight, Layout(bits, group_size or GROUP_SIZES[bits]), ranges)
    if bits == 8:
        return fit.integers.to(torch.int8).view(rows, columns), fit.scales.half()[None]
    low, high = fit.integers.to(torch.uint8).chunk(2, dim=2)
    return (low | high << 4).view(rows, columns // 2), torch.stack((fit.scales, fit.offsets)).half()


def rounding_error(weight: torch.Tensor, layout: Layout, ranges: Sequence[float] = RANGE) -> float:
    """The squared error of a packed matrix over the sum of its squares; 0 where all is 0."""
    total = float(weight.float().square().sum())
    return float(_fit(weight, layout, ranges).errors.sum()) / total if total else 0.0


def _fit(weight: torch.Tensor, layout: Layout, ranges: Sequence[float]) -> _Fit:
    groups = weight.float().view(len(weight), -1, layout.group_size)
    if layout.bits == 8:
        return _Fit.symmetric(groups)
    lowest, highest = groups.amin(2), groups.amax(2)
    best: _Fit | None = None
    for part in ranges:
        offsets = _half(lowest + (highest - lowest) * (1 - part) / 2)
        fit = _Fit.round(groups, _half((highest - lowest) * part / 15), offsets)
        best = fit if best is None else best.better(fit)
        for _ in range(NUM_FITS):
            fit = _Fit.round(groups, *fit.least_squares(groups))
            best = best.better(fit)
    assert best is not None, "there is at least one range"
    return best


class _Fit(NamedTuple):
    """Integers (rows, groups, size) for some scales and offsets (rows, groups), and how far off they are."""

    integers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    errors: torch.Tensor  # (rows, groups), squared and summed

    @classmethod
    def symmetric(cls, groups: torch.Tensor) -> _Fit:
        """In 8 bits, by the largest value: fitting it gains nothing that could be measured."""
        scales = _half(groups.abs().amax(2) / 127)
        integers = (groups / _or_one(scales)[:, :, None]).round_().clamp_(-127, 127)
        errors = (integers * scales[:, :, None] - groups).square_().sum(2)
        return cls(integers, scales, torch.zeros_like(scales), errors)

    @classmethod
    def round(cls, groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> _Fit:
        """In 4 bits, the nearest integers."""
        steps = (groups - offsets[:, :, None]) / _or_one(scales)[:, :, None]
        integers = steps.round_().clamp_(0, 15)
        errors = (integers * scales[:, :, None] + offsets[:, :, None] - groups).square_().sum(2)
        return cls(integers, scales, offsets, errors)

    def least_squares(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and offsets that suit the integers best."""
        mean, target = self.integers.mean(2), groups.mean(2)
        spread = self.integers - mean[:, :, None]
        variance = spread.square().sum(2)
        scales = _half((spread * groups).sum(2) / _or_one(variance))
        return scales, _half(target - scales * mean)

    def better(self, other: _Fit) -> _Fit:
        """Of two, group by group."""
        is_other = other.errors < self.errors
        return _Fit(
            torch.where(is_other[:, :, None], other.integers, self.integers),
            *(torch.where(is_other, theirs, mine) for mine, theirs in zip(self[1:], other[1:], strict=True)),
        )


def _or_one(values: torch.Tensor) -> torch.Tensor:
    """To divide by."""
    return torch.where(values == 0, 1, values)


def _half(scales: torch.Tensor) -> torch.Tensor:
    """As they will be stored."""
    return scales.half().float()
