"""Masks of a grammar depend on the output alone, at any node of a tree, and on no earlier question."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import AllowedTokens, Grammars
from bough.grammar.grammar import grammar_of
from bough.grammar.grammar_process import Limits
from bough.protocol.generation import Constraint
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

VOCAB = 270  # some more than the tokenizer has, as padded embeddings do
NAME, AGE = '{"type": "string", "maxLength": 4}', '{"type": "integer"}'
PERSON = Constraint(
    json_schema=f'{{"type": "object", "properties": {{"name": {NAME}, "age": {AGE}}}, "required": ["name", "age"],'
    ' "additionalProperties": false}'
)
PHONE = Constraint(regex=r"[0-9]{2,3}-(ab|cd)*")


@pytest.fixture(scope="module")
def grammars(byte_tokenizer: TokenizerFiles) -> Grammars:
    return Grammars(byte_tokenizer, VOCAB)


def along(grammars: Grammars, constraint: Constraint) -> AllowedTokens:
    allowed = grammars.along(grammar_of(constraint), None)
    assert allowed is not None
    return allowed


def fresh(grammars: Grammars, constraint: Constraint, output: Sequence[int]) -> np.ndarray | None:
    """The mask after an output, by nothing that was asked before."""
    return along(grammars, constraint).after(output)


def drawn(mask: np.ndarray, rng: random.Random) -> int:
    return rng.choice(np.flatnonzero(mask).tolist())


@pytest.mark.parametrize("constraint", [PERSON, PHONE])
def test_masks_do_not_depend_on_the_order_of_questions(
    grammars: Grammars, byte_tokenizer: TokenizerFiles, constraint: Constraint
) -> None:
    """Paths of trees are asked for at random, forbidden ones and ones past the end among them; then the text grows."""
    rng, allowed, output = random.Random(1), along(grammars, constraint), list[int]()
    (end,) = byte_tokenizer.eos_token_ids
    for _ in range(25):
        allowed.stand_on(output)
        paths: list[list[int]] = [[]]
        for _ in range(12):
            path = rng.choice(paths)
            mask, expected = allowed.after(path), fresh(grammars, constraint, [*output, *path])
            assert (mask is None) == (expected is None)
            if mask is None or expected is None:
                continue
            assert mask.shape == (VOCAB,)
            assert np.array_equal(mask, expected)
            assert mask.any()
            paths += [[*path, drawn(mask, rng)], [*path, rng.randrange(VOCAB)]]
        grown = [path for path in paths if end not in path and allowed.after(path) is not None]
        output += rng.choice(grown)[: rng.randrange(4)]


def test_texts_that_follow_the_masks_match_the_constraint(grammars: Grammars, byte_tokenizer: TokenizerFiles) -> None:
    (end,), decode = byte_tokenizer.eos_token_ids, Tokenizer(byte_tokenizer).decode
    for seed in range(20):
        rng, allowed, output = random.Random(seed), along(grammars, PHONE), list[int]()
        while (mask := allowed.after(output)) is not None and output[-1:] != [end]:
            output.append(end if mask[end] and rng.random() < 0.3 else drawn(mask, rng))
        text = decode(output)
        assert len(text) >= 3
        digits, _, rest = text.partition("-")
        assert digits.isdecimal()
        assert rest.replace("ab", "").replace("cd", "") == ""


def test_only_the_end_may_follow_the_end(grammars: Grammars, byte_tokenizer: TokenizerFiles) -> None:
    output, (end,) = Tokenizer(byte_tokenizer).encode_more("yes"), byte_tokenizer.eos_token_ids
    for constraint in (Constraint(choices=("yes", "no")), Constraint(regex="yes+")):
        allowed = along(grammars, constraint)
        for path in ([*output, end], output[:2], output, [*output, end, end], [*output, output[-1]], [end], output):
            mask, text = allowed.after(path), path[: path.index(end)] if end in path else path
            if path == [end] or (constraint.choices and len(text) > 3):
                assert mask is None
                continue
            assert mask is not None
            assert bool(mask[end]) == (len(text) >= 3)
            assert np.count_nonzero(mask) == 1 + (end not in path and len(text) > 2 and not constraint.choices)


def test_an_end_token_in_a_grammar_does_not_end_it(grammars: Grammars, byte_tokenizer: TokenizerFiles) -> None:
    """It would end the text although the grammar continues."""
    (end,) = byte_tokenizer.eos_token_ids
    allowed = along(grammars, Constraint(lark=f'start: "a" <[{end}]> "b"'))
    (letter,) = np.flatnonzero(fresh(grammars, Constraint(choices=("a",)), [])).tolist()
    mask = allowed.after([letter])
    assert mask is not None
    assert not mask.any(), "no token can follow, and none leads to where nothing is known"
    assert allowed.after([letter, end]) is None


def test_an_output_continues_from_a_changed_point(grammars: Grammars) -> None:
    allowed = along(grammars, PHONE)
    digits = np.flatnonzero(fresh(grammars, PHONE, [])).tolist()
    first, other = digits[1:3], digits[3:6]
    for output in (first, other, [], other[:1], first):
        allowed.stand_on(output)
        assert np.array_equal(allowed.after([]), fresh(grammars, PHONE, output))


def test_a_forbidden_output_is_refused_and_the_next_one_is_not(grammars: Grammars) -> None:
    allowed = along(grammars, PHONE)
    (digit, *_) = np.flatnonzero(fresh(grammars, PHONE, [])).tolist()
    with pytest.raises(InvalidRequest, match=r"constraint: must allow the output so far, but its token 1, 269, "):
        allowed.stand_on([digit, VOCAB - 1])
    allowed.stand_on([digit, digit])
    assert np.array_equal(allowed.after([]), fresh(grammars, PHONE, [digit, digit]))


def test_masks_are_kept_while_the_grammar_is_the_same(grammars: Grammars) -> None:
    phone, person = grammar_of(PHONE), grammar_of(PERSON)
    held = grammars.along(phone, None)
    assert grammars.along(phone, held) is held
    assert grammars.along(person, held) is not held
    assert grammars.along("", held) is None


def test_tenants_do_not_share_states_of_a_grammar(grammars: Grammars) -> None:
    own = grammars.process("phone", "alice")
    assert grammars.process("phone", "alice") is own
    assert grammars.process("phone", "bob") is not own
    assert grammars.process("person", "alice") is not own


def test_a_long_chain_of_rules_does_not_end_the_process(grammars: Grammars) -> None:
    """llguidance recursed along them until its stack was used up, which ended the process for everybody."""
    rules = [f"a{number:x}:a{number + 1:x}" for number in range(10_000)]
    lark = "\n".join(["start:a0", *rules, f'a{len(rules):x}:"x"'])
    refs = [f'"{number}":{{"allOf":[{{"$ref":"#/$defs/{number + 1}"}}]}}' for number in range(2500)]
    schema = f'{{"$ref":"#/$defs/0","$defs":{{{",".join(refs)},"{len(refs)}":{{"type":"null"}}}}}}'
    for constraint in (Constraint(lark=lark), Constraint(json_schema=schema)):
        allowed = along(grammars, constraint)
        mask = allowed.after([])
        assert mask is not None
        assert mask.any()


def test_unsupported_grammars_are_refused_by_name(grammars: Grammars, byte_tokenizer: TokenizerFiles) -> None:
    with pytest.raises(InvalidRequest, match=r"constraint: must be a grammar that can be followed"):
        grammars.compile("no grammar")
    endless = Grammars(TokenizerFiles(byte_tokenizer.tokenizer_json, "", ()), VOCAB)
    with pytest.raises(InvalidRequest, match=r"constraint: must be left out: this model has no token that ends a text"):
        endless.compile(grammar_of(PHONE))


def test_a_grammar_that_grows_past_its_limits_only_ends_its_request(byte_tokenizer: TokenizerFiles) -> None:
    grammars, rng = Grammars(byte_tokenizer, VOCAB, Limits(max_lexer_states=600)), random.Random(2)
    allowed = along(grammars, Constraint(regex=r"(.*[a-m].{300}){20}"))

    def decode() -> None:
        output: list[int] = []
        for _ in range(300):
            mask = allowed.after(output)
            assert mask is not None
            output.append(drawn(mask, rng))

    with pytest.raises(InvalidRequest, match=r"constraint: must be a grammar that can be followed: .*too many states"):
        decode()
    again = grammars.along(allowed.grammar, allowed)
    assert again is not None
    assert again.after([]) is not None, "another output of the session with this grammar begins anew"
    assert fresh(grammars, PHONE, []) is not None
