"""A model's format of calls is that of its template, and outputs of its grammars are texts of which calls are read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from bough.config.processes import TOOL_FORMATS
from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import Grammars
from bough.protocol.generation import (
    ChatPrompt,
    Constraint,
    Function,
    GenerateOptions,
    Message,
    ToolCall,
    ToolChoice,
    Tools,
)
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.opening.output_form import output_form
from orchestrator.opening.prompt import whole_prompt
from orchestrator.sessions.detokenizer import TextStream
from orchestrator.tools.call_object import ArgumentsText, CallBegun
from orchestrator.tools.call_parser import ContentText
from orchestrator.tools.formats import FORMATS, format_of

# As checkpoints have them, shortened.
HERMES = (
    "{%- if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)  # fmt: skip
LLAMA = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}Respond in the format {\"name\": function name, \"parameters\": dictionary}.\n"
    "{%- for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if 'tool_calls' in m %}{%- if m.tool_calls | length > 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": "
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{%- elif m.role == 'tool' %}ipython: {{ m.content | tojson }}<|eot_id|>"
    "{%- else %}{{ m.role }}: {{ m.content }}<|eot_id|>{%- endif %}{%- endfor %}assistant: "
)  # fmt: skip
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS] "
    "{{- tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] "
    "}}"
    "{%- if call.id | length < 9 %}{{ raise_exception('Tool call IDs should have length >= 9!') }}{%- endif %}"
    ", \"id\": \"{{ call.id[-9:] }}\"}{%- endfor %}]</s>"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} by {{ m.name }}[/TOOL_RESULTS]"
    "{%- else %}{{ m.content }}</s>{%- endif %}{%- endfor %}"
)  # fmt: skip
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QWEN_CODER = HERMES + "<function=example>"
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],  # tokens, but not special ones
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
}

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
QUESTION = (Message("user", "Weather?"),)


def tokenizer_with(template: str, tokens: list[str], is_special: bool = True) -> TokenizerFiles:
    """Of bytes, with an end and other tokens of whole texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<think>"])
    tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in tokens])
    return TokenizerFiles(tokenizer.to_str().encode(), template, (256,), "", "</s>")


class Model(NamedTuple):
    """A tokenizer whose template has a format."""

    files: TokenizerFiles
    tokens: Tokenizer

    async def form(self, tools: Tools, **options: object) -> tuple[str, dict[int, str]]:
        prompt = ChatPrompt(QUESTION, tools)
        grammar, shown = await output_form(prompt, GenerateOptions(**options), self.tokens, "auto")  # type: ignore[arg-type]
        return grammar, dict(shown)

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text may be a whole output."""
        allowed = Grammars(self.files, 270).along(grammar, None)
        assert allowed is not None
        mask = allowed.after(self.tokens.encode_more(text))
        return mask is not None and bool(mask[256])


def model_of(name: str, *, has_tokens: bool = True) -> Model:
    files = tokenizer_with(TEMPLATES[name], MARKS[name] if has_tokens else [], is_special=name != "hermes")
    return Model(files, Tokenizer(files))


def written(name: str, *calls: str) -> str:
    """Calls as the family's template writes them."""
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(calls)}]"
    return calls[0].replace("arguments", "parameters")


ROME, OSLO = (f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' for city in ("Rome", "Oslo"))
TWO, WORD = '{"name": "count", "arguments": {"n": 2}}', '{"name": "count", "arguments": {"n": "two"}}'


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_tells_its_format_unless_one_is_named(name: str) -> None:
    assert format_of("auto", ChatTemplate(TEMPLATES[name], "", "")).name == name
    assert format_of("hermes", ChatTemplate(QWEN_CODER, "", "")) is FORMATS["hermes"]
    with pytest.raises(
        InvalidRequest, match=r"chat\.tools: .* in none of the known ways, hermes, llama3_json, mistral"
    ):
        format_of("auto", ChatTemplate(QWEN_CODER, "", ""))
    for source in (NO_TOOLS, "", "{% if"):
        with pytest.raises(
            InvalidRequest, match=r"chat\.tools: must be left out, as this model's chat template does not"
        ):
            format_of(name, ChatTemplate(source, "", ""))


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_a_demand_for_calls_allows_nothing_else(name: str, has_tokens: bool) -> None:
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


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_what_is_no_call_has_the_form_that_is_asked_for(name: str) -> None:
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
@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_strict_functions_are_called_as_they_must_be_where_the_model_decides(name: str, has_tokens: bool) -> None:
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
    if name == "hermes":
        assert model.allows(grammar, f"{written(name, ROME)}\n{written(name, TWO)} Done.")
    single, _ = await model.form(replace(TOOLS, allows_several=False))
    assert model.allows(single, written(name, WORD))
    assert name == "llama3_json" or not model.allows(single, written(name, ROME, TWO))


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_marks_that_text_leaves_out_reach_the_parser(name: str) -> None:
    """Special tokens are part of the text only where they are a mark; others are left out as ever."""
    model = model_of(name)
    _, shown = await model.form(TOOLS)
    assert set(shown.values()) == (set() if name == "hermes" else set(MARKS[name]))
    stream = TextStream(lambda tokens: model.tokens.decode_showing(tokens, shown))
    output = model.tokens.encode_more(
        "Wél<think>l, " + (written(name, ROME) if name != "llama3_json" else f"<|python_tag|>{ROME}")
    )
    parser = FORMATS[name].parser(TOOLS)
    pieces = [piece for token in output for piece in parser.push(stream.push(token).text)]
    pieces += parser.push(stream.finish()) + parser.finish()
    assert "".join(p.text for p in pieces if isinstance(p, ContentText)) == "Wéll,"
    assert [p.name for p in pieces if isinstance(p, CallBegun)] == ["weather"]
    assert json.loads("".join(p.text for p in pieces if isinstance(p, ArgumentsText))) == {"city": "Rome"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_templates_are_given_tools_calls_and_answers(name: str) -> None:
    model = model_of(name)
    call, answer = ToolCall("call12345", "weather", '{"city":"Rome"}'), Message("tool", "Sunny.", (), "call12345")
    messages = (*QUESTION, Message("assistant", "", (call,)), answer)
    text = model.tokens.template.render([("user", "Weather?")])
    for prompt in (ChatPrompt(messages, TOOLS), ChatPrompt((*messages, *QUESTION), TOOLS)):
        text = b"".join(map(model.tokens.token_bytes, whole_prompt(prompt, model.tokens, 270))).decode()
        assert '"arguments": {"city": "Rome"}' in text or '"parameters": {"city": "Rome"}' in text, text
        assert "Sunny." in text
        assert "by weather" in text or name != "mistral"
    assert '"description": "Tells the weather."' in text
    assert ('\n    "type": "function"' in text) == (name == "llama3_json"), "indented as the template wants it"
    assert '"$ref": "#/$defs/N"' in text


def test_an_id_that_comes_again_is_of_the_call_before_the_answer() -> None:
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


def test_what_a_template_would_leave_out_is_refused() -> None:
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


async def test_what_cannot_be_had_is_named() -> None:
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


def test_every_format_that_can_be_named_is_there() -> None:
    assert tuple(FORMATS) == TOOL_FORMATS
