"""From what a request demands of its output to a grammar, or to an error that says which part of it cannot be had."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import pytest

from bough.errors import InvalidRequest
from bough.grammar import grammar
from bough.grammar.allowed_tokens import Grammars
from bough.grammar.grammar import grammar_of
from bough.protocol.generation import Constraint, GenerateOptions, TextPrompt
from bough.protocol.sampling_params import MAX_CHOICES, MAX_GRAMMAR
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.opening.prompt import output_form

NUMBERS = Constraint(json_schema='{"type": "array", "items": {"type": "integer"}}')
SUM = Constraint(lark='start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/')
EBNF = Constraint(lark='# a sum\nroot ::= num-ber ("+" num-ber)*\nnum-ber ::= [0-9]+\n')
TRICKY = Constraint(choices=('a "quoted" one', "a\nline", "back\\slash", "/[a-z]+/", "é", "{}"))


@pytest.mark.parametrize(
    ("constraint", "yes", "no"),
    [
        (NUMBERS, ["[]", "[1, 2]", "[\n    1,\n    -2\n]"], ['["a"]', "[1", "1", " [1]", "[1,\n\n\n2]"]),
        (Constraint(json_schema='{"type": "object"}'), ["{}", '{"a": {"b": [null, 1.5e3]}}'], ["[]", "{a: 1}"]),
        (Constraint(json_schema="{}"), ["{}", "1", '"x"', "null"], ["nul", ""]),
        (Constraint(regex="[a-c]+(x|y)?"), ["abc", "ax"], ["", "axy", "d"]),
        (SUM, ["1", "1+22+3"], ["1+", "+1"]),
        (EBNF, ["1", "1+22+3"], ["1+", "+1"]),
        (TRICKY, list(TRICKY.choices), ["a", "abc", "{", 'a \\"quoted\\" one']),
    ],
)
def test_texts_are_accepted_or_rejected(
    byte_tokenizer: TokenizerFiles, constraint: Constraint, yes: list[str], no: list[str]
) -> None:
    grammars, encode = Grammars(byte_tokenizer, 262), Tokenizer(byte_tokenizer).encode_more
    (end,) = byte_tokenizer.eos_token_ids
    for text in (*yes, *no):
        allowed = grammars.along(grammar_of(constraint), None)
        assert allowed is not None
        mask = allowed.after(encode(text))
        assert (mask is not None and bool(mask[end])) == (text in yes), text


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(), "constraint: must have exactly one of json_schema, regex, choices, lark, got none"),
        (Constraint(regex="a", choices=("b",)), "constraint: must have exactly one of .*, got regex and choices"),
        (Constraint(json_schema="{", regex="a"), "constraint: must have exactly one of .*, got json_schema and regex"),
        (Constraint(json_schema="{"), r"constraint\.json_schema: must be JSON, got '\{'"),
        (Constraint(json_schema="[" * 100_000), r"constraint\.json_schema: must be JSON, got '\[\["),
        (Constraint(json_schema='{"minimum": NaN}'), r"constraint\.json_schema: must be JSON, got .*NaN"),
        (Constraint(json_schema='{"minimum": 1e400}'), r"constraint\.json_schema: must be "),
        (Constraint(json_schema='{"a": ' * 200 + "1" + "}" * 200), r"constraint\.json_schema: must be "),
        (Constraint(json_schema="[]"), r"constraint\.json_schema: must be an object, got '\[\]'"),
        (Constraint(json_schema='{"type": "objekt"}'), r"constraint\.json_schema: .* Invalid type: objekt"),
        (Constraint(json_schema='{"not": {}}'), r"constraint\.json_schema: .* Unimplemented keys"),
        (Constraint(json_schema='{"$ref": "http://example.com/s"}'), r"json_schema: must be .*example\.com"),
        (Constraint(json_schema='{"$ref": "file:///etc/passwd"}'), r"constraint\.json_schema: must be .*etc/passwd"),
        (Constraint(json_schema='{"pattern": "(a", "type": "string"}'), r"constraint\.json_schema: .* unclosed group"),
        (Constraint(regex="[a-z"), r"constraint\.regex: must be one that can be followed"),
        (Constraint(regex=""), r"constraint\.regex: must be a non-empty text"),
        (Constraint(regex="(?=a)b"), r"constraint\.regex: must be one that can be followed: .*look-around"),
        (Constraint(choices=("a", "")), r"constraint\.choices\[1\]: must be a non-empty text, got ''"),
        (Constraint(choices=("a",) * (MAX_CHOICES + 1)), r"choices: must have at most 1024 entries, got 1025"),
        (Constraint(lark="start: missing"), r"constraint\.lark: must be one that can be followed: .*missing"),
        (Constraint(lark="root ::= missing"), r"constraint\.lark: must be Lark, or EBNF .*: Rule 'missing' not found"),
        (Constraint(lark='root ::= "a\\'), r"constraint\.lark: must be Lark, or EBNF as llama\.cpp reads it: "),
        (Constraint(lark="root ::= " + "(" * 5000), r"constraint\.lark: must be Lark, or EBNF .*: .*recursion"),
        (Constraint(lark=""), r"constraint\.lark: must be a non-empty text"),
        (Constraint(regex="a" * MAX_GRAMMAR), rf"constraint.*: must be at most {MAX_GRAMMAR} characters"),
    ],
)  # fmt: skip
def test_unsupported_constraints_are_refused_by_name(constraint: Constraint, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        grammar_of(constraint)
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)


def test_a_schema_of_many_parts_is_checked_completely() -> None:
    """As clients make them: definitions, alternatives, formats, and annotations without meaning for a text."""
    schema = {
        "$defs": {"Step": {"type": "object", "title": "Step", "description": "one", "required": ["at"],
                           "properties": {"at": {"type": "string", "format": "date-time"}}}},
        "type": "object", "additionalProperties": False, "required": ["steps", "kind"],
        "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "minItems": 1},
                       "kind": {"anyOf": [{"const": "a"}, {"enum": ["b", None]}]},
                       "size": {"type": ["number", "null"], "minimum": 0, "default": 1, "examples": [2]}},
    }  # fmt: skip
    assert json.loads(grammar_of(Constraint(json_schema=json.dumps(schema))))["grammars"]


async def test_a_grammar_checked_for_one_salt_is_checked_again_for_another() -> None:
    """It was kept for all: a check takes up to a second, and who was refused sooner knew what another had demanded."""

    async def checked(salt: str) -> bool:
        options = GenerateOptions(constraint=Constraint(regex="[d-f]{7}"), cache_salt=salt)
        before = grammar._checked.cache_info().misses
        await output_form(TextPrompt("x"), options, Mock(), "auto")
        return grammar._checked.cache_info().misses > before

    assert [await asyncio.create_task(checked(salt)) for salt in ("a", "b", "a", "b", "c")] == [
        True, True, False, False, True,
    ]  # fmt: skip
