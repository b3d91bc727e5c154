"""Conversion of the client API's requests, events and server information to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from bough.errors import InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.protocol import generation as g
from bough.protocol.codec import (
    info_from_wire,
    info_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
)
from bough.protocol.codec_checks import require_numbers, require_texts
from bough.protocol.codec_costs import round_timings_from_wire, round_timings_to_wire
from bough.protocol.codec_trees import SCHEMES, growth_from_wire, growth_to_wire, guess_from_wire, scheme_from_wire
from bough.protocol.decision import DraftCalibration
from bough.trees.acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree_plan import Guess

# Optional fields, with the same names on both sides; unset means the default of GenerateOptions.
_OPTIONAL = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "logprobs",
)


def request_to_wire(prompt: g.Prompt, options: g.GenerateOptions) -> pb.GenerateRequest:
    """Convert a request; fields at their default stay unset.

    Raises:
        InvalidRequest: names a number or text that protobuf cannot carry; the orchestrator checks the rest.
    """
    require_numbers(prompt, options)
    require_texts(prompt, options)
    message = pb.GenerateRequest(
        request_id=options.request_id,
        session_id=options.session_id,
        model=options.model,
        cache_salt=options.cache_salt,
        logit_bias=dict(options.logit_bias),
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        speculation=_speculation_to_wire(options.speculation),
        continues=options.continues,
        resume=None if options.resume is None else pb.Resume(**asdict(options.resume)),
    )
    defaults = g.GenerateOptions()
    for name in _OPTIONAL:
        value = getattr(options, name)
        if value != getattr(defaults, name):
            setattr(message, name, value)
    match prompt:
        case g.TextPrompt(text):
            message.text = text
        case g.ChatPrompt(messages):
            message.chat.SetInParent()
            message.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in messages)
        case g.TokenPrompt(token_ids):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)
    return message


def request_from_wire(message: pb.GenerateRequest) -> tuple[g.Prompt, g.GenerateOptions]:
    """Convert a request; raises InvalidRequest without a prompt. Ranges are checked once the model is known."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    options = g.GenerateOptions(
        request_id=message.request_id,
        session_id=message.session_id,
        model=message.model,
        cache_salt=message.cache_salt,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        speculation=_speculation_from_wire(message.speculation),
        continues=message.continues,
        resume=g.Resume(message.resume.num_tokens, tuple(message.resume.token_ids))
        if message.HasField("resume")
        else None,
        **given,
    )
    return _prompt_from_wire(message), options


def _speculation_to_wire(speculation: g.Speculation) -> pb.Speculation:
    return pb.Speculation(
        disabled=speculation.disabled,
        budget=speculation.budget,
        width=speculation.width,
        depth=speculation.depth,
        growth=None if speculation.growth is None else growth_to_wire(speculation.growth),
        scheme=SCHEMES[speculation.scheme],
        guess_distribution=speculation.guess is Guess.DISTRIBUTION,
        lookup=speculation.lookup,
    )


def _speculation_from_wire(message: pb.Speculation) -> g.Speculation:
    return g.Speculation(
        disabled=message.disabled,
        budget=message.budget if message.HasField("budget") else None,
        width=message.width if message.HasField("width") else None,
        depth=message.depth if message.HasField("depth") else None,
        growth=growth_from_wire(message.growth) if message.HasField("growth") else None,
        scheme=scheme_from_wire("speculation.scheme", message.scheme),
        guess=guess_from_wire(message.guess_distribution),
        lookup=message.lookup if message.HasField("lookup") else None,
    )


def _prompt_from_wire(message: pb.GenerateRequest) -> g.Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return g.TextPrompt(message.text)
        case "chat":
            return g.ChatPrompt(tuple(g.Message(m.role, m.content) for m in message.chat.messages))
        case "token_ids":
            return g.TokenPrompt(tuple(message.token_ids.ids))
        case _:
            raise InvalidRequest("prompt: must be text, chat or token_ids, got none")


def event_to_wire(event: g.Event) -> pb.GenerateEvent:
    """Convert an event of any kind."""
    match event:
        case g.Started():
            return pb.GenerateEvent(started=pb.Started(**asdict(event)))
        case g.Tokens():
            return pb.GenerateEvent(
                tokens=pb.Tokens(
                    token_ids=event.token_ids,
                    drafted=event.drafted,
                    texts=event.texts,
                    logprobs=map(logprobs_to_wire, event.logprobs),
                    num_nodes=event.num_nodes,
                    tree_depth=event.tree_depth,
                    timings=round_timings_to_wire(event.timings),
                    num_lookup=event.num_lookup,
                )
            )
        case g.Finished():
            return pb.GenerateEvent(
                finished=pb.Finished(
                    finish_reason=event.finish_reason,
                    stop_reason=event.stop_reason,
                    text=event.text,
                    usage=pb.Usage(**asdict(event.usage)),
                    speculation=pb.SpeculationMetrics(**asdict(event.speculation)),
                    timings=round_timings_to_wire(event.timings),
                    warnings=event.warnings,
                    num_failovers=event.num_failovers,
                    stop_token_id=event.stop_token_id,
                )
            )


