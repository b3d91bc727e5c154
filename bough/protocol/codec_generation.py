"""Conversion of the client API's requests, events and server information to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from bough.errors import InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.protocol import generation as g
from bough.protocol.codec_checks import require_numbers, require_texts
from bough.protocol.codec_fields import from_fields, read, to_fields
from bough.protocol.codec_trees import SCHEMES, growth_from_wire, growth_to_wire, scheme_from_wire
from bough.protocol.decision import Decision, DraftCalibration, Mode
from bough.trees.acceptance import DepthCounts, SchemeAcceptance

DEFAULTS = g.GenerateOptions()


def request_to_wire(prompt: g.Prompt, options: g.GenerateOptions) -> pb.GenerateRequest:
    """Convert a request; fields at their default stay unset.

    Raises:
        InvalidRequest: names a number or text that protobuf cannot carry; the orchestrator checks the rest.
    """
    require_numbers(prompt, options)
    require_texts(prompt, options)
    given = {f.name for f in fields(options) if getattr(options, f.name) != getattr(DEFAULTS, f.name)}
    unset = {f.name for f in fields(options)} - given
    message = pb.GenerateRequest(
        speculation=_speculation_to_wire(options.speculation), **to_fields(options, "speculation", *unset)
    )
    match prompt:
        case g.TextPrompt(text):
            message.text = text
        case g.ChatPrompt(messages, tools, kwargs):
            if tools is not None or any(one.tool_calls or one.tool_call_id for one in messages):
                raise InvalidRequest("chat.tools: must be left out, tool calls in messages too: they are for HTTP only")
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
    options = g.GenerateOptions(
        speculation=_speculation_from_wire(message.speculation),
        **from_fields(message, g.GenerateOptions, "speculation"),
    )
    return _prompt_from_wire(message), options


def _speculation_to_wire(speculation: g.Speculation) -> pb.Speculation:
    return pb.Speculation(
        **to_fields(speculation, "growth", "scheme"),
        growth=None if speculation.growth is None else growth_to_wire(speculation.growth),
        scheme=SCHEMES[speculation.scheme],
    )


def _speculation_from_wire(message: pb.Speculation) -> g.Speculation:
    return g.Speculation(
        **from_fields(message, g.Speculation, "growth", "scheme"),
        growth=growth_from_wire(message.growth) if message.HasField("growth") else None,
        scheme=scheme_from_wire("speculation.scheme", message.scheme),
    )


def _prompt_from_wire(message: pb.GenerateRequest) -> g.Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return g.TextPrompt(message.text)
        case "chat":
            said = tuple(g.Message(m.role, m.content, reasoning=m.reasoning) for m in message.chat.messages)
            return g.ChatPrompt(said, chat_template_kwargs=message.chat.chat_template_kwargs)
        case "token_ids":
            return g.TokenPrompt(tuple(message.token_ids.ids))
        case _:
            raise InvalidRequest("prompt: must be text, chat or token_ids, got none")


def event_to_wire(event: g.Event) -> pb.GenerateEvent:
    """The message of an event of any kind."""
    match event:
        case g.Started():
            return pb.GenerateEvent(started=to_fields(event))
        case g.PromptLogprobs():
            return pb.GenerateEvent(prompt_logprobs=to_fields(event))
        case g.Tokens():
            return pb.GenerateEvent(tokens=to_fields(event))
        case g.Finished():
            return pb.GenerateEvent(finished=to_fields(event))


def event_from_wire(message: pb.GenerateEvent) -> g.Event:
    """The event of a message, of any kind."""
    if message.HasField("started"):
        return read(message.started, g.Started)
    if message.HasField("prompt_logprobs"):
        return read(message.prompt_logprobs, g.PromptLogprobs)
    return read(message.tokens, g.Tokens) if message.HasField("tokens") else read(message.finished, g.Finished)


def models_to_wire(models: Sequence[g.ModelInfo]) -> pb.ModelInfo:
    """The first model's message, which lists all models; there must be at least one."""
    return pb.ModelInfo(**to_fields(models[0]), models=map(to_fields, models))


def models_from_wire(message: pb.ModelInfo) -> tuple[g.ModelInfo, ...]:
    """All listed models; the message's own model where an older orchestrator lists none."""
    return tuple(read(model, g.ModelInfo) for model in message.models or [message])


def acceptance_to_wire(counted: Sequence[SchemeAcceptance], drafts: Sequence[DraftCalibration]) -> pb.Acceptance:
    """The message of all that was counted."""
    schemes = [
        pb.SchemeAcceptance(scheme=SCHEMES[one.scheme], num_rounds=one.num_rounds, depths=map(to_fields, one.by_depth))
        for one in counted
    ]
    return pb.Acceptance(schemes=schemes, drafts=map(to_fields, drafts))


def acceptance_from_wire(message: pb.Acceptance) -> tuple[SchemeAcceptance, ...]:
    """What was counted by scheme; raises InvalidRequest for an unknown scheme."""
    return tuple(
        SchemeAcceptance(
            scheme_from_wire("schemes.scheme", one.scheme),
            one.num_rounds,
            tuple(read(depth, DepthCounts) for depth in one.depths),
        )
        for one in message.schemes
    )


def calibrations_from_wire(message: pb.Acceptance) -> tuple[DraftCalibration, ...]:
    """What was counted by draft worker."""
    return tuple(read(draft, DraftCalibration) for draft in message.drafts)


def decisions_to_wire(decisions: Sequence[Decision]) -> pb.Decisions:
    """The message of decisions about rounds."""
    return pb.Decisions(decisions=[to_fields(one, "mode") | {"mode": one.mode.value} for one in decisions])


def decisions_from_wire(message: pb.Decisions) -> tuple[Decision, ...]:
    """The decisions of a message; raises InvalidRequest for an unknown mode."""
    return tuple(
        Decision(mode=_mode_from_wire(decision.mode), **from_fields(decision, Decision, "mode"))
        for decision in message.decisions
    )


def _mode_from_wire(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError as exc:
        known = ", ".join(mode.value for mode in Mode)
        raise InvalidRequest(f"decisions.mode: must be one of {known}, got {text!r}") from exc
