"""Conversion of worker messages to and from protobuf. Every pair of functions is tested as a round trip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from bough.errors import InvalidRequest
from bough.pb import common_pb2, draft_pb2, target_pb2
from bough.protocol import messages as m
from bough.protocol.codec_costs import cost_from_wire, cost_to_wire, timings_from_wire, timings_to_wire
from bough.protocol.codec_trees import (
    SCHEMES,
    growth_from_wire,
    growth_to_wire,
    guess_from_wire,
    scheme_from_wire,
    tree_from_wire,
    tree_to_wire,
)
from bough.protocol.sampling_params import PositionLogprobs, SamplingParams, TokenLogprob
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree_plan import Guess, TreePlan, require_growth

TOKENIZER_CHUNK_BYTES = 1024 * 1024
MAX_NAME_LENGTH = 256  # characters of a session's or request's name
MAX_INNER_NAME_LENGTH = MAX_NAME_LENGTH + 80  # of a name prefixed with its tenant's
MAX_VOCAB = 2**31 - 1  # token ids are int32


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert field by field."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        logprobs=params.logprobs,
        stop_token_ids=sorted(params.stop_token_ids),
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert field by field; `SamplingParams.validate` checks ranges."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=frozenset(message.stop_token_ids),
    )


def context_to_wire(context: m.Context) -> common_pb2.Context:
    """Convert field by field."""
    return common_pb2.Context(
        session_id=context.session_id,
        context_start=context.context_start,
        prefix_hash=context.prefix_hash,
        tokens=context.tokens,
        prompt_length=context.prompt_length,
        cache_salt=context.cache_salt,
    )


def context_from_wire(message: common_pb2.Context, vocab_size: int) -> m.Context:
    """Raises InvalidRequest for a missing session id, a too long id or salt, or a token outside the vocabulary."""
    if not message.session_id:
        raise InvalidRequest("context.session_id: must not be empty, got ''")
    for name in ("session_id", "cache_salt"):
        length = len(getattr(message, name))
        if length > MAX_INNER_NAME_LENGTH:
            raise InvalidRequest(f"context.{name}: must be at most {MAX_INNER_NAME_LENGTH} characters, got {length}")
    require_tokens("context.tokens", message.tokens, vocab_size)
    return m.Context(
        message.session_id,
        message.context_start,
        message.prefix_hash,
        tuple(message.tokens),
        message.prompt_length,
        message.cache_salt,
    )


def require_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first token outside the vocabulary."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name}[{index}]: must be 0 to {vocab_size - 1}, got {token}")


def grow_call_to_wire(call: m.GrowCall) -> draft_pb2.GrowRequest:
    """Convert field by field."""
    return draft_pb2.GrowRequest(
        context=context_to_wire(call.context),
        root_token=call.root_token,
        sampling=sampling_to_wire(call.sampling),
        round=call.round,
        growth=growth_to_wire(call.plan.growth),
        scheme=SCHEMES[call.plan.scheme],
        guess_distribution=call.plan.guess is Guess.DISTRIBUTION,
        vocab_size=call.vocab_size,
        epoch=call.epoch,
    )


def grow_call_from_wire(message: draft_pb2.GrowRequest, vocab_size: int, max_nodes: int) -> m.GrowCall:
    """Convert and check every field; `vocab_size` is the draft model's. Raises InvalidRequest."""
    vocab_size = message.vocab_size or vocab_size
    if vocab_size > MAX_VOCAB:
        raise InvalidRequest(f"vocab_size: must be at most {MAX_VOCAB}, got {vocab_size}")
    require_tokens("root_token", [message.root_token], vocab_size)
    growth = growth_from_wire(message.growth)
    require_growth("growth", growth, max_nodes)
    sampling = sampling_from_wire(message.sampling)
    sampling.validate(vocab_size)
    return m.GrowCall(
        context_from_wire(message.context, vocab_size),
        message.root_token,
        sampling,
        message.round,
        TreePlan(growth, scheme_from_wire("scheme", message.scheme), guess_from_wire(message.guess_distribution)),
        message.vocab_size,
        message.epoch,
    )


def grow_result_to_wire(result: m.GrowResult) -> draft_pb2.GrowReply:
    """Convert field by field."""
    return draft_pb2.GrowReply(
        tree=tree_to_wire(result.tree),
        held_length=result.held_length,
        timings=timings_to_wire(result.timings),
        num_warm_nodes=result.num_warm_nodes,
        cost=cost_to_wire(result.cost),
    )


def grow_result_from_wire(message: draft_pb2.GrowReply) -> m.GrowResult:
    """Convert; raises InvalidTree where the tree's arrays have inconsistent lengths."""
    tree, timings = tree_from_wire(message.tree), timings_from_wire(message.timings)
    return m.GrowResult(tree, message.held_length, timings, message.num_warm_nodes, cost_from_wire(message))


