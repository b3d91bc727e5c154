"""Counts the entries of a message's lists before it is decoded, as large lists take much memory."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from bough.errors import InvalidRequest

LENGTH = 2  # wire type of texts, messages and packed lists: a number of bytes, and these bytes
FIXED_BYTES = {1: 8, 5: 4, 3: 0, 4: 0}  # bytes of values of other wire types; a group's contents are read as fields
MAX_VARINT_BYTES = 10
NEVER_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


class Countable(NamedTuple):
    """A field that is a list, or a message that may have lists."""

    name: str
    message: Descriptor | None  # None for a list
    is_packed: bool


def list_lengths(data: bytes, kind: type[Message], max_fields: int) -> Counter[str]:
    """Count the entries of all lists of a serialized message, by paths such as "sampling.stop_token_ids".

    Lists of numbers must be lists of varints. Lists inside a list's messages are not counted.

    Raises:
        DecodeError: the bytes are not a message.
        InvalidRequest: there are more than `max_fields` fields; reading one takes one or two microseconds.
    """
    lengths, num_fields = Counter[str](), 0
    unread = [(0, len(data), kind.DESCRIPTOR, "")]
    while unread:
        place, end, descriptor, path = unread.pop()
        fields = _countable(descriptor)
        while place < end:
            num_fields += 1
            if num_fields > max_fields:
                raise InvalidRequest("message", f"must have at most {max_fields} fields", f"{num_fields} or more")
            tag, begin = _varint(data, place)
            if (wire_type := tag & 7) in FIXED_BYTES:
                place = begin + FIXED_BYTES[wire_type]
            else:
                number, begin = _varint(data, begin)
                place = begin + number if wire_type == LENGTH else begin
            if place > end:
                raise DecodeError("a field does not end in its message")
            if (field := fields.get(tag >> 3)) is None:
                continue
            if field.message and wire_type == LENGTH:
                unread.append((begin, place, field.message, f"{path}{field.name}."))
            elif field.is_packed and wire_type == LENGTH:
                packed = np.frombuffer(data, np.uint8, place - begin, begin)
                lengths[path + field.name] += int(np.count_nonzero(packed < 0x80))  # last bytes of varints
            else:
                lengths[path + field.name] += 1
    return lengths


@cache
def _countable(descriptor: Descriptor) -> dict[int, Countable]:
    """The fields of a kind of message that are lists or may have lists, by number."""
    fields = {}
    for field in descriptor.fields:
        if field.is_repeated:
            fields[field.number] = Countable(field.name, None, field.type not in NEVER_PACKED)
        elif field.message_type:
            fields[field.number] = Countable(field.name, field.message_type, False)
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at an offset, and the offset after it."""
    if place < len(data) and data[place] < 0x80:
        return data[place], place + 1
    number = 0
    for shift, byte in enumerate(data[place : place + MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return number, place + shift + 1
    raise DecodeError("a number does not end")