def event_from_wire(message: pb.GenerateEvent) -> g.Event:
    """Convert an event of any kind."""
    if message.HasField("started"):
        started = message.started
        return g.Started(*(getattr(started, f.name) for f in fields(g.Started)))
    if message.HasField("tokens"):
        tokens = message.tokens
        return g.Tokens(
            tuple(tokens.token_ids),
            tuple(tokens.drafted),
            tuple(tokens.texts),
            tuple(map(logprobs_from_wire, tokens.logprobs)),
            tokens.num_nodes,
            tokens.tree_depth,
            round_timings_from_wire(tokens.timings),
            tokens.num_lookup,
        )
    finished = message.finished
    spec, usage = finished.speculation, finished.usage
    return g.Finished(
        finished.finish_reason,
        finished.stop_reason,
        finished.text,
        g.Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        g.SpeculationMetrics(
            spec.num_rounds,
            spec.num_draft_tokens,
            spec.num_accepted_tokens,
            spec.tokens_per_round,
            tuple(spec.acceptance_histogram),
            spec.num_degraded_rounds,
            spec.num_lookup_tokens,
        ),
        round_timings_from_wire(finished.timings),
        tuple(finished.warnings),
        finished.num_failovers,
        finished.stop_token_id if finished.HasField("stop_token_id") else None,
    )


def models_to_wire(models: Sequence[g.ModelInfo]) -> pb.ModelInfo:
    """Convert to the first model's message, which lists all models; there must be at least one."""
    return pb.ModelInfo(**asdict(models[0]), models=[pb.ModelInfo(**asdict(model)) for model in models])


def models_from_wire(message: pb.ModelInfo) -> tuple[g.ModelInfo, ...]:
    """All listed models; the message's own model where an older orchestrator lists none."""
    return tuple(_model_from_wire(model) for model in message.models or [message])


def _model_from_wire(message: pb.ModelInfo) -> g.ModelInfo:
    values = {f.name: getattr(message, f.name) for f in fields(g.ModelInfo)}
    return g.ModelInfo(**(values | {"eos_token_ids": tuple(message.eos_token_ids)}))


def server_info_to_wire(info: g.ServerInfo) -> pb.ServerInfo:
    """Convert field by field."""
    return pb.ServerInfo(
        protocol_version=info.protocol_version,
        bough_version=info.bough_version,
        workers=[
            pb.WorkerStatus(address=worker.address, info=info_to_wire(worker.info), problem=worker.problem)
            for worker in info.workers
        ],
        index_problem=info.index_problem,
        index_url=info.index_url,
        is_draftless=info.is_draftless,
        metrics_url=info.metrics_url,
        http_url=info.http_url,
    )


def server_info_from_wire(message: pb.ServerInfo) -> g.ServerInfo:
    """Convert field by field."""
    workers = tuple(g.WorkerStatus(w.address, info_from_wire(w.info), w.problem) for w in message.workers)
    return g.ServerInfo(
        workers,
        message.index_problem,
        message.index_url,
        message.protocol_version,
        message.bough_version,
        message.is_draftless,
        message.metrics_url,
        message.http_url,
    )


def loads_to_wire(loads: g.Loads) -> pb.Loads:
    """Convert field by field; the names are the same on both sides."""
    return pb.Loads(**asdict(loads))


def loads_from_wire(message: pb.Loads) -> g.Loads:
    """Convert field by field; the names are the same on both sides."""
    return g.Loads(*(getattr(message, f.name) for f in fields(g.Loads)))


def acceptance_to_wire(counted: Sequence[SchemeAcceptance], drafts: Sequence[DraftCalibration]) -> pb.Acceptance:
    """Convert field by field."""
    return pb.Acceptance(
        schemes=[
            pb.SchemeAcceptance(
                scheme=SCHEMES[one.scheme],
                num_rounds=one.num_rounds,
                depths=[pb.DepthCounts(accepted=depth.accepted, rejected=depth.rejected) for depth in one.by_depth],
            )
            for one in counted
        ],
        drafts=[pb.DraftCalibration(**asdict(draft)) for draft in drafts],
    )


def acceptance_from_wire(message: pb.Acceptance) -> tuple[SchemeAcceptance, ...]:
    """Convert; raises InvalidRequest for an unknown scheme."""
    return tuple(
        SchemeAcceptance(
            scheme_from_wire("schemes.scheme", one.scheme),
            one.num_rounds,
            tuple(DepthCounts(tuple(depth.accepted), tuple(depth.rejected)) for depth in one.depths),
        )
        for one in message.schemes
    )


def calibrations_from_wire(message: pb.Acceptance) -> tuple[DraftCalibration, ...]:
    """Convert field by field; the names are the same on both sides."""
    return tuple(
        DraftCalibration(*(getattr(draft, f.name) for f in fields(DraftCalibration))) for draft in message.drafts
    )
