"""Where reasoning begins and ends in an output, however its text is divided; grammars start after it."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from bough.config.processes import REASONING_FORMATS
from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import Grammars
from bough.protocol.generation import (
    Beginning,
    ChatPrompt,
    Constraint,
    Function,
    GenerateOptions,
    Message,
    Prompt,
    ReasoningMarks,
    TextPrompt,
    ToolChoice,
    Tools,
)
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.opening.prompt import output_form, whole_prompt
from orchestrator.reasoning.formats import FORMATS, reasoning_of
from orchestrator.reasoning.parser import Parted, ReasoningParser

# Shortened templates of checkpoints: the parts on reasoning.
SAID = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
R1 = SAID.replace("m.content", "m.content.split('</think>')[-1]") + "<｜Assistant｜><think>\n"
V3 = SAID + "<｜Assistant｜>{{ '<think>' if thinking is defined and thinking else '</think>' }}"
QWQ = SAID + "<|im_start|>assistant\n<think>\n"
QWEN = (
    SAID.replace("{{ m.role", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{m.role")
    + "{% if tools %}{{ tools | tojson }}<tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call>{% endif %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}"
)  # fmt: skip
GLM = SAID + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}"
MAGISTRAL = "Think first: [THINK]...[/THINK]\n" + SAID + "[/INST]"
PLAIN = SAID + "assistant: "
NO_SWITCH = '{"enable_thinking": false}'
ASKED = ChatPrompt((Message("user", "What is <think>?</think>"),))


@cache
def tokenizer_of(template: str, *, has_tokens: bool = True, is_special: bool = False) -> Tokenizer:
    """Of bytes, with an end at 256, another token, and perhaps the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    marks = ["<think>", "</think>", "[THINK]", "[/THINK]"] if has_tokens else []
    tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in ("<other>", *marks)])
    return Tokenizer(TokenizerFiles(tokenizer.to_str().encode(), template, (256,), "", "</s>"))


def marks_of(
    template: str, kwargs: str = "", named: str = "auto", prompt: Prompt = ASKED, **tokens: bool
) -> ReasoningMarks:
    tokenizer = tokenizer_of(template, **tokens)
    if isinstance(prompt, ChatPrompt):
        prompt = ChatPrompt(prompt.messages, prompt.tools, kwargs)
    found = reasoning_of(prompt, whole_prompt(prompt, tokenizer, 300), tokenizer, named)
    assert found is not None
    return found


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("template", "kwargs", "beginning"),
    [
        (R1, "", Beginning.INSIDE),
        (QWQ, "", Beginning.INSIDE),
        (V3, "", Beginning.AFTER),
        (V3, '{"thinking": true}', Beginning.INSIDE),
        (V3, '{"reasoning_effort": "high"}', Beginning.INSIDE),
        (QWEN, "", Beginning.BEFORE),
        (QWEN, NO_SWITCH, Beginning.AFTER),
        (QWEN, '{"reasoning_effort": "none"}', Beginning.AFTER),
        (GLM, "", Beginning.BEFORE),
        (GLM, NO_SWITCH, Beginning.AFTER),
        (MAGISTRAL, "", Beginning.BEFORE),
    ],
)
def test_the_prompt_decides_where_an_answer_begins(
    template: str, kwargs: str, beginning: Beginning, has_tokens: bool
) -> None:
    found = marks_of(template, kwargs, has_tokens=has_tokens)
    assert found.beginning is beginning
    assert (found.begin, found.end) == (("[THINK]", "[/THINK]") if template == MAGISTRAL else ("<think>", "</think>"))


def test_a_parser_can_be_named_and_other_prompts_have_none() -> None:
    assert set(FORMATS) == set(REASONING_FORMATS)
    assert marks_of(PLAIN, named="deepseek_r1").beginning is Beginning.INSIDE
    assert marks_of(QWEN, NO_SWITCH, named="deepseek_r1").beginning is Beginning.AFTER
    assert marks_of(PLAIN, named="qwen3").beginning is Beginning.BEFORE
    assert marks_of(R1, named="mistral") == ReasoningMarks("[THINK]", "[/THINK]", Beginning.BEFORE)
    for prompt, template, named in ((ASKED, PLAIN, "auto"), (ASKED, R1, "none"), (TextPrompt("<think>"), R1, "auto")):
        tokenizer = tokenizer_of(template)
        assert reasoning_of(prompt, whole_prompt(prompt, tokenizer, 300), tokenizer, named) is None


