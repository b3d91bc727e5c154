"""A model's chat template: how a conversation, or the next turn of one, is spelled as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from bough.errors import InvalidRequest

Messages = Sequence[tuple[str, str]]  # role and content of each

_MARK = "Zyx"  # an answer that no template takes to pieces, and that stands in no template
_QUESTION, _OTHER_TURN = ("user", "Tsr"), [("user", "Wvu")]
_CANNOT_CONTINUE = (
    "continues: true, but this model's chat template spells a new turn differently from one history to another; the "
    "full history, with continues false, would do"
)


class ChatTemplate:
    """Renders conversations. A template that cannot be read refuses them all, and says why."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._template: jinja2.Template | None = None
        self._problem = "this model has no chat template"
        if source:
            try:
                self._template = _compile(source)
            except jinja2.TemplateError as exc:
                self._problem = f"this model's chat template cannot be read: {exc}"

    def render(self, messages: Messages) -> str:
        """A conversation, opened for the assistant's answer."""
        if self._template is None:
            raise InvalidRequest(f"chat: {self._problem}; `text` or `token_ids` would do")
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError) as exc:
            raise InvalidRequest(f"chat: the model's chat template refuses these messages: {exc}") from exc

    def render_turn(self, messages: Messages) -> str:
        """What comes after the text of an assistant's answer when these messages follow it, opened for the next one.

        It is read off a made-up conversation. That is right where what comes after an answer does not depend on the
        history, and what comes before does not depend on the new messages.

        Raises:
            InvalidRequest: it does, or the template refuses the messages.
        """
        mark = _mark_beside([content for _, content in messages])
        once: Messages = [_QUESTION, ("assistant", mark)]
        before, after = self._around(mark, once, messages)
        _, after_more = self._around(mark, [_QUESTION, ("assistant", "Qpo"), *once], messages)
        before_other, _ = self._around(mark, once, _OTHER_TURN)
        if after != after_more or before != before_other:
            raise InvalidRequest(_CANNOT_CONTINUE)
        return after

    def _around(self, mark: str, history: Messages, messages: Messages) -> tuple[str, str]:
        before, found, after = self.render([*history, *messages]).rpartition(mark)
        if not found or mark in before:
            raise InvalidRequest(_CANNOT_CONTINUE)
        return before, after


def _mark_beside(contents: Sequence[str]) -> str:
    """A mark that is in none of them, found in one look at each: trying one after another could take hours."""
    runs = [len(run) for content in contents for run in re.findall(f"{_MARK}(y*)", content)]
    return _MARK + "y" * (max(runs) + 1) if runs else _MARK


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark the assistant's part for training: its body stands as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)
