"""Checks of numbers and texts that protobuf cannot carry; protobuf's own errors do not name the field."""

from __future__ import annotations

from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, GenerateOptions, Prompt, TextPrompt, TokenPrompt
from bough.protocol.sampling_params import MAX_LOGPROBS, MAX_UINT32, PARAMETERS
from bough.trees.tree_plan import require_growth

_NUMBERS = {name: int(parameter.most) for name, parameter in PARAMETERS.items() if parameter.kind is int}
_NUMBERS |= {"max_tokens": MAX_UINT32, "prompt_logprobs": MAX_LOGPROBS}


def require_numbers(prompt: Prompt, options: GenerateOptions) -> None:
    """Raises InvalidRequest for a number outside its protobuf type; the orchestrator checks the rest."""
    tokens = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
    speculation = options.speculation
    numbers = (
        *((name, getattr(options, name), most) for name, most in _NUMBERS.items()),
        *(("stop_token_ids", token, MAX_UINT32) for token in options.stop_token_ids),
        *((f"logit_bias[{token}]", token, MAX_UINT32) for token in options.logit_bias),
        *((f"speculation.{n}", getattr(speculation, n), MAX_UINT32) for n in ("budget", "width", "depth", "lookup")),
        *((f"token_ids[{i}]", token, MAX_UINT32) for i, token in enumerate(tokens)),
    )
    for name, value, most in numbers:
        least = 1 if name == "max_tokens" and options.prompt_logprobs is None else 0
        if value is not None and not least <= value <= most:
            raise InvalidRequest(name, f"must be {least} to {most}", value)
    if speculation.growth is not None:
        require_growth("speculation.growth", speculation.growth, MAX_UINT32)


def require_texts(prompt: Prompt, options: GenerateOptions) -> None:
    """Raises InvalidRequest for a text with surrogates, which stand for bytes that are not UTF-8 and cannot be sent."""
    texts = [(name, getattr(options, name)) for name in ("request_id", "session_id", "model", "cache_salt")]
    texts += [(f"stop[{i}]", stop) for i, stop in enumerate(options.stop)]
    if (constraint := options.constraint) is not None:
        names = ("json_schema", "regex", "lark")
        texts += [(f"constraint.{name}", getattr(constraint, name) or "") for name in names]
        texts.append(("constraint.choices", "".join(constraint.choices)))
    match prompt:
        case TextPrompt(text):
            texts.append(("text", text))
        case ChatPrompt(messages, tools, kwargs):
            texts.append(("chat.chat_template_kwargs", kwargs))
            for i, message in enumerate(messages):
                place, calls = f"chat.messages[{i}]", message.tool_calls
                texts += [(f"{place}.{name}", getattr(message, name)) for name in ("role", "content", "reasoning")]
                texts += [(f"{place}.tool_calls", f"{call.name}{call.arguments}") for call in calls]
            for i, function in enumerate(tools.functions if tools else ()):
                texts.append((f"chat.tools[{i}].function", f"{function.description or ''}{function.parameters}"))
    for name, text in texts:
        require_text(name, text)


def require_text(name: str, text: str) -> str:
    """Returns the text; raises InvalidRequest, naming the field, if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            name, "must be UTF-8", f"{text[exc.start : exc.start + 16]!r} at character {exc.start}"
        ) from exc
    return text
