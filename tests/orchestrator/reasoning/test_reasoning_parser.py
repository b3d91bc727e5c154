"""Thoughts are parted from what follows in whatever pieces a text comes, and nothing else of it is lost."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.generation import Beginning, Thoughts
from orchestrator.reasoning.formats import FORMATS
from orchestrator.reasoning.parser import Parted, ReasoningParser

INSIDE, BEFORE, AFTER = Beginning.INSIDE, Beginning.BEFORE, Beginning.AFTER


def part(beginning: Beginning, pieces: list[str], family: str = "qwen3") -> tuple[str | None, str]:
    """The thoughts of an output, None if there are none, and its content."""
    parser = ReasoningParser(Thoughts(FORMATS[family].begin, FORMATS[family].end, beginning))
    parted = [*(parser.push(text) for text in pieces), parser.finish()]
    thoughts = "".join(one.thoughts for one in parted)
    assert parser.has_thoughts or not thoughts
    assert parser.finish() == Parted("", ""), "nothing is told twice"
    return thoughts if parser.has_thoughts else None, "".join(one.content for one in parted)


TEXTS = [
    (INSIDE, "Hm.\nSo 4.\n</think>\n\nIt is 4.\n", ("Hm.\nSo 4.", "It is 4.\n")),
    (INSIDE, "\nHm.</think>4", ("Hm.", "4")),
    (INSIDE, "<think>\nHm.</think>4", ("Hm.", "4")),
    (INSIDE, "</think>4", ("", "4")),
    (INSIDE, "Hm </thin", ("Hm </thin", "")),
    (INSIDE, "Hm </thin k> so \n", ("Hm </thin k> so", "")),
    (INSIDE, "Hm <think> so</think></think>", ("Hm <think> so", "</think>")),
    (INSIDE, "Hm.</think>\n", ("Hm.", "")),
    (INSIDE, "", ("", "")),
    (INSIDE, "\n <thi", ("<thi", "")),
    (BEFORE, "<think>\nHm.\n</think>\n\n4\n", ("Hm.", "4\n")),
    (BEFORE, "\n<think>Hm.", ("Hm.", "")),
    (BEFORE, "<think>\n\n</think>\n\n4", ("", "4")),
    (BEFORE, " It is <think> 4 </think> ", (None, " It is <think> 4 </think> ")),
    (BEFORE, "\n<thi", (None, "\n<thi")),
    (BEFORE, "\n<thx", (None, "\n<thx")),
    (BEFORE, "", (None, "")),
    (AFTER, "4</think>", (None, "4</think>")),
    (AFTER, "<think>Hm.</think>4", ("Hm.", "4")),
]


@pytest.mark.parametrize(("beginning", "text", "expected"), TEXTS)
def test_thoughts_end_where_their_mark_is_in_whatever_pieces_a_text_comes(
    beginning: Beginning, text: str, expected: tuple[str | None, str]
) -> None:
    for size in (1, 2, 3, 7, 99):
        assert part(beginning, [text[i : i + size] for i in range(0, len(text), size)]) == expected


def test_marks_are_those_of_the_family() -> None:
    assert part(BEFORE, ["[THI", "NK]Hm <think>[/TH", "INK]4"], "mistral") == ("Hm <think>", "4")
    assert part(INSIDE, ["Hm.[/THINK]4"]) == ("Hm.[/THINK]4", "")


FRAGMENTS = ["<think>", "</think>", "<thi", "</th", "nk>", "ink>", "<", "/", ">", " ", "\n", "x", "é", "[/THINK]"]


def read(beginning: Beginning, text: str) -> tuple[str | None, str]:
    """What `part` must tell of a whole text, in other words."""
    marked = re.match(r"\s*<think>", text)
    if marked is None and beginning is not INSIDE:
        return None, text
    thoughts, _, content = (text if marked is None else text[marked.end() :]).partition("</think>")
    return thoughts.strip(), content.lstrip()


@given(st.sampled_from(Beginning), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.sets(st.integers(0, 60)))
def test_what_is_told_of_a_text_does_not_depend_on_its_pieces(
    beginning: Beginning, fragments: list[str], cuts: set[int]
) -> None:
    text = "".join(fragments)
    expected = read(beginning, text)
    assert part(beginning, [text]) == expected
    assert part(beginning, list(text)) == expected
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert part(beginning, [text[a:b] for a, b in pairwise(ends)]) == expected
