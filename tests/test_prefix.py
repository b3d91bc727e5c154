"""Names of prefixes: equal for equal beginnings, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bough.prefix import BLOCK_TOKENS, block_hashes

tokens = st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS)


@given(tokens, tokens)
def test_blocks_hash_alike_as_far_as_the_tokens_are_alike(left: list[int], right: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    mine, theirs = block_hashes(left), block_hashes(right)
    assert len(mine) == len(left) // BLOCK_TOKENS
    equal = [a == b for a, b in zip(mine, theirs, strict=False)]
    assert equal == [(index + 1) * BLOCK_TOKENS <= same for index in range(len(equal))]


@given(tokens, st.integers(0, 4))
def test_known_hashes_are_gone_on_from(text: list[int], num_known: int) -> None:
    whole = block_hashes(text)
    assert block_hashes(text, whole[:num_known]) == whole