def test_earlier_reasoning_reaches_templates_that_read_it() -> None:
    messages = (Message("user", "Hi"), Message("assistant", "4", reasoning="2 + 2"), Message("user", "So?"))
    read, unread = (tokenizer_of(template).decode(whole_prompt(ChatPrompt(messages), tokenizer_of(template), 300)) for
                    template in (QWEN, PLAIN))  # fmt: skip
    assert "<think>2 + 2</think>assistant: 4\n" in read
    assert "2 + 2" not in unread


@cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.files, 270)


async def form(
    template: str, constraint: Constraint | None, tools: Tools | None = None, *, has_tokens: bool = True
) -> str:
    tokenizer, prompt = tokenizer_of(template, has_tokens=has_tokens), ChatPrompt(ASKED.messages, tools)
    found = reasoning_of(prompt, whole_prompt(prompt, tokenizer, 300), tokenizer, "auto")
    return (await output_form(prompt, GenerateOptions(constraint=constraint), tokenizer, "auto", found)).grammar


def allows(grammar: str, text: str, template: str, **tokens: bool) -> bool:
    """Whether a text, in which 🐾 parts what are tokens otherwise, may be a whole output."""
    tokenizer = tokenizer_of(template, **tokens)
    allowed = grammars_of(tokenizer).along(grammar, None)
    assert allowed is not None
    mask = allowed.after([token for part in text.split("🐾") for token in tokenizer.encode_more(part)])
    return mask is not None and bool(mask[256])


WORD, NUMBER, LARK = (
    Constraint(regex="[a-z]+"),
    Constraint(json_schema='{"type": "integer"}'),
    Constraint(lark='start: x\nx: "b"'),
)
YES = Constraint(choices=("yes", "no"))


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("constraint", "good", "bad"), [(WORD, "ab", "a1"), (NUMBER, "12", '"1"'), (LARK, "b", "x"), (YES, "no", "noo")]
)
async def test_a_constraint_applies_to_the_text_after_the_reasoning(
    constraint: Constraint, good: str, bad: str, has_tokens: bool
) -> None:
    after = Constraint(constraint.json_schema, constraint.regex, constraint.choices, constraint.lark, True)
    tokens = {"has_tokens": has_tokens}
    opened, may_open = await form(R1, after, has_tokens=has_tokens), await form(QWEN, after, has_tokens=has_tokens)
    for reasoning in ("", "Hm, 1 < 2.\n", "</thi", "a <other> b <think>", "</s", "[THINK]" + bad):
        for end in ("</think>", "<🐾/think>", "</thi🐾nk>\n", "</think>\n\n"):
            for answer, is_good in ((good, True), (bad, False), ("\n\n\n" + good, False), ("", False)):
                if end.endswith("\n") and answer.startswith("\n"):
                    continue
                assert allows(opened, reasoning + end + answer, R1, **tokens) is is_good, reasoning + end + answer
                assert allows(may_open, "<think>" + reasoning + end + answer, QWEN, **tokens) is is_good
        assert not allows(opened, reasoning + bad, R1, **tokens)
        assert not allows(may_open, "<think>" + reasoning + bad, QWEN, **tokens)
    assert allows(may_open, good, QWEN, **tokens)
    assert not allows(may_open, bad, QWEN, **tokens)
    assert not allows(opened, "Hm.</think>" + bad + "</think>" + good, R1, **tokens), "the first mark is the end"


async def test_without_reasoning_a_constraint_applies_to_the_whole_output() -> None:
    alone = await form(PLAIN, WORD)
    after = Constraint(regex="[a-z]+", after_reasoning=True)
    assert await form(PLAIN, after) == alone
    assert await form(R1, WORD) == alone, "asked for over gRPC, where reasoning is not separated"
    assert await form(V3, after) == alone, "the prompt has ended them"
    with pytest.raises(InvalidRequest, match="constraint: must make a grammar of at most 131072 characters, got 1"):
        await form(R1, Constraint(lark='start: "a"\n' + "// é\n" * 26_000, after_reasoning=True))


