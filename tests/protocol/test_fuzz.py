"""Malformed, mutated, replayed and disordered messages against all three services over real gRPC.

Every answer is a reply or one of bough's own errors with its status: never UNKNOWN, never INTERNAL, never a hang. After
each the target's integrity check and an ordinary request pass.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bough.client import Client
from bough.pb import common_pb2, draft_pb2, generation_pb2, target_pb2
from bough.protocol import codec
from bough.protocol.generation import Finished, GenerateOptions, TokenPrompt, Tokens
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.rpc.services import TARGET, stub_of
from bough.rpc.status_map import ERROR_KEY, MAX_MESSAGE_BYTES, STATUS_OF
from bough.trees.tree import Tree
from tests.fakes.fuzz.ordinary import GENERATE, GENERATE_CHAT, GROW, GROW_CHAINS, RELEASE, VERIFY
from tests.fakes.stack import MAX_CONTEXT, Stack, stack

TIMEOUT_SECONDS = 20.0
NAMES_OF_ERRORS = {kind.__name__: code for kind, code in STATUS_OF.items()}
METHODS: dict[str, tuple[str, Message]] = {
    "/bough.v1.Target/Verify": ("target", VERIFY),
    "/bough.v1.Target/Release": ("target", RELEASE),
    "/bough.v1.Target/GetServerInfo": ("target", common_pb2.GetServerInfoRequest()),
    "/bough.v1.Target/GetTokenizer": ("target", common_pb2.GetTokenizerRequest()),
    "/bough.v1.Draft/Grow": ("draft", GROW),
    "/bough.v1.Draft/Release": ("draft", RELEASE),
    "/bough.v1.Generation/Generate": ("orchestrator", GENERATE),
    "/bough.v1.Generation/CloseSession": (
        "orchestrator",
        generation_pb2.CloseSessionRequest(session_id="session"),
    ),
    "/bough.v1.Generation/Abort": ("orchestrator", generation_pb2.AbortRequest(request_id="request")),
    "/bough.v1.Generation/GetServerInfo": ("orchestrator", common_pb2.GetServerInfoRequest()),
    "/bough.v1.Generation/GetDecisions": (
        "orchestrator",
        generation_pb2.GetDecisionsRequest(session_id="session"),
    ),
    "/bough.v1.Generation/GetLoads": ("orchestrator", generation_pb2.GetLoadsRequest()),
}


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with stack(tmp_path_factory.mktemp("fuzz"), "--lease-seconds", "0.001") as services:
        yield services


async def check_answered(services: Stack, method: str, request: bytes) -> grpc.StatusCode:
    """The status of a call; fails the test where it is none that a caller could act on."""
    kind = METHODS[method][0]
    async with grpc.aio.insecure_channel(services.addresses[kind]) as channel:
        call: Any = channel.unary_stream(method)
        try:
            async for _ in call(request, timeout=TIMEOUT_SECONDS):
                pass
        except grpc.aio.AioRpcError as exc:
            return code_of_ours(exc, len(request))
    return grpc.StatusCode.OK


def code_of_ours(exc: grpc.aio.AioRpcError, num_bytes: int = 0) -> grpc.StatusCode:
    """The status of a call that failed; fails the test where it is none of bough's own.

    Where the message had too many bytes, gRPC refuses it before anything of bough's is asked.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        assert exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return exc.code()
    name = dict(tuple(exc.trailing_metadata() or ())).get(ERROR_KEY)
    assert NAMES_OF_ERRORS.get(str(name)) is exc.code(), f"{exc.code()}: {exc.details()}"
    assert exc.details()
    return exc.code()


async def check_well(services: Stack) -> None:
    """The slots are in order, and an ordinary request gets what it always gets."""
    services.check_integrity()
    options = GenerateOptions(temperature=0.0, max_tokens=3, ignore_eos=True)
    async with Client(services.addresses["orchestrator"]) as client:
        events = [event async for event in client.generate(TokenPrompt((5, 6, 7)), options)]
    assert isinstance(events[-1], Finished)
    tokens = tuple(token for event in events if isinstance(event, Tokens) for token in event.token_ids)
    assert tokens == GOOD.setdefault("tokens", tokens)


GOOD: dict[str, tuple[int, ...]] = {}  # what the ordinary request got the first time


@given(method=st.sampled_from(sorted(METHODS)), request_bytes=st.binary(max_size=200))
async def test_random_bytes_are_answered_with_a_status(running: Stack, method: str, request_bytes: bytes) -> None:
    await check_answered(running, method, request_bytes)


@pytest.mark.slow
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
async def test_valid_messages_with_changed_bytes_are_answered(running: Stack, data: st.DataObject, method: str) -> None:
    changed = bytearray(METHODS[method][1].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    await check_answered(running, method, bytes(changed))
    await check_well(running)


INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 63, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99, -1),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "x" * 5000, "\0", "\U0001f30d", "{{ 7 }}", "fuzzed", "session")


def value_of(data: st.DataObject, field: FieldDescriptor) -> Any:
    """An extreme or ordinary value of a scalar field."""
    if field.cpp_type in INTEGERS:
        return data.draw(st.sampled_from(INTEGERS[field.cpp_type]))
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return data.draw(st.sampled_from(FLOATS))
    return data.draw(st.booleans() if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else st.sampled_from(TEXTS))


