"""A model's chat template, which renders a conversation, or its next turn, as text, and its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, lru_cache

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from bough.errors import InvalidRequest

Messages = Sequence[tuple[str, str]]  # role and content of each
Objects = Sequence[Mapping[str, object]]  # messages, or tools, with all fields that a template may read
Variables = Mapping[str, object]  # additional ones that a request sets, such as "enable_thinking"
NONE: Variables = {}
# Variables of the server or of the template language, which requests may not set.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
    | {"raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE}
)

_MARK = "Zyx"  # a placeholder answer that templates neither change nor contain
_QUESTION, _OTHER_TURN = ("user", "Tsr"), [("user", "Wvu")]
_CANNOT_CONTINUE = (
    "must be false, with the full history: this model's chat template renders a new turn differently from "
    "one history to another"
)
FIELD = "chat.chat_template_kwargs"  # the JSON of variables that a request sets
MAX_LENGTH = 16 * 1024  # characters of JSON
MAX_DEPTH = 8  # nesting of lists and objects
MAX_NUMBER = 10**7  # largest number, as a template may repeat a text that often
EFFORT, NO_EFFORT = "reasoning_effort", "none"
SWITCHES = ("enable_thinking", "thinking")  # of Qwen, GLM and others; of DeepSeek and Granite
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class ChatTemplate:
    """Renders conversations; without a valid template, every call raises InvalidRequest with the reason."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._template: jinja2.Template | None = None
        self._problem = "this model has no chat template"
        if source:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as exc:
                self._problem = f"this model's chat template cannot be read: {exc}"

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that it reads, such as "messages" and, if it supports tools, "tools"."""
        if self._template is None:
            return frozenset()
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))

    def render(self, messages: Messages, variables: Variables = NONE) -> str:
        """Render a conversation up to the start of the assistant's answer."""
        return self.render_objects([{"role": role, "content": content} for role, content in messages], (), variables)

    def render_objects(self, messages: Objects, tools: Objects = (), variables: Variables = NONE) -> str:
        """Render a conversation as `render` does, with the tools that the assistant may call."""
        if self._template is None:
            raise InvalidRequest("chat", f"{self._problem}; the prompt must be `text` or `token_ids`")
        try:
            # Templates expect transformers' behaviour, which passes None without tools.
            own = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": True}
            return self._template.render({**variables, **own, **self._special})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as exc:
            what = "these messages, or what chat_template_kwargs says" if variables else "these messages"
            raise InvalidRequest("chat", f"the model's chat template rejects {what}: {exc}") from exc

    def render_turn(self, messages: Messages, variables: Variables = NONE) -> str:
        """Render the text between an assistant's answer and the next one, with `messages` in between.

        It is extracted from a made-up conversation, which is correct if that text does not depend on the history and
        the text before it does not depend on `messages`.

        Raises:
            InvalidRequest: one of them does, or the template rejects the messages.
        """
        mark = _mark_beside([content for _, content in messages])
        once: Messages = [_QUESTION, ("assistant", mark)]
        before, after = self._around(mark, once, messages, variables)
        _, after_more = self._around(mark, [_QUESTION, ("assistant", "Qpo"), *once], messages, variables)
        before_other, _ = self._around(mark, once, _OTHER_TURN, variables)
        if after != after_more or before != before_other:
            raise InvalidRequest("continues", _CANNOT_CONTINUE)
        return after

    def _around(self, mark: str, history: Messages, messages: Messages, variables: Variables) -> tuple[str, str]:
        before, found, after = self.render([*history, *messages], variables).rpartition(mark)
        if not found or mark in before:
            raise InvalidRequest("continues", _CANNOT_CONTINUE)
        return before, after


def _mark_beside(contents: Sequence[str]) -> str:
    """A placeholder that occurs in no text, found in one pass: trying one after another could take hours."""
    runs = [len(run) for content in contents for run in re.findall(f"{_MARK}(y*)", content)]
    return _MARK + "y" * (max(runs) + 1) if runs else _MARK


class _GenerationTag(jinja2.ext.Extension):
    """Parses `{% generation %}`, which marks the assistant's part for training, as its body only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tag and its end tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)  # called for both the choices and the prompt of a request
def template_variables(text: str) -> Variables:
    """The variables of a JSON object, with the switches that "reasoning_effort" implies unless they are in it.

    An effort of "none" switches reasoning off, any other switches it on: few templates read the effort itself.

    Raises:
        InvalidRequest: it is not a JSON object, or has a variable that requests may not set.
    """
    if not text:
        return NONE
    if len(text) > MAX_LENGTH:
        raise InvalidRequest(FIELD, f"must have at most {MAX_LENGTH} characters as JSON", len(text))
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(FIELD, "must be a JSON object", repr(text[:64])) from exc
    if not isinstance(given, dict):
        raise InvalidRequest(FIELD, "must be a JSON object", repr(text[:64]))
    for name, value in given.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise InvalidRequest(FIELD, "must have names of variables that the server does not set", repr(name))
        _require_plain(name, value, MAX_DEPTH)
    effort = given.get(EFFORT)
    switches = dict.fromkeys(SWITCHES, effort != NO_EFFORT) if effort is not None else {}
    return switches | given


def _require_plain(name: str, value: object, depth: int) -> None:
    """Refuse numbers and depths that could make a template run for long."""
    match value:
        case bool() | str() | None:
            return
        case int() | float() if abs(value) <= MAX_NUMBER:  # not so for NaN
            return
        case int() | float():
            raise InvalidRequest(FIELD, f"must have numbers of {-MAX_NUMBER} to {MAX_NUMBER}", f"one in {name!r}")
        case dict() | list() if depth:
            for inner in [*value.values()] if isinstance(value, dict) else value:
                _require_plain(name, inner, depth - 1)
            return
    raise InvalidRequest(FIELD, f"must be at most {MAX_DEPTH} lists and objects deep", f"more in {name!r}")
