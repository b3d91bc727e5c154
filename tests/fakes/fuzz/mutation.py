"""Random mutation of messages, reproducible from a seed and fast enough for millions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Json = dict[str, Any]

INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 63, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**53, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99, -1),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "x", "x" * 300, "x" * 5000, "\0", "\r\n", "\x1b[31m", "\u2028", "\U0001f30d", "a\u0301" * 40, "{{ 7 }}",
    "{% for x in y %}", "alice::request", "::", "Zyx" + "y" * 400, "../../etc/passwd", "%s%s%n", "\ufffd", "session",
)  # fmt: skip
# Spellings of JSON values, many of which Python's encoder does not produce.
SPELLINGS = (
    "null", "true", "false", "0", "-0", "-1", "1", "2", "0.5", "-0.0", "1e308", "1e999", "-1e999", "1E+2", "NaN",
    "Infinity", "-Infinity", "01", "1.", ".5", "0x10", "18446744073709551616", "-9223372036854775809", "9" * 300,
    "-" + "9" * 5000, '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83c\\udf0d"', '"\\x41"', '"\t"',
    '"' + "x" * 5000 + '"', '"user"', '"system"', "[]", "[[]]", "[null]", "[-1]", "[1.5]", '[1, "x"]', "[1, 2, 3]",
    "[true]", '["a", "b"]', "[" + "0," * 3000 + "0]", "{}", '{"": ""}', '{"type": "text"}', '{"0": 1e999}',
    '{"1": 1, "1": 2}', '{"-1": 1}', '{"99999999999999999999": 1}', "[" * 300 + "]" * 300, "[" * 30_000,
    '{"a":' * 300 + "1" + "}" * 300, '{"role": "user", "content": "x"}', '[{"role": "user", "content": [{}]}]',
    '[{"type": "text", "text": "x"}]', '"' + "Zyx" + "y" * 3000 + '"', '"{{ messages }}"', '"\\r\\nX: y"', "'x'", "",
)  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "7", "0.5", "-0.5", "1.0", "100", "4096", "2147483648", "1e-5", "1.5e2", "255", "-0.0")
STRINGS = (*map(json.dumps, TEXTS), '"user"', '"system"', '"\\ud83c\\udf0d"', '"\\/"', '"s"', '"zz"')
HOLE = "\ue000hole\ue001"


class Mutator:
    """Draws mutations from one seed."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)

    def garbage(self, most_bytes: int = 400) -> bytes:
        """Random bytes; short runs are likelier than long ones."""
        return self.rng.randbytes(int(most_bytes * self.rng.random() ** 3))

    def changed(self, data: bytes, other: bytes = b"") -> bytes:
        """A copy with bytes flipped, removed, doubled or inserted, or with the tail of another message."""
        out = bytearray(data)
        for _ in range(self.rng.randint(1, 3)):
            at = self.rng.randint(0, len(out))
            match self.rng.randrange(6):
                case 0 if out:
                    out[at % len(out)] = self.rng.randrange(256)
                case 1:
                    del out[at:]
                case 2:
                    del out[at : at + self.rng.randint(1, 8)]
                case 3:
                    out[at:at] = out[at : at + self.rng.randint(1, 64)] * self.rng.randint(1, 3)
                case 4:
                    out[at:at] = self.rng.randbytes(self.rng.randint(1, 8))
                case _:
                    out[at:] = other[min(at, len(other)) :]
        return bytes(out)

    def message(self, given: Message) -> bytes:
        """A protobuf message with some fields changed, at any depth, and perhaps some bytes."""
        message = type(given)()
        message.CopyFrom(given)
        for _ in range(self.rng.randint(1, 3)):
            self._mutate(message)
        data = message.SerializeToString()
        return self.changed(data, given.SerializeToString()) if self.rng.random() < 0.1 else data

    def body(self, given: Json) -> bytes:
        """A JSON text with some values replaced, fields added or removed, and perhaps bytes changed."""
        value: Any = json.loads(json.dumps(given))
        spelled: list[str] = []
        for _ in range(self.pick((1, 1, 2, 3))):
            value = self._with_hole(value, spelled)
        text = json.dumps(value)
        for spelling in spelled:
            text = text.replace(json.dumps(HOLE), spelling, 1)
        data = text.encode("utf-8", "surrogatepass")
        return self.changed(data) if self.rng.random() < 0.1 else data

    def pick(self, options: Sequence[Any]) -> Any:
        """A random element."""
        return options[self.rng.randrange(len(options))]

    def _with_hole(self, value: Any, spelled: list[str]) -> Any:
        """A copy of a value in which a random inner value is replaced by a placeholder."""
        if isinstance(value, dict) and value and self.rng.random() < 0.9:
            name = self.pick([*value])
            if self.rng.random() < 0.1:
                del value[name]
            elif self.rng.random() < 0.1:
                value[self.pick(TEXTS)] = value[name]
            else:
                value[name] = self._with_hole(value[name], spelled)
            return value
        if isinstance(value, list) and value and self.rng.random() < 0.7:
            at = self.rng.randrange(len(value))
            value[at] = self._with_hole(value[at], spelled)
            return value
        spelled.append(self.pick(self._spellings(value)))
        return HOLE

    def _spellings(self, value: Any) -> Sequence[str]:
        """Candidate spellings: half of the time of the same kind, which are refused later in decoding."""
        if self.rng.random() < 0.6 and isinstance(value, str | float | int) and not isinstance(value, bool):
            if self.rng.random() < 0.6:
                return (json.dumps(self._text() if isinstance(value, str) else self._number()),)
            return STRINGS if isinstance(value, str) else NUMBERS
        return SPELLINGS

    def _text(self) -> str:
        """A short text of any characters, most of them common ones."""
        most = self.pick((0x7F, 0x7F, 0x2FF, 0xD7FF))
        return "".join(chr(self.rng.randint(32, most)) for _ in range(self.rng.randint(1, 12)))

    def _number(self) -> int | float:
        """A number, most often a small one."""
        if self.rng.random() < 0.5:
            return self.rng.getrandbits(self.pick((4, 10, 33, 62)))
        return self.rng.uniform(-2, 2)

    def _mutate(self, message: Message) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self.pick(fields)
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[self.rng.randint(0, 400)] = self.pick(FLOATS)
        elif field.is_repeated:
            self._mutate_list(field, value)
        elif field.message_type is not None:
            if self.rng.random() < 0.8:
                self._mutate(value)
            else:
                message.ClearField(field.name)
        else:
            setattr(message, field.name, self._scalar(field))

    def _mutate_list(self, field: FieldDescriptor, value: Any) -> None:
        if len(value) and self.rng.random() < 0.3:
            del value[self.rng.randrange(len(value))]
        elif field.message_type is not None:
            self._mutate(value.add())
        else:
            value.extend([self._scalar(field)] * self.pick((1, 1, 2, 40, 400, 3000)))

    def _scalar(self, field: FieldDescriptor) -> Any:
        is_known = self.rng.random() < 0.5
        if field.cpp_type in INTEGERS:
            return self.pick(INTEGERS[field.cpp_type]) if is_known else self.rng.getrandbits(self.pick((3, 8, 16, 30)))
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.pick(FLOATS) if is_known else self.rng.uniform(-2, 2)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return is_known
        text = self.pick(TEXTS) if is_known else self._text()
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
