"""Checks that a row's products in a large layer have the same bits at any place; part of `loadtest.gpu`.

A library chooses how it multiplies by the shapes of a product, and all products of a sweep have one number of rows. So
a row's result should be the same at any place and beside any neighbours; a product that is cut along its sums among
processors (stream-K) could round otherwise from one place to another. Other row counts are told for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

OTHER_COUNTS = (1, 64)


def layer_bits(
    device: torch.device, matrices: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype
) -> dict[str, Any]:
    """For matrices (outputs, inputs) and `rows` rows, the number of places at which a row has the same bits."""
    generator = torch.Generator(device).manual_seed(0)
    places, equal, compared, others = _places(rows), 0, 0, dict.fromkeys(OTHER_COUNTS, True)
    for outputs, inputs in matrices:
        weight = torch.randn((outputs, inputs), generator=generator, device=device, dtype=dtype)
        row = torch.randn((1, inputs), generator=generator, device=device, dtype=dtype)
        first: torch.Tensor | None = None
        for place in places:
            batch = torch.randn((rows, inputs), generator=generator, device=device, dtype=dtype)
            batch[place] = row[0]
            found = torch.nn.functional.linear(batch, weight)[place]
            first = found if first is None else first
            compared, equal = compared + 1, equal + int(torch.equal(found, first))
        for count in OTHER_COUNTS:
            alone = torch.nn.functional.linear(row.expand(count, -1).contiguous(), weight)[0]
            assert first is not None
            others[count] &= torch.equal(alone, first)
        del weight
    return {"rows": rows, "compared": compared, "equal": equal, "equal_at_other_counts": others}


def _places(rows: int) -> list[int]:
    """Places to compare: both ends, and the borders of tiles of several sizes."""
    return sorted(
        {0, 1, rows // 2 - 1, rows // 2, rows - 1} | {border for border in (15, 16, 63, 64, 127, 128) if border < rows}
    )
