"""A model's format of calls is that of its template, and outputs of its grammars are texts of which calls are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, Constraint, Function, Message, ToolCall, ToolChoice, Tools
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.opening.prompt import whole_prompt
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.tools.call_parser import ArgumentsText, CallBegun, ContentText
from orchestrator.tools.formats import FORMATS, MISTRAL_NAMED, format_of
from orchestrator.tools.harmony import HARMONY
from tests.fakes.tool_models import QUESTION, model_of, tokenizer_with
from tests.fakes.tool_templates import KIMI, NO_TOOLS, SPECIAL, TEMPLATES, TOKENS, written

# Of harmony's messages, which are more than calls, is `test_harmony.py`.
KNOWN = {"mistral_named" if known is MISTRAL_NAMED else known.name: known for known in FORMATS if known is not HARMONY}

CITY = (
    '{"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], '
    '"additionalProperties": false}'
)
COUNT = (
    '{"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"], '
    '"$defs": {"N": {"type": "integer"}}}'
)
FUNCTIONS = (Function("weather", CITY, "Tells the weather."), Function("count", COUNT))
TOOLS = Tools(FUNCTIONS)
MUST = replace(TOOLS, choice=ToolChoice.REQUIRED)
STRICT = Tools((replace(FUNCTIONS[0], is_strict=True), FUNCTIONS[1]))


ROME, OSLO = (f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' for city in ("Rome", "Oslo"))
TWO, WORD = '{"name": "count", "arguments": {"n": 2}}', '{"name": "count", "arguments": {"n": "two"}}'


@pytest.mark.parametrize("name", KNOWN)
def test_the_format_of_calls_follows_from_the_template_unless_it_is_named(name: str) -> None:
    template, known = ChatTemplate(TEMPLATES[name], "", ""), KNOWN[name]
    assert format_of("auto", template) is format_of(known.name, template) is known
    assert format_of("hermes", template).name == "hermes"
    with pytest.raises(
        InvalidRequest,
        match=r"chat\.tools: .* in none of the known formats, hermes, llama3_json, mistral, qwen3_coder, ",
    ):
        format_of("auto", ChatTemplate(KIMI, "", ""))
    for source in (NO_TOOLS, "", "{% if"):
        with pytest.raises(
            InvalidRequest, match=r"chat\.tools: must be left out, as this model's chat template does not"
        ):
            format_of(known.name, ChatTemplate(source, "", ""))


@pytest.mark.slow
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", KNOWN)
async def test_required_calls_allow_nothing_else(name: str, has_tokens: bool) -> None:
    model = model_of(name, has_tokens=has_tokens)
    grammar, _ = await model.form(MUST)
    for text, is_allowed in (
        (written(name, ROME), True),
        (written(name, TWO), True),
        (written(name, OSLO), False),
        (written(name, WORD), False),
        ("Hello", False),
        ("", False),
    ):
        assert model.allows(grammar, text) is is_allowed, text
    if name != "llama3_json":
        assert model.allows(grammar, written(name, ROME, TWO))
        single, _ = await model.form(replace(MUST, allows_several=False))
        assert not model.allows(single, written(name, ROME, TWO))
        assert model.allows(single, written(name, ROME))
    for choice in (ToolChoice.REQUIRED, ToolChoice.AUTO):
        named, _ = await model.form(replace(TOOLS, choice=choice, allowed=("count",)))
        assert model.allows(named, written(name, TWO))
        assert not model.allows(named, written(name, ROME))
        assert model.allows(named, "Hello") is (choice is ToolChoice.AUTO)


PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], '
    '"additionalProperties": false}'
)
FORMS = [
    (Constraint(json_schema=COUNT), '{"n": 7}', '{"n": "7"}'),
    (Constraint(json_schema=PERSON), '{"name": "we"}', '{"name": 1}'),  # begins as a call does
    (Constraint(regex="[a-c]+/"), "abc/", "abd/"),
    (Constraint(choices=("yes", "no")), "no", "nope"),
    (Constraint(lark='start: call "!"\ncall: /[x-z]+/'), "xyz!", "xyz"),  # with names that grammars of calls have too
]


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
async def test_text_without_a_call_follows_the_requested_format(name: str) -> None:
    model = model_of(name)
    for constraint, right, wrong in FORMS:
        grammar, _ = await model.form(STRICT, constraint=constraint)
        for text, is_allowed in (
            (right, True),
            (wrong, False),
            (written(name, ROME), True),
            (written(name, OSLO), False),
            (written(name, WORD), True),  # not strict
            (right + written(name, ROME), False),
            (written(name, ROME) + right, False),
        ):
            assert model.allows(grammar, text) is is_allowed, text
        assert not model.allows((await model.form(MUST, constraint=constraint))[0], right)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", KNOWN)
async def test_strict_functions_follow_their_schema_if_the_model_decides(name: str, has_tokens: bool) -> None:
    model = model_of(name, has_tokens=has_tokens)
    assert (await model.form(TOOLS))[0] == "", "free"
    grammar, _ = await model.form(STRICT)
    before = "" if name == "llama3_json" else "I see <b>. "
    for text, is_allowed in (
        ("", True),
        ("Hello <think>there, [1] <tool", True),
        (before + written(name, ROME), True),
        (before + written(name, OSLO), False),
        (before + written(name, WORD), True),  # not strict
        (written(name, ROME), True),
        (written(name, '{"name": "others", "arguments": {}}'), False),
    ):
        assert model.allows(grammar, text) is is_allowed, text
    if name not in ("llama3_json", "mistral", "mistral_named"):
        assert model.allows(grammar, f"{written(name, ROME)}\n{written(name, TWO)} Done.")
    single, _ = await model.form(replace(TOOLS, allows_several=False))
    assert model.allows(single, written(name, WORD))
    assert name == "llama3_json" or not model.allows(single, written(name, ROME, TWO))


@pytest.mark.parametrize("name", KNOWN)
async def test_marks_left_out_of_the_text_reach_the_parser(name: str) -> None:
    """Special tokens are part of the text only where they are a mark; others are left out as ever."""
    model = model_of(name)
    _, shown = await model.form(TOOLS)
    assert set(shown.values()) == (set(TOKENS[name]) if name in SPECIAL else set())
    stream = TextStream(lambda tokens: model.tokens.decode_showing(tokens, shown))
    output = model.tokens.encode_more(
        "Wél<think>l, " + (written(name, ROME) if name != "llama3_json" else f"<|python_tag|>{ROME}")
    )
    parser = KNOWN[name].parser(TOOLS)
    pieces = [piece for token in output for piece in parser.push(stream.push(token).text)]
    pieces += parser.push(stream.finish()) + parser.finish()
    assert "".join(p.text for p in pieces if isinstance(p, ContentText)) == "Wéll,"
    assert [p.name for p in pieces if isinstance(p, CallBegun)] == ["weather"]
    assert json.loads("".join(p.text for p in pieces if isinstance(p, ArgumentsText))) == {"city": "Rome"}


@pytest.mark.parametrize("name", KNOWN)
def test_templates_receive_tools_calls_and_results(name: str) -> None:
    model = model_of(name)
    call, answer = ToolCall("call12345", "weather", '{"city":"Rome"}'), Message("tool", "Sunny.", (), "call12345")
    messages = (*QUESTION, Message("assistant", "", (call,)), answer)
    text = model.tokens.template.render([("user", "Weather?")])
    for prompt in (ChatPrompt(messages, TOOLS), ChatPrompt((*messages, *QUESTION), TOOLS)):
        text = b"".join(map(model.tokens.token_bytes, whole_prompt(prompt, model.tokens, 270))).decode()
        assert written(name, ROME).removesuffix("}]") in text, "as it must be called, but for ids of Mistral's"
        assert "Sunny." in text
        assert "by weather" in text or name != "mistral"
    assert '"description": "Tells the weather."' in text
    assert ('\n    "type": "function"' in text) == (name == "llama3_json"), "indented as the template wants it"
    assert '"$ref": "#/$defs/N"' in text


def test_a_repeated_id_belongs_to_the_call_before_the_result() -> None:
    """Clients that send one request id in every turn get the same ids of calls in every turn."""
    model = model_of("mistral")
    messages = list(QUESTION)
    for name in ("weather", "count"):
        called = Message("assistant", "", (ToolCall("call12345", name, "{}"),))
        messages += [called, Message("tool", f"{name} says.", (), "call12345")]
    tokens = whole_prompt(ChatPrompt(tuple(messages), TOOLS), model.tokens, 270)
    text = b"".join(map(model.tokens.token_bytes, tokens)).decode()
    assert "weather says. by weather" in text
    assert "count says. by count" in text


def test_input_that_a_template_would_leave_out_is_refused() -> None:
    tokens = Tokenizer(tokenizer_with(NO_TOOLS, []))
    call = ToolCall("a", "f", "{}")
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[1\]\.tool_calls: must be left out, as this model's"):
        whole_prompt(ChatPrompt((*QUESTION, Message("assistant", "", (call,)))), tokens, 270)
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[0\]\.role: must be another than tool, which this"):
        whole_prompt(ChatPrompt((Message("tool", "x", (), "a"),)), tokens, 270)
    for choice in (ToolChoice.AUTO, ToolChoice.NONE):
        with pytest.raises(InvalidRequest, match=r"chat\.tools: must be left out, as this model's chat template"):
            whole_prompt(ChatPrompt(QUESTION, replace(TOOLS, choice=choice)), tokens, 270)
    llama = model_of("llama3_json").tokens
    with pytest.raises(InvalidRequest, match="rejects these messages: This model only supports single tool-calls"):
        whole_prompt(ChatPrompt((*QUESTION, Message("assistant", "", (call, call)))), llama, 270)


async def test_unsupported_requests_are_named() -> None:
    model = model_of("hermes")
    odd = replace(MUST, functions=(FUNCTIONS[0], Function("odd", '{"type": "object", "not": {}}')))
    with pytest.raises(InvalidRequest, match=r"^chat\.tools\[1\]\.function\.parameters: must .* Unimplemented keys"):
        await model.form(odd)
    assert await model.form(replace(odd, choice=ToolChoice.AUTO)) == ("", {}), "nobody asked for its schema"
    long = Function("long", f'{{"type": "object", "properties": {{"{"x" * 140_000}": {{}}}}}}')
    with pytest.raises(InvalidRequest, match=r"^chat\.tools\[0\]\.function\.parameters: must be at most 131072 char"):
        await model.form(replace(MUST, functions=(long,)))
    half = Function("half", f'{{"type": "object", "properties": {{"{"x" * 70_000}": {{}}}}}}')
    with pytest.raises(InvalidRequest, match=r"^chat\.tools: must be at most 131072 characters"):
        await model.form(replace(MUST, functions=(half, replace(half, name="other"))))
    for options, name in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_tokens")):
        with pytest.raises(InvalidRequest, match=f"^{name}: must be "):
            await model.form(MUST, **options)
        await model.form(TOOLS, **options)
    large = Constraint(json_schema=half.parameters)
    with pytest.raises(InvalidRequest, match=r"^constraint: must be at most 131072 characters with tools, got"):
        await model.form(Tools((replace(half, is_strict=True),)), constraint=large)
    assert (await model.form(replace(TOOLS, choice=ToolChoice.NONE), constraint=Constraint(regex="a")))[0]
