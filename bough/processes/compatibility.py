"""Compatibility checks of a starting worker: equal tokenizers of drafts and targets, equal weights of one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from bough.errors import PairingError, Unavailable
from bough.pb import common_pb2
from bough.protocol import codec
from bough.protocol.codec_fields import read
from bough.protocol.generation import WorkerInfo
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry
from bough.rpc.services import DRAFT, TARGET, stub_of
from bough.security.access import OPEN, Access
from bough.tokenization.vocabulary import TokenizerFiles, first_difference

logger = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 10.0
MAX_TOKENIZER_BYTES = 128 * 1024 * 1024  # several times the largest known; a faulty worker could send without end
LEAST_BYTES = 1024  # counted for a chunk in addition to its data


async def fetch_tokenizer(channel: grpc.aio.Channel, kind: str, access: Access = OPEN) -> TokenizerFiles:
    """Fetch the tokenizer of a draft or target worker. Raises AioRpcError, or Unavailable if it is invalid."""
    call = stub_of(DRAFT if kind == "draft" else TARGET, channel).GetTokenizer(
        common_pb2.GetTokenizerRequest(), timeout=PEER_TIMEOUT_SECONDS, metadata=access.credentials
    )
    chunks, num_bytes = list[common_pb2.TokenizerChunk](), 0
    async for chunk in call:
        chunks.append(chunk)
        num_bytes += max(chunk.ByteSize(), LEAST_BYTES)
        if num_bytes > MAX_TOKENIZER_BYTES:
            call.cancel()
            break
    if not 0 < num_bytes <= MAX_TOKENIZER_BYTES:
        got = "more" if chunks else "none"
        raise Unavailable(f"its tokenizer must have 1 to {MAX_TOKENIZER_BYTES} bytes, got {got}")
    return codec.tokenizer_from_wire(chunks)


async def check_compatibility(
    registry: Registry, mine: WorkerInfo, tokenizer: TokenizerFiles, access: Access = OPEN
) -> None:
    """Compare a starting worker with all running workers that it may pair with or take sessions over from.

    Raises:
        PairingError: names the peer, and the first token that differs or both hashes of weights.
    """
    compared = []
    for record in await registry.workers():
        if {mine.kind, record.kind} == {"draft", "target"}:
            compared.append(_compare_tokenizers(record, mine.kind, tokenizer, access))
        elif mine.kind == record.kind == "target" and mine.weights_hash:
            compared.append(_compare_weights(record, mine, access))
    await asyncio.gather(*compared)


async def _compare_tokenizers(record: WorkerRecord, kind: str, mine: TokenizerFiles, access: Access) -> None:
    async with _reaching(record, "tokenizer", access) as channel:
        theirs = await fetch_tokenizer(channel, record.kind, access)
        draft, target = (mine, theirs) if kind == "draft" else (theirs, mine)
        difference = first_difference(draft.vocabulary, target.vocabulary)
        if difference is not None:
            raise PairingError(f"tokenizer: must equal that of {record.worker_id} at {record.address}: {difference}")


async def _compare_weights(record: WorkerRecord, mine: WorkerInfo, access: Access) -> None:
    async with _reaching(record, "weights' hash", access) as channel:
        ask, request = stub_of(TARGET, channel).GetServerInfo, common_pb2.GetServerInfoRequest()
        reply = await ask(request, timeout=PEER_TIMEOUT_SECONDS, metadata=access.credentials)
        if contradiction := mine.contradiction(read(reply, WorkerInfo)):
            raise PairingError(
                f"{contradiction}; must be the same files, or the workers must be in different namespaces (--namespace)"
            )


@asynccontextmanager
async def _reaching(record: WorkerRecord, what: str, access: Access) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a worker; the block ends with a warning if the worker does not answer."""
    try:
        async with access.channel(record.address).opened() as channel:
            yield channel
    except (grpc.aio.AioRpcError, Unavailable) as exc:
        why = exc.details() if isinstance(exc, grpc.aio.AioRpcError) else exc
        logger.warning("cannot fetch the %s of %s at %s: %s", what, record.worker_id, record.address, why)
