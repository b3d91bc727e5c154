"""Who holds the longest beginning, against comparing with everybody."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.prefix import BLOCK_TOKENS, block_hashes, common_length
from bough.prefix_index import PrefixIndex

# Texts of a few long pieces, so that many begin alike and part within blocks.
pieces = st.tuples(st.integers(0, 2), st.integers(1, BLOCK_TOKENS + 7))
texts = st.lists(pieces, max_size=5).map(lambda parts: [token for token, count in parts for _ in range(count)])
changes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80), texts), max_size=20)


@settings(max_examples=200)
@given(changes, texts)
def test_the_index_finds_what_comparing_with_everybody_finds(changes: list, wanted: list[int]) -> None:
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
    longest = max((common_length(wanted, tokens) for tokens in held.values()), default=0)
    match = index.longest(wanted, block_hashes(wanted))
    if longest < BLOCK_TOKENS:
        assert match is None
    else:
        assert match is not None
        assert match.length == longest == common_length(wanted, held[match.holder])


def test_nothing_is_left_of_those_who_are_gone() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for who in ("a", "b"):
        index.follow(who, [*range(100)])
    for who in ("a", "b"):
        index.forget(who)
    index.check_integrity([])
    assert index.longest([*range(100)], block_hashes(range(100))) is None
    assert not index._holders, "hashes of nobody stay"
