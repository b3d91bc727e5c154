"""Streamed text: whole characters only, stop texts found however tokens split them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.sampling_params import MAX_STOP_LENGTH
from orchestrator.sessions.detokenizer import StopTexts, TextStream, overlap


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes: the hardest splits there are."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text: str, stop: Sequence[str] = (), **conditions: Any) -> tuple[list[str], str | None]:
    """The pieces of a text sent byte by byte, and the stop text that ended it."""
    output, pieces = TextStream(decode, stop, **conditions), []
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


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(0, 12))
def test_stop_texts_before_min_tokens_end_nothing_and_may_be_included(
    text: str, stops: list[str], min_tokens: int
) -> None:
    ends = [
        (end, text[:end].rfind(stop), stop)
        for stop in stops
        for end in range(min_tokens + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    for include_stop in (False, True):
        pieces, found = stream(text, stops, min_tokens=min_tokens, include_stop=include_stop)
        if not ends:
            assert (found, "".join(pieces)) == (None, text)
            continue
        first = min(end for end, _, _ in ends)
        begin, stop = min((begin, stop) for end, begin, stop in ends if end == first)
        assert (found, "".join(pieces)) == (stop, text[:first] if include_stop else text[:begin])


class PlainStops:
    """Stop texts, each compared with everything that is withheld: what `StopTexts` must do, in 10 ms a token."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops

    def step(self, state: str, character: str) -> tuple[str, str | None]:
        text = state + character
        complete = max((stop for stop in self._stops if text.endswith(stop)), key=len, default=None)
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        return text[len(text) - num_held :], complete


STOPS = st.lists(st.text("ab", min_size=1, max_size=7), max_size=12)


@given(st.lists(st.text("ab", max_size=5), max_size=20), STOPS, st.integers(0, 6), st.booleans())
def test_many_stop_texts_are_found_and_held_back_like_single_ones(
    words: list[str], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    """Token by token: equal stop texts, those that begin with others, and several that end in one token."""
    streams = [
        TextStream(lambda tokens: "".join(words[token] for token in tokens), stops, min_tokens=min_tokens,
                   include_stop=include_stop)
        for _ in range(2)
    ]  # fmt: skip
    fast, plain = streams
    plain._stops = PlainStops(stops)  # type: ignore[assignment]
    for token in range(len(words)):
        piece = fast.push(token)
        assert piece == plain.push(token)
        assert fast.length == plain.length
        if piece.stop is not None:
            break
    assert fast.finish() == plain.finish()


def test_many_long_stop_texts_take_two_lookups_per_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They took 9 ms of the event loop for each token: every beginning of every one was compared with the text."""
    num_looks, may_become = 0, StopTexts.may_become

    def counted(self: StopTexts, part: str) -> bool:
        nonlocal num_looks
        num_looks += 1
        return may_become(self, part)

    monkeypatch.setattr(StopTexts, "may_become", counted)
    stops = ["a" * (MAX_STOP_LENGTH - 1) + "z", *(chr(300 + n) + "a" * (MAX_STOP_LENGTH - 1) for n in range(63))]
    text = ("a" * 1500 + "b") * 3
    pieces, found = stream(text, stops)
    assert (found, "".join(pieces)) == (None, text)
    assert num_looks <= 2 * len(text)


class Counted:
    """A decoder over tokens that are any pieces of a text's bytes; counts how many tokens it is asked for."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.num_asked = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.num_asked += len(tokens)
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The bytes, cut at these places."""
    bounds = [0, *sorted({cut % (len(data) + 1) for cut in cuts} - {0, len(data)}), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@given(
    st.lists(st.sampled_from([b"a", "é".encode(), "木".encode(), "🌳".encode(), b"\xf0\x9f", b"\xff", b"\x82"])),
    st.data(),
)
def test_tokens_that_split_characters_join_to_the_text(parts: list[bytes], data: st.DataObject) -> None:
    """Long rows of bytes that never become a character too: what is said early is never taken back."""
    whole = b"".join(parts) * data.draw(st.integers(1, 8))
    decoder = Counted(pieces_of(whole, data.draw(st.lists(st.integers(0, 1000), max_size=200))))
    output = TextStream(decoder)
    texts = [output.push(token).text for token in range(len(decoder.pieces))]
    assert "".join([*texts, output.finish()]) == whole.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("data", "size"),
    [
        ("木".encode() * 8000, 3),  # each token ends in the middle of a character
        (b"\xff" * 8000, 1),  # no byte ever becomes a character
        ("\ufffd".encode() * 8000, 3),  # the text itself has the sign for that
        (b"\xf0\x9f\x98" * 8000, 1),
    ],
)
def test_incomplete_characters_do_not_increase_the_work_per_token(data: bytes, size: int) -> None:
    """8,000 such tokens once took the event loop 4.4 s."""
    decoder = Counted([data[:2], *(data[begin : begin + size] for begin in range(2, len(data), size))])
    output = TextStream(decoder)
    texts = [output.push(token).text for token in range(len(decoder.pieces))]
    assert decoder.num_asked < 40 * len(texts)
    assert len("".join(texts[:-24])) > len(texts) // 5  # and what is certain is not held back
    assert "".join([*texts, output.finish()]) == data.decode("utf-8", errors="replace")


def test_byte_fallback_does_not_increase_the_work_per_token() -> None:
    """Its decoder takes a run of bytes as a whole: one invalid byte turns all of them into U+FFFD."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    num_asked = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal num_asked
        num_asked += len(tokens)
        return str(tokenizer.decode(list(tokens)))

    for tokens in ([*"a木🌳é".encode(), 256] * 100, [0xFF, *"木".encode()] * 1000, [0xFF] * 1000 + [256]):
        num_asked, output = 0, TextStream(decode)
        text = "".join([*(output.push(token).text for token in tokens), output.finish()])
        assert num_asked < 40 * len(tokens)
        if 0xFF not in tokens:
            assert text == decode(tokens)
        elif 256 in tokens:
            assert text == "\ufffd" * 1000 + "a"


def test_bytes_without_a_character_complete_no_stop_text() -> None:
    """The text was cut off there, and the request's end said that its length was the reason."""
    output = TextStream(decode, ("a\ufffd", "b"))
    assert [output.push(token).text for token in (0x61, 0xF0)] == ["", ""]
    assert output.finish() == "a\ufffd"


def test_half_a_character_after_a_stop_text_is_not_sent() -> None:
    """Vocabularies have tokens such as a space and the first bytes of an emoji."""
    pieces = [b"a", b" \xf0\x9f"]
    output = TextStream(lambda tokens: b"".join(pieces[token] for token in tokens).decode(errors="replace"), (" ",))
    assert [output.push(token) for token in (0, 1)] == [("a", None), ("", " ")]
    assert output.finish() == ""
