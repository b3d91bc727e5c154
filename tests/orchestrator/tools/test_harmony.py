"""OpenAI's harmony format: messages in channels are reasoning, answers and calls, and no mark of them is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import Grammars
from bough.protocol.generation import (
    Channels,
    ChatPrompt,
    Constraint,
    Function,
    GenerateOptions,
    Message,
    ToolCall,
    ToolChoice,
    Tools,
)
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.http_api.answers.answer import Head
from orchestrator.http_api.responses.answer import ResponseAnswer, repeated
from orchestrator.http_api.responses.fields import ResponseFields
from orchestrator.opening.prompt import OutputForm, output_form, whole_prompt
from orchestrator.reasoning.formats import reasoning_of
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.tools.formats import format_of
from orchestrator.tools.harmony import HARMONY, MARKS
from tests.fakes import tool_templates
from tests.fakes.tool_models import QUESTION, tokenizer_with
from tests.orchestrator.http_api.test_reasoning import answered, events, joined

Json = dict[str, Any]

NEXT = "<|end|><|start|>assistant"
REASONING, FINAL = "<|channel|>analysis<|message|>Hm, 2 < 3.", "<|channel|>final<|message|>"
PLAN = "<|channel|>commentary<|message|>I look."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
CITY = '{"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}'
TOOLS = Tools((Function("weather", CITY, "Tells the weather."), Function("count", '{"type": "object"}')))
MUST = replace(TOOLS, choice=ToolChoice.REQUIRED)
STRICT = Tools((replace(TOOLS.functions[0], is_strict=True), TOOLS.functions[1]))
ROME = ("weather", '{"city": "Rome"}')


@cache
def model() -> Tokenizer:
    files = tokenizer_with(tool_templates.HARMONY, list(MARKS))
    ends = (
        files.eos_token_ids[0],
        *(Tokenizer(files).added_tokens[mark].token_id for mark in ("<|call|>", "<|return|>")),
    )
    return Tokenizer(TokenizerFiles(files.tokenizer_json, files.chat_template, ends, "", "</s>"))


async def form(tools: Tools | None = None, **options: Any) -> OutputForm:
    prompt = ChatPrompt(QUESTION, tools)
    reasoning = reasoning_of(prompt, whole_prompt(prompt, model(), 300), model(), "auto")
    assert reasoning == Channels("assistant")
    return await output_form(prompt, GenerateOptions(**options), model(), "auto", reasoning)


# An output, and its reasoning, content and call with tools.
OUTPUTS: dict[str, tuple[str, str, str, tuple[str, str] | None]] = {
    "reasoning and an answer": (f"{REASONING}{NEXT}{FINAL}It is *so*.<|return|>", "Hm, 2 < 3.", "It is *so*.", None),
    "an answer": (f"{FINAL}Wél<|l|>.\n<|return|>", "", "Wél<|l|>.\n", None),
    "a form": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', "", '{"a": 1}', None),
    "a call": (f"{REASONING}{NEXT}{CALL}", "Hm, 2 < 3.", "", ROME),
    "a call as templates write it": (
        f'{REASONING}{NEXT} to=functions.weather<|channel|>commentary json<|message|>{{"city": "Rome"}}<|call|>',
        "Hm, 2 < 3.", "", ROME,
    ),
    "a plan before a call": (
        f"{PLAN}{NEXT}{REASONING}{NEXT}{CALL}", "Hm, 2 < 3.", "I look.", ROME
    ),
    "reasoning twice": (f"{REASONING}{NEXT}{REASONING}{NEXT}{FINAL}4", "Hm, 2 < 3.\nHm, 2 < 3.", "4", None),
    "a call of a tool that is none": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", None
    ),
    "a call of something that can be no function": (
        '<|channel|>commentary to=functions. <|message|>{}<|call|><|start|>assistant to=functions.f(x)<|message|>{}',
        "{}\n{}", "", None,
    ),
    "a call of a function that the request lacks": (CALL.replace("weather", "rain"), "", "", ("rain", ROME[1])),
    "a call that is no object": (
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|> Rome<|call|>", " Rome", "", None
    ),
    "no messages at all": ("2 < 3 <|", "", "2 < 3 <|", None),
    "cut off in reasoning": ("<|channel|>analysis<|message|>Hm <|", "Hm <|", "", None),
    "cut off in a header": (f"{REASONING}<|end|><|start|>assis", "Hm, 2 < 3.", "", None),
    "cut off in the first header": ("<|start|>assistant", "", "", None),
    "marks out of place": (f"{FINAL}4<|constrain|>2<|message|>.", "", "42.", None),
    "nothing": ("", "", "", None),
}  # fmt: skip


def said(output: str, size: int = 0, **how: Any) -> tuple[Json, Json]:
    """The message of an output that comes by characters, and what a client puts together of its stream."""
    reasoning = Channels("assistant")
    pieces = [output[at : at + size] for at in range(0, len(output), size)] if size else [output]
    whole, chunks = answered(events(reasoning, pieces), formats=lambda _: HARMONY, **how)
    (choice,) = whole["choices"]
    told = joined(chunks)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    if deltas:
        told["call"] = (deltas[0]["function"]["name"], "".join(one["function"]["arguments"] for one in deltas))
    return choice["message"] | {"reason": choice["finish_reason"]}, told


@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("name", OUTPUTS)
def test_messages_are_separated_however_the_text_is_divided(name: str, size: int) -> None:
    output, reasoning, content, call = OUTPUTS[name]
    whole, told = said(output, size, tools=TOOLS)
    assert (whole["reasoning"] or "", whole["content"] or "") == (reasoning, content)
    assert (told.get("reasoning", ""), told["content"], told.get("call")) == (reasoning, content, call)
    assert whole["reason"] == ("stop" if call is None else "tool_calls")
    if call is not None:
        ((_, _, function),) = (tuple(one.values()) for one in whole["tool_calls"])
        assert (function["name"], function["arguments"]) == call


def test_without_tools_a_call_counts_as_reasoning() -> None:
    whole, _ = said(f"{FINAL}Well.{NEXT}{CALL}", tools=None)
    assert (whole["reasoning"], whole["content"], "tool_calls" in whole) == (ROME[1], "Well.", False)


@pytest.mark.parametrize("begun", ["", "It is"])
def test_an_answer_that_the_prompt_has_begun_is_content_at_once(begun: str) -> None:
    whole, _ = answered(events(Channels(f"assistant<|channel|>final<|message|>{begun}"), ["4"]))
    assert whole["choices"][0]["message"]["content"] == "4"


def test_items_of_a_response_keep_their_order() -> None:
    """However many tokens a round has."""
    output = f"{PLAN}{NEXT}{REASONING}{NEXT}{CALL}"
    fields = repeated(ResponseFields.model_validate({"input": "Hi"}), TOOLS)
    kinds = set()
    for rounds in ([[*output]], [[character] for character in output]):
        answer = ResponseAnswer(Head("id", 1), fields, None, TOOLS, lambda _: HARMONY)
        for event in events(Channels("assistant"), *rounds):
            answer.chunks(0, event)
        kinds.add(json.dumps([(item["type"], item.get("arguments")) for item in answer.whole()["output"]]))
    assert kinds == {json.dumps([("message", None), ("reasoning", None), ("function_call", ROME[1])])}


async def test_marks_that_are_special_tokens_reach_the_parser_and_no_client() -> None:
    shown = (await form()).shown
    assert set(shown.values()) == set(MARKS) == set((await form(TOOLS)).shown.values())
    stream = TextStream(lambda tokens: model().decode_showing(tokens, shown))
    output = [
        stream.push(token).text for token in model().encode_more(f"{REASONING}{NEXT}{FINAL}Wél<think>l.<|return|>")
    ]
    whole, _ = answered(events(Channels("assistant"), output, rest=stream.finish()))
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, 2 < 3.", "Wéll.")


async def allowed(text: str, tools: Tools | None = None, **options: Any) -> bool:
    """Whether a text may be a whole output, but for the token that ends it."""
    grammar = (await form(tools, **options)).grammar
    matcher = Grammars(model().files, 300).along(grammar, None)
    assert matcher is not None
    mask = matcher.after(model().encode_more(text))
    return mask is not None and all(mask[end] for end in model().files.eos_token_ids)


async def test_a_required_call_allows_reasoning_and_a_call() -> None:
    call = CALL.removesuffix("<|call|>")
    templates = call.replace(
        "<|channel|>commentary to=functions.weather ", " to=functions.weather<|channel|>commentary "
    )
    for text, is_allowed in (
        (call, True), (f"{REASONING}{NEXT}{call}", True), (templates, True),
        (templates.replace("<|constrain|>", ""), True), (f"{PLAN}{NEXT}{call}", True), (REASONING, False),
        (call.replace("Rome", "Oslo"), False), (f"{REASONING}{NEXT}{FINAL}Rome.", False), ("", False), ("{}", False),
        (call + NEXT + call, False),
    ):  # fmt: skip
        assert await allowed(text, MUST) is is_allowed, text
    assert not await allowed(call, replace(MUST, allowed=("count",)))


async def test_if_the_model_decides_strict_functions_and_formats_are_followed() -> None:
    assert (await form(TOOLS)).grammar == "", "free"
    call = CALL.removesuffix("<|call|>")
    for text, is_allowed in (
        (call, True), (f"{FINAL}Well.", True), (FINAL, True), (call.replace("Rome", "Oslo"), False),
        (call.replace("weather", "count").replace("Rome", "Oslo"), True), ("Well.", False),
    ):  # fmt: skip
        assert await allowed(text, STRICT) is is_allowed, text
    word = Constraint(regex="[a-z]+", after_reasoning=True)
    for tools in (None, TOOLS):
        for text, is_allowed in (
            (f"{FINAL}well", True), (f"{REASONING}{NEXT}{FINAL}well", True), (f"{FINAL}Well", False),
            (call, tools is TOOLS), (f"{PLAN}{NEXT}{FINAL}well", False), ("well", False),
        ):  # fmt: skip
            assert await allowed(text, tools, constraint=word) is is_allowed, text
    assert await allowed("well", constraint=replace(word, after_reasoning=False)), "over gRPC, of all of the output"
    with pytest.raises(
        InvalidRequest, match=r"chat\.tools\[0\]\.function\.parameters: must be one that can be followed"
    ):
        await form(
            Tools(
                (Function("f", '{"type": "object", "properties": {"a": false}, "required": ["a"]}'),),
                ToolChoice.REQUIRED,
            )
        )


async def test_tools_are_refused_if_only_one_of_the_two_parsers_is_configured() -> None:
    """What an answer calls would not be found, and its marks would be content."""
    for tool_format, reasoning in (("auto", None), ("hermes", Channels("assistant"))):
        with pytest.raises(InvalidRequest, match=r"^chat\.tools: must be .* openai goes with .* openai_gptoss alone"):
            await output_form(ChatPrompt(QUESTION, TOOLS), GenerateOptions(), model(), tool_format, reasoning)
        untold = ChatPrompt(QUESTION, replace(TOOLS, choice=ToolChoice.NONE))
        await output_form(untold, GenerateOptions(), model(), tool_format, reasoning)


def test_the_template_receives_effort_tools_calls_reasoning_and_results() -> None:
    assert format_of("auto", model().template) is format_of("openai", model().template) is HARMONY
    call, result = ToolCall("call_1", "weather", '{"city":"Rome"}'), Message("tool", "Sunny.", (), "call_1")
    said = (*QUESTION, Message("assistant", "", (call,), reasoning="Hm."), result)
    text = b"".join(
        map(model().token_bytes, whole_prompt(ChatPrompt(said, TOOLS, '{"reasoning_effort": "high"}'), model(), 300))
    )
    written = text.decode()
    assert "Reasoning: high<|end|><|start|>developer<|message|># Tools" in written
    assert "// Tells the weather.\ntype weather = " in written
    assert written.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>"
        'commentary json<|message|>{"city": "Rome"}<|call|><|start|>functions.weather to=assistant<|channel|>commentary'
        '<|message|>"Sunny."<|end|><|start|>assistant'
    )
    planned = Message("assistant", "I look.", (call,), reasoning="Hm.")
    whole_prompt(ChatPrompt((*QUESTION, planned, result), TOOLS), model(), 300)  # both of which the template refuses
    both = Message("assistant", "", (call, replace(call, call_id="call_2")))
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[1\]\.tool_calls: must be one call, .* the first alone"):
        whole_prompt(ChatPrompt((*QUESTION, both, result), TOOLS), model(), 300)
