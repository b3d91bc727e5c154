"""Whether a draft and a target speak of the same tokens. Refused at start-up where they do not."""

from __future__ import annotations

import logging

import grpc

from bough import wire
from bough.errors import PairingError
from bough.pb import common_pb2, draft_pb2_grpc, target_pb2_grpc
from bough.registry import Registry
from bough.rpc import open_channel
from bough.tokenizer import TokenizerFiles, first_difference

logger = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 10.0


async def fetch_tokenizer(channel: grpc.aio.Channel, kind: str) -> TokenizerFiles:
    """The tokenizer of a draft or target worker. Raises grpc.aio.AioRpcError."""
    stub = draft_pb2_grpc.DraftStub(channel) if kind == "draft" else target_pb2_grpc.TargetStub(channel)
    call = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=PEER_TIMEOUT_SECONDS)
    return wire.tokenizer_from_wire([chunk async for chunk in call])


async def refuse_misfits(registry: Registry, kind: str, mine: TokenizerFiles) -> None:
    """Compares a starting worker's tokenizer with that of every worker of the other kind that is up.

    Raises:
        PairingError: naming the first token that differs and the peer.
    """
    for record in await registry.workers():
        if {kind, record.kind} != {"draft", "target"}:
            continue
        try:
            async with open_channel(record.address) as channel:
                theirs = await fetch_tokenizer(channel, record.kind)
        except grpc.aio.AioRpcError as exc:
            logger.warning("%s at %s does not tell its tokenizer: %s", record.worker_id, record.address, exc.details())
            continue
        draft, target = (mine, theirs) if kind == "draft" else (theirs, mine)
        difference = first_difference(draft.vocabulary, target.vocabulary)
        if difference is not None:
            raise PairingError(f"tokenizers differ from that of {record.worker_id} at {record.address}: {difference}")
