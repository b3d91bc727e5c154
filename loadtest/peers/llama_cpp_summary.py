"""Summaries of `loadtest.peers.llama_cpp`: the best draft length, ratios with intervals, and equality of texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadtest.common.ratios import geometric_mean, ratio

LLAMA_PLAIN, LLAMA_DRAFT, LLAMA_4_BIT = "llama_cpp_plain", "llama_cpp_draft", "llama_cpp_plain_4_bit"
BOUGH_PLAIN, BOUGH = "bough_plain", "bough"
SIDES = (LLAMA_PLAIN, LLAMA_DRAFT, LLAMA_4_BIT, BOUGH_PLAIN, BOUGH)
SAME_WEIGHTS = (LLAMA_PLAIN, LLAMA_DRAFT, BOUGH_PLAIN, BOUGH)  # sides that should give the same texts
RATIOS = {  # pairs of sides, bough's first
    "with_draft": (BOUGH, LLAMA_DRAFT),
    "plain": (BOUGH_PLAIN, LLAMA_PLAIN),
    "over_4_bit": (BOUGH, LLAMA_4_BIT),  # with other weights of fewer bytes
}


class Halves(NamedTuple):
    """Numbers of the prompts for choosing a draft length, and of those for measuring all sides."""

    chosen_on: tuple[int, ...]
    scored_on: tuple[int, ...]


def halves(num_prompts: int) -> Halves:
    """Split prompts alternately; the first one, and the extra one of an odd number, are for measuring.

    Raises:
        ValueError: there are fewer than two.
    """
    if num_prompts < 2:
        raise ValueError(f"prompts: must be at least 2, as half of them choose a draft length, got {num_prompts}")
    return Halves(tuple(range(1, num_prompts, 2)), tuple(range(0, num_prompts, 2)))


def best_length(rates: Mapping[int, Sequence[float]]) -> int:
    """The draft length with the highest geometric mean of tokens per second; the shortest among equals.

    Raises:
        ValueError: there are no lengths, or a length has no rates, or one that is not above 0.
    """
    if not rates:
        raise ValueError("draft lengths: there were none; must be at least one")
    return max(sorted(rates), key=lambda length: geometric_mean(rates[length]))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"median": round(float(middle), 3), "q1": round(float(low), 3), "q3": round(float(high), 3)}


def first_difference(left: Sequence[int], right: Sequence[int], eos_ids: Collection[int]) -> int | None:
    """Position of the first token in which two texts differ; None if they are equal.

    They are compared up to the first end-of-text token: after it bough continues with the model's choice, while
    llama.cpp, told to ignore the end, has chosen another token instead.
    """
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a in eos_ids or b in eos_ids:
            return None
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(
    texts: Mapping[str, Mapping[int, Sequence[int]]], reference: str, eos_ids: Collection[int]
) -> dict[str, dict[int, int]]:
    """Positions of the first difference from the reference, by side and prompt, where there is one."""
    found: dict[str, dict[int, int]] = {}
    for side, by_prompt in texts.items():
        for number, token_ids in by_prompt.items():
            position = first_difference(token_ids, texts[reference][number], eos_ids)
            if position is not None:
                found.setdefault(side, {})[number] = position
    return found


def summary(
    decode: Mapping[str, Sequence[float]], overall: Mapping[str, Sequence[float]], length: int, seed: int
) -> dict[str, Any]:
    """Summary of a regime: tokens per second by side, and bough's ratios to llama.cpp."""
    return {
        "draft_tokens": length,
        "tokens_per_second": {side: spread(decode[side]) for side in SIDES},
        "overall_tokens_per_second": {side: spread(overall[side]) for side in SIDES},
        "ratio": {name: ratio(decode[ours], decode[theirs], seed) for name, (ours, theirs) in RATIOS.items()},
        "overall_ratio": {name: ratio(overall[ours], overall[theirs], seed) for name, (ours, theirs) in RATIOS.items()},
    }
