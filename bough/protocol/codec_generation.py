"""Conversion of the client API's requests, events and server information to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from bough.errors import InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.protocol import generation as g
from bough.protocol.codec_checks import require_numbers, require_texts
from bough.protocol.codec_fields import from_fields, read, to_fields
from bough.protocol.sampling_params import Sampling

DEFAULTS = g.GenerateOptions()
SAMPLING = frozenset(field.name for field in fields(Sampling))  # options that are fields of the message `sampling`
OTHERS = frozenset(field.name for field in fields(g.GenerateOptions)) - SAMPLING
EVENTS: dict[str, type[g.Event]] = {  # by the names of their fields
    "started": g.Started,
    "prompt_logprobs": g.PromptLogprobs,
    "tokens": g.Tokens,
    "finished": g.Finished,
}


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
    """All listed models; the message's own model where an older orchestrator lists none."""
    return tuple(read(model, g.ModelInfo) for model in message.models or [message])
