"""Streamed text: whole characters only, stop texts found wherever tokens split them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text import TextStream


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes: the hardest splits there are."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text: str, stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """The pieces of a text sent byte by byte, and the stop text that ended it."""
    output, pieces = TextStream(decode, stop), []
    for token in text.encode():
        piece = output.push(token)
        pieces.append(piece.text)
        if piece.stop is not None:
            return [*pieces, output.finish()], piece.stop
    return [*pieces, output.finish()], None


@given(st.text())
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_text_is_found_at_its_first_completion_and_never_shown(text: str, stops: list[str]) -> None:
    pieces, found = stream(text, stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (found, "".join(pieces)) == (None, text)
        return
    seen = text[: min(ends)]
    assert found in stops
    assert "".join(pieces) == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


def test_a_beginning_of_a_stop_text_is_held_back_until_it_is_none() -> None:
    output = TextStream(decode, ["END"])
    assert [output.push(byte).text for byte in b"aENxE"] == ["a", "", "", "ENx", ""]
    assert output.finish() == "E"


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    output = TextStream(decode)
    assert [output.push(byte).text for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert output.finish() == "\ufffd"
