"""Which integers, scales and offsets stand for a matrix in 4 or 8 bits. Knows no files."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP_SIZES = {4: 32, 8: 64}  # inputs that share a scale: 5 and 8.25 bits for a weight
SCALE_BYTES = {4: 4, 8: 2}  # of each group: scale and offset, or the scale alone
NUM_FITS = 3  # of scale and offset to the integers


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a matrix (rows, columns): the integers and the scales of `bough.model.packed.Packed`.

    In 4 bits a group's scale and offset begin as its range says, and are then fitted to the integers by least squares a
    few times over; the best of these is taken.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, GROUP_SIZES[bits])
    if bits == 8:
        scales = _half(groups.abs().amax(2) / 127)
        integers = (groups / _or_one(scales)[:, :, None]).round_().clamp_(-127, 127)
        return integers.to(torch.int8).view(rows, columns), scales.half()[None]
    offsets, highest = groups.amin(2), groups.amax(2)
    fit = _Fit.round(groups, _half((highest - offsets) / 15), _half(offsets))
    best = fit
    for _ in range(NUM_FITS):
        fit = _Fit.round(groups, *fit.least_squares(groups))
        best = best.better(fit)
    low, high = best.integers.to(torch.uint8).chunk(2, dim=2)
    return (low | high << 4).view(rows, columns // 2), torch.stack((best.scales, best.offsets)).half()


class _Fit(NamedTuple):
    """Integers (rows, groups, size) for some scales and offsets (rows, groups), and how far off they are."""

    integers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    errors: torch.Tensor  # (rows, groups), squared and summed

    @classmethod
    def round(cls, groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> _Fit:
        """The nearest integers."""
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