def verify_call_to_wire(call: m.VerifyCall) -> target_pb2.VerifyRequest:
    """Convert field by field."""
    return target_pb2.VerifyRequest(
        context=context_to_wire(call.context),
        epoch=call.epoch,
        round=call.round,
        tree=tree_to_wire(call.tree),
        sampling=sampling_to_wire(call.sampling),
        scheme=SCHEMES[call.scheme],
        max_length=call.max_length,
        caller=call.caller,
        num_running=call.num_running,
        worker_id=call.worker_id,
        may_leave_out=call.may_leave_out,
        reserves=call.reserves,
    )


def verify_call_from_wire(message: target_pb2.VerifyRequest, vocab_size: int, max_nodes: int) -> m.VerifyCall:
    """Convert and check every field. Raises InvalidRequest."""
    tree = tree_from_wire(message.tree)
    scheme = scheme_from_wire("scheme", message.scheme)
    tree.validate(vocab_size, max_nodes, scheme)
    sampling = sampling_from_wire(message.sampling)
    sampling.validate(vocab_size)
    context = context_from_wire(message.context, vocab_size)
    return m.VerifyCall(
        context,
        message.epoch,
        message.round,
        tree,
        sampling,
        scheme,
        message.max_length,
        message.caller,
        message.num_running,
        message.worker_id,
        message.may_leave_out,
        message.reserves,
    )


def verify_result_to_wire(result: m.VerifyResult) -> target_pb2.VerifyReply:
    """Convert field by field."""
    return target_pb2.VerifyReply(
        accepted_nodes=result.verdict.accepted_nodes,
        bonus_token=result.verdict.bonus_token,
        logprobs=map(logprobs_to_wire, result.verdict.logprobs),
        held_length=result.held_length,
        timings=timings_to_wire(result.timings),
        cached_length=result.cached_length,
        left_out_nodes=result.left_out_nodes,
        cost=cost_to_wire(result.cost),
        num_rows=result.num_rows,
        num_trees=result.num_trees,
    )


def verify_result_from_wire(message: target_pb2.VerifyReply) -> m.VerifyResult:
    """Convert field by field."""
    verdict = m.Verdict(
        tuple(message.accepted_nodes), message.bonus_token, tuple(map(logprobs_from_wire, message.logprobs))
    )
    timings = timings_from_wire(message.timings)
    return m.VerifyResult(
        verdict,
        message.held_length,
        timings,
        message.cached_length,
        tuple(message.left_out_nodes),
        cost_from_wire(message),
        message.num_rows,
        message.num_trees,
    )


def logprobs_to_wire(value: PositionLogprobs) -> common_pb2.PositionLogprobs:
    """Convert field by field."""
    return common_pb2.PositionLogprobs(
        token=common_pb2.TokenLogprob(token_id=value.token.token_id, logprob=value.token.logprob),
        top=[common_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in value.top],
    )


def logprobs_from_wire(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    """Convert field by field."""
    return PositionLogprobs(
        TokenLogprob(message.token.token_id, message.token.logprob),
        tuple(TokenLogprob(top.token_id, top.logprob) for top in message.top),
    )


def info_to_wire(info: m.WorkerInfo) -> common_pb2.WorkerInfo:
    """Convert field by field; the names are the same on both sides."""
    return common_pb2.WorkerInfo(**(asdict(info) | {"cost": cost_to_wire(info.cost)}))


def info_from_wire(message: common_pb2.WorkerInfo) -> m.WorkerInfo:
    """Convert field by field; the names are the same on both sides."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return m.WorkerInfo(**(values | {"notes": tuple(message.notes), "cost": cost_from_wire(message)}))


def tokenizer_to_wire(files: TokenizerFiles) -> Iterator[common_pb2.TokenizerChunk]:
    """Chunks of the tokenizer; the first also carries the small fields."""
    data = files.tokenizer_json
    for begin in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
        chunk = common_pb2.TokenizerChunk(tokenizer_json=data[begin : begin + TOKENIZER_CHUNK_BYTES])
        if begin == 0:
            chunk.chat_template, chunk.bos_token, chunk.eos_token = (
                files.chat_template,
                files.bos_token,
                files.eos_token,
            )
            chunk.eos_token_ids.extend(files.eos_token_ids)
        yield chunk


def tokenizer_from_wire(chunks: list[common_pb2.TokenizerChunk]) -> TokenizerFiles:
    """Join all chunks, in order."""
    first = chunks[0]
    return TokenizerFiles(
        b"".join(chunk.tokenizer_json for chunk in chunks),
        first.chat_template,
        tuple(first.eos_token_ids),
        first.bos_token,
        first.eos_token,
    )
