"""Conversion of worker messages to and from protobuf. Every pair of functions is tested as a round trip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest, InvalidTree
from bough.pb import common_pb2, draft_pb2, target_pb2
from bough.protocol import messages as m
from bough.protocol.codec_fields import from_fields, read, to_fields
from bough.protocol.ids import ScopedId
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree import DraftProbs, Tree
from bough.trees.tree_plan import Scheme, TreePlan, require_growth

TOKENIZER_CHUNK_BYTES = 1024 * 1024
MAX_NAME_LENGTH = 256  # characters of a session's or request's name
MAX_ID_LENGTH = MAX_NAME_LENGTH + 80  # of an id's text, with the tenant
MAX_VOCAB = 2**31 - 1  # token ids are int32


def context_from_wire(message: common_pb2.Context, vocab_size: int) -> m.Context:
    """Raises InvalidRequest for a missing session id, a too long id or salt, or a token outside the vocabulary."""
    if not ScopedId.parse(message.session_id):
        raise InvalidRequest("context.session_id", "must not be empty", "''")
    for name in ("session_id", "cache_salt"):
        length = len(getattr(message, name))
        if length > MAX_ID_LENGTH:
            raise InvalidRequest(f"context.{name}", f"must be at most {MAX_ID_LENGTH} characters", length)
    require_tokens("context.tokens", message.tokens, vocab_size)
    return read(message, m.Context)


def require_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first token outside the vocabulary."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name}[{index}]", f"must be 0 to {vocab_size - 1}", token)


def grow_call_to_wire(call: m.GrowCall) -> draft_pb2.GrowRequest:
    """The message of a call; its plan's fields are the message's own."""
    return draft_pb2.GrowRequest(**to_fields(call, "plan"), **to_fields(call.plan, "guess"))


def grow_call_from_wire(message: draft_pb2.GrowRequest, vocab_size: int, max_nodes: int) -> m.GrowCall:
    """Convert and check every field; `vocab_size` is the draft model's. Raises InvalidRequest."""
    vocab_size = message.vocab_size or vocab_size
    if vocab_size > MAX_VOCAB:
        raise InvalidRequest("vocab_size", f"must be at most {MAX_VOCAB}", vocab_size)
    require_tokens("root_token", [message.root_token], vocab_size)
    plan = TreePlan(**from_fields(message, TreePlan, "guess"))
    require_growth("growth", plan.growth, max_nodes)
    context = context_from_wire(message.context, vocab_size)
    call = m.GrowCall(context=context, plan=plan, **from_fields(message, m.GrowCall, "context", "plan"))
    call.sampling.validate(vocab_size)
    return call


def grow_result_to_wire(result: m.GrowResult) -> draft_pb2.GrowReply:
    """The message of a result."""
    return draft_pb2.GrowReply(tree=tree_to_wire(result.tree), **to_fields(result, "tree"))


def grow_result_from_wire(message: draft_pb2.GrowReply) -> m.GrowResult:
    """The result of a message; raises InvalidTree if the tree's arrays have inconsistent lengths."""
    return m.GrowResult(tree_from_wire(message.tree), **from_fields(message, m.GrowResult, "tree"))


def verify_call_to_wire(call: m.VerifyCall) -> target_pb2.VerifyRequest:
    """The message of a call."""
    return target_pb2.VerifyRequest(tree=tree_to_wire(call.tree), **to_fields(call, "tree"))


def verify_call_from_wire(message: target_pb2.VerifyRequest, vocab_size: int, max_nodes: int) -> m.VerifyCall:
    """The call of a message, every field checked. Raises InvalidRequest."""
    context = context_from_wire(message.context, vocab_size)
    tree = tree_from_wire(message.tree)
    call = m.VerifyCall(context=context, tree=tree, **from_fields(message, m.VerifyCall, "context", "tree"))
    tree.validate(vocab_size, max_nodes, call.scheme)
    if call.is_given and (call.scheme is not Scheme.TARGET or not call.tree.is_chain):
        raise InvalidRequest("is_given", "must be false unless the tree is a chain, and the scheme target")
    call.sampling.validate(vocab_size)
    return call