def mutate(data: st.DataObject, message: Message) -> None:
    """Changes one field, at any depth."""
    field = data.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        target[data.draw(st.integers(0, 400))] = data.draw(st.sampled_from(FLOATS))
    elif field.is_repeated:
        if len(target) and data.draw(st.booleans()):
            del target[data.draw(st.integers(0, len(target) - 1))]
        elif field.message_type is not None:
            mutate(data, target.add())
        else:
            target.extend([value_of(data, field)] * data.draw(st.sampled_from((1, 2, 40, 3000))))
    elif field.message_type is not None:
        if data.draw(st.booleans()):
            mutate(data, target)
        else:
            message.ClearField(field.name)
    else:
        setattr(message, field.name, value_of(data, field))


@pytest.mark.slow
@given(
    data=st.data(),
    call=st.sampled_from(
        [
            ("/bough.v1.Target/Verify", VERIFY),
            ("/bough.v1.Draft/Grow", GROW),
            ("/bough.v1.Draft/Grow", GROW_CHAINS),
            ("/bough.v1.Generation/Generate", GENERATE),
            ("/bough.v1.Generation/Generate", GENERATE_CHAT),
        ]
    ),
    num=st.integers(1, 3),
)
async def test_valid_messages_with_changed_fields_are_answered(
    running: Stack, data: st.DataObject, call: tuple[str, Message], num: int
) -> None:
    method, message = call[0], type(call[1])()
    message.CopyFrom(call[1])
    for _ in range(num):
        mutate(data, message)
    await check_answered(running, method, message.SerializeToString())
    await check_well(running)


@pytest.mark.parametrize("method", ["/bough.v1.Target/Verify", "/bough.v1.Generation/Generate"])
async def test_messages_that_are_too_large_are_refused_by_their_size(running: Stack, method: str) -> None:
    kind = METHODS[method][0]
    async with grpc.aio.insecure_channel(running.addresses[kind]) as channel:
        call: Any = channel.unary_stream(method)
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            async for _ in call(b"\0" * (MAX_MESSAGE_BYTES + 1), timeout=TIMEOUT_SECONDS):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await check_well(running)


TEXT = tuple(
    range(1, 40)
)  # of every session below: whatever is verified in any order, the answer is a function of the text
LENGTHS = range(1, len(TEXT))


class Step(NamedTuple):
    """One call."""

    session: str
    length: int  # tokens before the root
    kind: str = "verify"
    epoch: int = 0
    round: int = 0
    held: int = 0  # tokens taken to be held
    is_right: bool = True  # the hash of these
    is_at_once: bool = False  # with the next step
    max_length: int = 0


STEPS = st.lists(
    st.builds(
        Step,
        session=st.sampled_from(["a", "b"]),
        length=st.sampled_from(LENGTHS),
        kind=st.sampled_from(["verify", "verify", "verify", "release"]),
        epoch=st.integers(0, 3),
        round=st.integers(0, 3),
        held=st.sampled_from([0, 0, 0, *LENGTHS]),
        is_right=st.sampled_from([True, True, True, False]),
        is_at_once=st.booleans(),
        max_length=st.sampled_from([0, 10, MAX_CONTEXT, 10**6]),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
async def right(running: Stack) -> list[int]:
    """For each of LENGTHS the token that follows."""
    async with grpc.aio.insecure_channel(running.addresses["target"]) as channel:
        return [await bonus_token(channel, Step(session=f"alone {n}", length=n)) for n in LENGTHS]


@pytest.mark.slow
@given(steps=STEPS)
async def test_verify_and_release_may_come_in_any_order(running: Stack, right: list[int], steps: list[Step]) -> None:
    """Wrong epochs, rounds and assumptions, repeated and concurrent; every verdict is right."""
    async with grpc.aio.insecure_channel(running.addresses["target"]) as channel:
        run, at_once, asked = uuid.uuid4(), [], defaultdict[Any, set[Any]](set)
        for step in (step._replace(session=f"{step.session} {run}") for step in steps):
            key = (step.session, step.epoch, step.round)
            asked[key] |= {right[step.length - 1]} if step.kind == "verify" else set()
            at_once.append(check_step(channel, step, asked[key]))
            if not step.is_at_once:
                await asyncio.gather(*at_once)
                at_once = []
        await asyncio.gather(*at_once)
    await check_well(running)


async def check_step(channel: grpc.aio.Channel, step: Step, allowed: set[int]) -> None:
    """A repeated (epoch, round) may get the first answer again, whatever its other fields: callers promise equality."""
    try:
        if step.kind == "release":
            release: Any = channel.unary_unary("/bough.v1.Target/Release")
            message = common_pb2.ReleaseRequest(session_id=step.session)
            await release(message.SerializeToString(), timeout=TIMEOUT_SECONDS)
        else:
            assert await bonus_token(channel, step) in allowed
    except grpc.aio.AioRpcError as exc:
        code_of_ours(exc)


async def bonus_token(channel: grpc.aio.Channel, step: Step) -> int:
    """The verdict on a root."""
    context = Context.of(ScopedId(step.session), TEXT[: step.length + 1], step.held, 1)
    call = VerifyCall(context, step.epoch, step.round, Tree.root(TEXT[step.length]), SamplingParams(temperature=0.0))
    request = codec.verify_call_to_wire(replace(call, max_length=step.max_length))
    request.context.prefix_hash ^= not step.is_right
    reply = await stub_of(TARGET, channel).Verify(request, timeout=TIMEOUT_SECONDS)
    return int(reply.bonus_token)


async def test_every_method_is_fuzzed() -> None:
    """A new method that is forgotten here would pass unseen."""
    modules = (target_pb2, draft_pb2, generation_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods - set(METHODS) <= {
        "/bough.v1.Draft/GetServerInfo",
        "/bough.v1.Draft/GetTokenizer",
        "/bough.v1.Generation/GetModelInfo",
        "/bough.v1.Generation/GetAcceptance",
    }, "these take empty messages, as others do that are"
