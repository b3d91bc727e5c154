"""Conversion of the client API's requests, events and server information to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from bough.errors import InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.protocol import generation as g
from bough.protocol.codec_fields import from_fields, read, to_fields
from bough.protocol.sampling_params import MAX_LOGPROBS, MAX_UINT32, PARAMETERS, Sampling
from bough.trees.tree_plan import require_growth

DEFAULTS = g.GenerateOptions()
SAMPLING = frozenset(field.name for field in fields(Sampling))  # options that are fields of the message `sampling`
OTHERS = frozenset(field.name for field in fields(g.GenerateOptions)) - SAMPLING
EVENTS: dict[str, type[g.Event]] = {  # by the names of their fields
    "started": g.Started,
    "prompt_logprobs": g.PromptLogprobs,
    "tokens": g.Tokens,
    "finished": g.Finished,
}
_MOST = {name: int(parameter.most) for name, parameter in PARAMETERS.items() if parameter.kind is int}  # of numbers
# prompt_logprobs come last: they are `logprobs` over HTTP, so if both are wrong, errors must name the other field.
_MOST |= {"max_tokens": MAX_UINT32, "prompt_logprobs": MAX_LOGPROBS}


def request_to_wire(prompt: g.Prompt, options: g.GenerateOptions) -> pb.GenerateRequest:
    """Convert a request; fields at their default stay unset.

    Raises:
        InvalidRequest: names a number or text that protobuf cannot carry; the orchestrator checks the rest.
    """
    require_numbers(prompt, options)
    require_texts(prompt, options)
    unset = [f.name for f in fields(options) if getattr(options, f.name) == getattr(DEFAULTS, f.name)]
    sampling = to_fields(options, *unset, *OTHERS)
    message = pb.GenerateRequest(**to_fields(options, *unset, *SAMPLING), sampling=sampling or None)
    match prompt:
        case g.TextPrompt(text):
            message.text = text
        case g.ChatPrompt(messages, tools, kwargs):
            if tools is not None or any(one.tool_calls or one.tool_call_id for one in messages):
                raise InvalidRequest(
                    "chat.tools", "must be left out, tool calls in messages too: they are for HTTP only"
                )
            message.chat.SetInParent()
            message.chat.chat_template_kwargs = kwargs
            message.chat.messages.extend(
                pb.ChatMessage(role=m.role, content=m.content, reasoning=m.reasoning) for m in messages
            )
        case g.TokenPrompt(token_ids):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)
    return message


def request_from_wire(message: pb.GenerateRequest) -> tuple[g.Prompt, g.GenerateOptions]:
    """Convert a request; raises InvalidRequest without a prompt. Ranges are checked once the model is known."""
    if message.sampling.grammar:
        raise InvalidRequest("sampling.grammar", "must be left out, as requests have a constraint instead")
    sampling = from_fields(message.sampling, g.GenerateOptions, *OTHERS)
    options = g.GenerateOptions(**sampling, **from_fields(message, g.GenerateOptions, *SAMPLING))
    return _prompt_from_wire(message), options


def _prompt_from_wire(message: pb.GenerateRequest) -> g.Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return g.TextPrompt(message.text)
        case "chat":
            messages = tuple(g.Message(m.role, m.content, reasoning=m.reasoning) for m in message.chat.messages)
            return g.ChatPrompt(messages, chat_template_kwargs=message.chat.chat_template_kwargs)
        case "token_ids":
            return g.TokenPrompt(tuple(message.token_ids.ids))
        case _:
            raise InvalidRequest("prompt", "must be text, chat or token_ids", "none")


def event_to_wire(event: g.Event) -> pb.GenerateEvent:
    """The message of an event of any kind."""
    (name,) = (name for name, kind in EVENTS.items() if isinstance(event, kind))
    return pb.GenerateEvent(**{name: to_fields(event)})


def event_from_wire(message: pb.GenerateEvent) -> g.Event:
    """The event of a message, of any kind."""
    name = message.WhichOneof("event") or "finished"
    return read(getattr(message, name), EVENTS[name])


def models_to_wire(models: Sequence[g.ModelInfo]) -> pb.ModelInfo:
    """The first model's message, which lists all models; there must be at least one."""
    return pb.ModelInfo(**to_fields(models[0]), models=map(to_fields, models))


def models_from_wire(message: pb.ModelInfo) -> tuple[g.ModelInfo, ...]:
    """All listed models; the message's own model if an older orchestrator lists none."""
    return tuple(read(model, g.ModelInfo) for model in message.models or [message])


def require_numbers(prompt: g.Prompt, options: g.GenerateOptions) -> None:
    """Raises InvalidRequest for a number outside its protobuf type; the orchestrator checks the rest."""
    tokens = prompt.token_ids if isinstance(prompt, g.TokenPrompt) else ()
    speculation = options.speculation
    numbers = (
        *((name, getattr(options, name), most) for name, most in _MOST.items()),
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


def require_texts(prompt: g.Prompt, options: g.GenerateOptions) -> None:
    """Raises InvalidRequest for a text with surrogates, which cannot be encoded as UTF-8."""
    texts = [(name, getattr(options, name)) for name in ("request_id", "session_id", "model", "cache_salt")]
    texts += [(f"stop[{i}]", stop) for i, stop in enumerate(options.stop)]
    if (constraint := options.constraint) is not None:
        names = ("json_schema", "regex", "lark")
        texts += [(f"constraint.{name}", getattr(constraint, name) or "") for name in names]
        texts.append(("constraint.choices", "".join(constraint.choices)))
    match prompt:
        case g.TextPrompt(text):
            texts.append(("text", text))
        case g.ChatPrompt(messages, tools, kwargs):
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