def verify_result_to_wire(result: m.VerifyResult) -> target_pb2.VerifyReply:
    """The message of a result; the verdict's fields are the message's own."""
    return target_pb2.VerifyReply(**to_fields(result.verdict), **to_fields(result, "verdict"))


def verify_result_from_wire(message: target_pb2.VerifyReply) -> m.VerifyResult:
    """The result of a message."""
    return m.VerifyResult(read(message, m.Verdict), **from_fields(message, m.VerifyResult, "verdict"))


def tokenizer_to_wire(files: TokenizerFiles) -> Iterator[common_pb2.TokenizerChunk]:
    """Chunks of the tokenizer; the first also carries the small fields."""
    data, small = files.tokenizer_json, to_fields(files, "tokenizer_json")
    for begin in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
        yield common_pb2.TokenizerChunk(tokenizer_json=data[begin : begin + TOKENIZER_CHUNK_BYTES], **small)
        small = {}


def tokenizer_from_wire(chunks: list[common_pb2.TokenizerChunk]) -> TokenizerFiles:
    """Join all chunks, in order."""
    data = b"".join(chunk.tokenizer_json for chunk in chunks)
    return TokenizerFiles(data, **from_fields(chunks[0], TokenizerFiles, "tokenizer_json"))


def tree_to_wire(tree: Tree) -> common_pb2.Tree:
    """Convert a tree; the root's parent and log-probability are implied."""
    return common_pb2.Tree(
        tokens=tree.tokens.tolist(),
        parents=tree.parents[1:].tolist(),
        log_probs=tree.log_probs[1:].tolist(),
        draft_probs=draft_probs_to_wire(tree.draft_probs) if tree.draft_probs is not None else None,
        draws=tree.draws.tolist() if tree.draws is not None else (),
        worth=tree.worth[1:].tolist() if tree.worth is not None else (),
    )


def tree_from_wire(message: common_pb2.Tree) -> Tree:
    """Convert a tree; raises InvalidTree for inconsistent lengths. `Tree.validate` checks the rest."""
    size = len(message.tokens)
    if size == 0 or len(message.parents) != size - 1 or len(message.log_probs) != size - 1:
        raise InvalidTree(
            "tree",
            "must have at least one node, and a parent and a log_prob for each node but the root",
            f"{size} tokens, {len(message.parents)} parents and {len(message.log_probs)} log_probs",
        )
    parents = np.concatenate(([-1], np.minimum(message.parents, 2**31 - 1))).astype(np.int32)
    return Tree(
        np.asarray(message.tokens, np.int32),
        parents,
        np.concatenate(([0.0], message.log_probs)).astype(np.float32),
        draft_probs_from_wire(message.draft_probs) if message.HasField("draft_probs") else None,
        _narrow(message.draws) if message.draws else None,
        np.concatenate(([0.0], message.worth)).astype(np.float32) if message.worth else None,
    )


def draft_probs_to_wire(draft_probs: DraftProbs) -> common_pb2.DraftProbs:
    """Convert sampling distributions; offsets are sent as sizes."""
    return common_pb2.DraftProbs(
        nodes=draft_probs.nodes.tolist(),
        sizes=np.diff(draft_probs.offsets).tolist(),
        tokens=draft_probs.tokens.tolist(),
        weights=draft_probs.weights.tolist(),
    )


def draft_probs_from_wire(message: common_pb2.DraftProbs) -> DraftProbs:
    """Convert sampling distributions; `DraftProbs.validate` checks them."""
    offsets = np.concatenate(([0], np.cumsum(message.sizes, dtype=np.uint64)))
    return DraftProbs(
        _narrow(message.nodes), _narrow(offsets), _narrow(message.tokens), np.asarray(message.weights, np.float32)
    )


def _narrow(numbers: Any) -> NDArray[np.int32]:
    """Unsigned numbers as int32; larger numbers become 2**31 - 1, which every check rejects."""
    return np.minimum(np.asarray(numbers, np.uint64), 2**31 - 1).astype(np.int32)
