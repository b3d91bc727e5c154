"""The lists of a request are counted in its bytes as protobuf decodes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.rpc.list_lengths import list_lengths
from bough.rpc.server import decoded
from orchestrator import service

LONGEST = 20_000  # context
MOST = 1000  # fields
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXTS = st.lists(st.text(max_size=200), max_size=5)
REQUESTS = st.builds(
    pb.GenerateRequest,
    token_ids=st.none() | st.builds(pb.TokenIds, ids=IDS),
    chat=st.none() | st.builds(pb.ChatMessages, messages=st.lists(st.builds(pb.ChatMessage, content=st.text()))),
    resume=st.builds(pb.Resume, num_tokens=st.integers(0, 2**32 - 1), token_ids=IDS),
    stop=TEXTS,
    constraint=st.builds(pb.Constraint, choices=TEXTS),
    model=st.text(max_size=300),
    prompt_logprobs=st.none() | st.integers(0, 2**32 - 1),
)


def unpacked(num_ids: int) -> bytes:
    """A request with this many token ids, each in its own field, as some encoders send them."""
    length = 2 * num_ids
    return b"\x1a" + bytes((length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14)) + b"\x08\x01" * num_ids


def packed(num_ids: int) -> bytes:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[200] * num_ids)).SerializeToString()


@given(REQUESTS, st.dictionaries(st.integers(0, 300), st.floats(width=32), max_size=9), IDS)
def test_list_lengths_equal_those_that_protobuf_reads(
    request: pb.GenerateRequest, biases: dict[int, float], ids: list[int]
) -> None:
    request.sampling.logit_bias.update(biases)
    request.sampling.stop_token_ids.extend(ids)
    request.sampling.temperature = 0.5
    request.speculation.growth.shape.parents.extend(ids)
    expected = {
        "token_ids.ids": len(request.token_ids.ids),
        "chat.messages": len(request.chat.messages),
        "resume.token_ids": len(request.resume.token_ids),
        "speculation.growth.shape.parents": len(ids),
        "stop": len(request.stop),
        "sampling.stop_token_ids": len(ids),
        "sampling.logit_bias": len(biases),
        "constraint.choices": len(request.constraint.choices),
    }
    found = list_lengths(request.SerializeToString(), pb.GenerateRequest, MOST)
    assert found == Counter({name: number for name, number in expected.items() if number})


PIECES = st.one_of(
    REQUESTS.map(pb.GenerateRequest.SerializeToString),
    st.integers(0, 9).map(unpacked),
    st.sampled_from((b"\x0b", b"\x0c", b"\x1b", b"\x1c", b"\x1a\x02\x0b\x0c", b"\xfb\x07", b"\xfc\x07")),  # groups
    st.binary(max_size=4),
)


@given(st.lists(PIECES, max_size=4).map(b"".join))
def test_no_bytes_hide_entries_and_only_invalid_ones_are_refused(data: bytes) -> None:
    try:
        request = pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    found = list_lengths(data, pb.GenerateRequest, len(data))
    assert found["token_ids.ids"] >= len(request.token_ids.ids)
    assert found["resume.token_ids"] >= len(request.resume.token_ids)
    assert found["chat.messages"] >= len(request.chat.messages)
    assert found["stop"] >= len(request.stop)


@pytest.mark.parametrize("make", [packed, unpacked])
def test_a_list_may_be_as_long_as_its_limit(make: Callable[[int], bytes]) -> None:
    service.require_lengths(make(LONGEST), LONGEST)
    text = f"token_ids: must have at most {LONGEST} entries, got {LONGEST + 1}"
    with pytest.raises(InvalidRequest, match=text):
        service.require_lengths(make(LONGEST + 1), LONGEST)
    with pytest.raises(InvalidRequest, match=text):
        service.require_lengths(make(LONGEST) + make(1), LONGEST)  # protobuf joins them


@pytest.mark.parametrize(
    "data", [b"\x1a\xff", b"\x1a\x05\x08", b"\x0a", b"\x80" * 20, b"\x1a\x04\x0a\x64\x01\x01", b"\x0f\x01"]
)
def test_invalid_bytes_are_refused(data: bytes) -> None:
    def decode(data: bytes) -> pb.GenerateRequest:
        service.require_lengths(data, LONGEST)
        return pb.GenerateRequest.FromString(data)

    for each in (decode, pb.GenerateRequest.FromString):
        with pytest.raises(InvalidRequest, match=f"request: must be a valid message, got {len(data)} bytes"):
            decoded(data, each)


def test_the_number_of_fields_is_limited() -> None:
    with pytest.raises(InvalidRequest, match="message: must have at most 1000 fields, got 1001 or more"):
        list_lengths(b"\x48\x01" * 2_000_000, pb.GenerateRequest, MOST)


def test_every_list_of_numbers_is_counted_as_varints() -> None:
    def lists(descriptor: Any) -> set[int]:
        own = {field.type for field in descriptor.fields if field.is_repeated and field.is_packed}
        inner = (field.message_type for field in descriptor.fields if field.message_type and not field.is_repeated)
        return own.union(*map(lists, inner))

    assert lists(pb.GenerateRequest.DESCRIPTOR) == {FieldDescriptor.TYPE_UINT32}
