"""Variables that a request sets in its chat template, such as "enable_thinking", from the JSON that it sends."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from bough.errors import InvalidRequest
from bough.tokenization.chat_template import NONE, RESERVED, Variables

FIELD = "chat.chat_template_kwargs"
MAX_LENGTH = 16 * 1024  # characters of JSON
MAX_DEPTH = 8  # of lists and objects in one another
MAX_NUMBER = 10**7  # a template may repeat a text so often
EFFORT, NO_EFFORT = "reasoning_effort", "none"
SWITCHES = ("enable_thinking", "thinking")  # of Qwen, GLM and others; of DeepSeek and Granite
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@lru_cache(maxsize=64)  # a request asks for its choices and for its prompt
def template_variables(text: str) -> Variables:
    """The variables of a JSON object, with the switches that "reasoning_effort" implies unless they are in it.

    An effort of "none" switches thoughts off, another one switches them on: few templates read the effort itself.

    Raises:
        InvalidRequest: it is no such object, or has a variable that no request may set.
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
    """Refuse numbers and depths by which a template could be made to do much work."""
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
