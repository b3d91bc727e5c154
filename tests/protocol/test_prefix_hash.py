"""Names of prefixes: equal for equal beginnings, and for nothing else."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.prefix_hash import BLOCK_TOKENS, CHECKPOINT_TOKENS, TokenHistory, block_hashes, prefix_hash

tokens = st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS)


@given(tokens, tokens)
def test_blocks_have_equal_hashes_as_far_as_the_tokens_are_equal(left: list[int], right: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    mine, theirs = block_hashes(left), block_hashes(right)
    assert len(mine) == len(left) // BLOCK_TOKENS
    equal = [a == b for a, b in zip(mine, theirs, strict=False)]
    assert equal == [(index + 1) * BLOCK_TOKENS <= same for index in range(len(equal))]


@given(tokens, st.integers(0, 4))
def test_hashing_continues_from_known_hashes(text: list[int], num_known: int) -> None:
    whole = block_hashes(text)
    assert block_hashes(text, whole[:num_known]) == whole


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200), st.lists(st.integers(-250, 250), max_size=8))
def test_a_history_equals_a_list(tokens: list[int], places: list[int]) -> None:
    """Also as it was before it grew."""
    history = TokenHistory(tokens)
    before, middle = history[:], history[: len(tokens) // 2]
    history.append(7)
    longer = [*tokens, 7]
    assert (list(history), list(before), list(middle)) == (longer, tokens, tokens[: len(tokens) // 2])
    assert (len(history), len(before), history[-1]) == (len(longer), len(tokens), 7)
    assert (before == tuple(tokens), before == tokens, before == history) == (True, True, False)
    assert np.asarray(before).tolist() == tokens
    for begin in places:
        for end in (*places, None):
            assert list(history[begin:end]) == longer[begin:end]
            assert list(before[begin:end]) == tokens[begin:end]
            assert prefix_hash(history[begin:end]) == prefix_hash(longer[begin:end])
        if not -len(tokens) <= begin < len(tokens):
            with pytest.raises(IndexError):
                before[begin]
        else:
            assert before[begin] == tokens[begin]
    assert list(history[::-2]) == longer[::-2]


def test_hashing_a_history_only_hashes_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round hashes what two workers hold and what the index receives: once all of a long context, each time."""
    num_read, read = 0, TokenHistory.read

    def counted(self: TokenHistory, begin: int, end: int) -> array[int]:
        nonlocal num_read
        num_read += end - begin
        return read(self, begin, end)

    monkeypatch.setattr(TokenHistory, "read", counted)
    tokens = [number * 7919 % 50_000 for number in range(20_000)]
    history = TokenHistory(tokens)
    assert prefix_hash(history[:15_000]) == prefix_hash(tokens[:15_000])
    assert num_read < 15_000 + 2 * CHECKPOINT_TOKENS
    for number in range(200):
        history.append(number)
        tokens.append(number)
        num_read = 0
        for length in (len(tokens), len(tokens) - 1, len(tokens) - number, 12_345):
            assert prefix_hash(history[:length]) == prefix_hash(tokens[:length])
        assert num_read <= (4 if number else 9) * CHECKPOINT_TOKENS
