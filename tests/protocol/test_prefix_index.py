"""Who holds the longest beginning, against comparing with everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol import prefix_hash
from bough.protocol.prefix_hash import BLOCK_TOKENS, PrefixIndex, block_hashes, common_length, whole_blocks

# Texts of a few long pieces, so that many have common prefixes and diverge within blocks.
pieces = st.tuples(st.integers(0, 2), st.integers(1, BLOCK_TOKENS + 7))
texts = st.lists(pieces, max_size=5).map(lambda parts: [token for token, count in parts for _ in range(count)])
changes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80), texts), max_size=20)


@given(changes, texts)
def test_the_index_finds_what_comparing_with_every_session_finds(changes: list, wanted: list[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    held: dict[int, list[int]] = {}
    for who, kept, new in changes:
        if kept > 60 and who in held:
            index.forget(who)
            del held[who]
        else:
            tokens = held.setdefault(who, [])
            del tokens[kept:]
            index.follow(who, tokens)
            tokens.extend(new)
            index.follow(who, tokens)
        index.check_integrity([*held])
    longest = max((whole_blocks(common_length(wanted, tokens)) for tokens in held.values()), default=0)
    match = index.longest(wanted, block_hashes(wanted))
    if longest < BLOCK_TOKENS:
        assert match is None
    else:
        assert match is not None
        assert match.length == longest == whole_blocks(common_length(wanted, held[match.holder]))


def test_tokens_are_compared_if_hashes_are_equal() -> None:
    """Who finds a text with the hashes of another's would begin from the other's keys and values."""
    index: PrefixIndex[str] = PrefixIndex()
    index.follow("a", [*range(100)])
    forged = [*range(BLOCK_TOKENS), *range(1000, 1000 + 2 * BLOCK_TOKENS)]
    match = index.longest(forged, block_hashes(range(100)))
    assert match is not None
    assert (match.holder, match.length) == ("a", BLOCK_TOKENS), "as far as the tokens are really the same"
    assert index.longest([7] * 96, block_hashes(range(100))) is None


def test_of_several_with_equal_hashes_the_one_with_the_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hash, "block_hashes", lambda tokens, *_: [*range(len(tokens) // BLOCK_TOKENS)])
    index: PrefixIndex[str] = PrefixIndex()
    index.follow("a", [1] * 70)
    index.follow("b", [2] * 70)
    assert index.longest([2] * 70, [0, 1]) == ("b", 64)
    assert index.longest([1] * 64 + [2] * 6, [0, 1]) == ("a", 64)
    assert index.longest([3] * 70, [0, 1]) is None


def test_nothing_remains_of_removed_sessions() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for who in ("a", "b"):
        index.follow(who, [*range(100)])
    for who in ("a", "b"):
        index.forget(who)
    index.check_integrity([])
    assert index.longest([*range(100)], block_hashes(range(100))) is None
    assert not index._holders, "hashes of nobody stay"


def test_texts_with_different_salts_share_nothing() -> None:
    """Not even if hashes collide or are wrong."""
    index: PrefixIndex[str] = PrefixIndex()
    text = [*range(100)]
    index.follow("a", text, "alice")
    assert index.longest(text, block_hashes(text, cache_salt="bob"), "bob") is None
    assert index.longest(text, block_hashes(text, cache_salt="alice"), "bob") is None
    assert index.longest(text, block_hashes(text)) is None
    assert index.longest(text, block_hashes(text, cache_salt="alice"), "alice") == ("a", 96)
    index.follow("a", text, "bob")  # the same text under another salt
    assert index.longest(text, block_hashes(text, cache_salt="alice"), "alice") is None
    assert index.longest(text, block_hashes(text, cache_salt="bob"), "bob") == ("a", 96)
    index.check_integrity(["a"])
    index.forget("a")
    assert not index._holders