async def test_required_calls_come_after_the_reasoning() -> None:
    tools = Tools((Function("f", '{"type": "object", "additionalProperties": false}'),), ToolChoice.REQUIRED)
    grammar = await form(QWEN, None, tools)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text, is_good in (
        (call, True), (f"<think>\nWell.\n</think>\n\n{call}", True), ("<think>\nWell.\n</think>\n\nNo.", False),
        (f"<think>{call}", False), ("No.", False), (f"<think>{call}</think>{call}", True),
    ):  # fmt: skip
        assert allows(grammar, text, QWEN) is is_good, text


async def test_with_a_constraint_the_text_after_the_reasoning_is_a_call_or_follows_it() -> None:
    tools = Tools((Function("f", '{"type": "object", "additionalProperties": false}'),))
    grammar = await form(QWEN, Constraint(json_schema='{"type": "integer"}', after_reasoning=True), tools)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for answer, is_good in ((call, True), ("12", True), ("No.", False), (f"{call}12", False)):
        for before in ("", "<think>\nWell.\n</think>\n\n"):
            assert allows(grammar, before + answer, QWEN) is is_good, before + answer


async def test_marks_that_are_special_tokens_are_part_of_a_chats_text() -> None:
    for is_special in (True, False):
        tokenizer = tokenizer_of(MAGISTRAL, is_special=is_special)
        found = reasoning_of(ASKED, whole_prompt(ASKED, tokenizer, 300), tokenizer, "auto")
        shown = (await output_form(ASKED, GenerateOptions(), tokenizer, "auto", found)).shown
        text = tokenizer.decode_showing(tokenizer.encode_more("[THINK]Hm.[/THINK]4<other>"), shown)
        assert text == "[THINK]Hm.[/THINK]4" + ("" if is_special else "<other>")


INSIDE, BEFORE, AFTER = Beginning.INSIDE, Beginning.BEFORE, Beginning.AFTER


def part(beginning: Beginning, pieces: list[str], family: str = "qwen3") -> tuple[str | None, str]:
    """The reasoning of an output, or None, and its content."""
    parser = ReasoningParser(ReasoningMarks(FORMATS[family].begin, FORMATS[family].end, beginning))
    parted = [*(parser.push(text) for text in pieces), parser.finish()]
    reasoning = "".join(one.reasoning for one in parted)
    assert parser.has_reasoning or not reasoning
    assert parser.finish() == Parted("", ""), "nothing is told twice"
    return reasoning if parser.has_reasoning else None, "".join(one.content for one in parted)


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
def test_reasoning_ends_at_its_mark_however_the_text_is_split(
    beginning: Beginning, text: str, expected: tuple[str | None, str]
) -> None:
    for size in (1, 2, 3, 7, 99):
        assert part(beginning, [text[i : i + size] for i in range(0, len(text), size)]) == expected


def test_marks_follow_the_family() -> None:
    assert part(BEFORE, ["[THI", "NK]Hm <think>[/TH", "INK]4"], "mistral") == ("Hm <think>", "4")
    assert part(INSIDE, ["Hm.[/THINK]4"]) == ("Hm.[/THINK]4", "")


FRAGMENTS = ["<think>", "</think>", "<thi", "</th", "nk>", "ink>", "<", "/", ">", " ", "\n", "x", "é", "[/THINK]"]


def read(beginning: Beginning, text: str) -> tuple[str | None, str]:
    """What `part` must return for a whole text, in other words."""
    marked = re.match(r"\s*<think>", text)
    if marked is None and beginning is not INSIDE:
        return None, text
    reasoning, _, content = (text if marked is None else text[marked.end() :]).partition("</think>")
    return reasoning.strip(), content.lstrip()


@given(st.sampled_from(Beginning), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.sets(st.integers(0, 60)))
def test_parsing_does_not_depend_on_how_the_text_is_divided(
    beginning: Beginning, fragments: list[str], cuts: set[int]
) -> None:
    text = "".join(fragments)
    expected = read(beginning, text)
    assert part(beginning, [text]) == expected
    assert part(beginning, list(text)) == expected
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert part(beginning, [text[a:b] for a, b in pairwise(ends)]) == expected
