"""Simulated text that follows a grammar: valid, soon at an end, and known to the draft as often as other text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from bough.grammar.allowed_tokens import Grammars
from bough.grammar.grammar import grammar_of
from bough.protocol.generation import Constraint
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall
from bough.protocol.sampling_params import SamplingParams
from bough.simulation.clock import SimulatedClock
from bough.simulation.pair import SimulatedPair
from bough.simulation.tokenizer import END_TOKEN, simulated_tokenizer
from bough.simulation.true_text import TrueText
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import BestFirst, TreePlan
from tests.fakes.simulated import pair_of, text_of
from tests.fakes.simulated_growth import grown
from tests.fakes.tiers import long_but

GRAMMARS = Grammars(simulated_tokenizer(), len(simulated_tokenizer().vocabulary))
PROMPT = [*range(300, 310)]
SEEDS = range(40)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "age": {"type": "integer", "minimum": 0},
        "height": {"type": "number"},
        "born": {"type": "string", "format": "date"},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "code", "age", "height", "born", "kind", "tags"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {name: {"type": "array", "items": {"$ref": "#/$defs/node"}} for name in ("left", "right")},
            "required": ["left", "right"],
        }
    },
}
SCHEMAS: list[dict[str, Any]] = [PERSON, TREE, {"type": "object"}, {}, {"type": "array", "items": PERSON}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimulatedPair:
    return pair_of(tmp_path_factory.mktemp("profiles"))


def tokens_by(pair: SimulatedPair, grammar: str, seed: int, most: int = 400) -> list[int]:
    """The output of a request, its end included."""
    params = SamplingParams(temperature=0.8, seed=seed, grammar=grammar)
    allowed = GRAMMARS.along(grammar, None)
    text = TrueText(pair.text_model, params, PROMPT[:-1], PROMPT[-1], len(PROMPT), allowed)
    return next(([text[i] for i in range(end + 1)] for end in range(most) if text[end] == END_TOKEN), [])


def texts_by(pair: SimulatedPair, constraint: Constraint) -> list[str]:
    grammar, tokenizer = grammar_of(constraint), Tokenizer(simulated_tokenizer())
    outputs = [tokens_by(pair, grammar, seed) for seed in SEEDS]
    assert all(outputs), "each comes to an end"
    return [tokenizer.decode(output) for output in outputs]


@pytest.mark.parametrize("schema", long_but([PERSON, {}], SCHEMAS))
def test_text_with_a_schema_is_valid_json_that_ends(pair: SimulatedPair, schema: dict[str, Any]) -> None:
    texts = texts_by(pair, Constraint(json_schema=json.dumps(schema)))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        assert text == text.strip()
    assert len(set(texts)) > 3


def test_text_follows_an_expression_choices_and_a_grammar(pair: SimulatedPair) -> None:
    assert all(re.fullmatch(r"[A-Z]{2}-\d+x", text) for text in texts_by(pair, Constraint(regex=r"[A-Z]{2}-\d+x")))
    assert set(texts_by(pair, Constraint(choices=("yes", "no", "perhaps")))) == {"yes", "no", "perhaps"}
    lark = 'start: "(" start ")" | "x"+'
    assert all(re.fullmatch(r"\(*x+\)*", text) for text in texts_by(pair, Constraint(lark=lark)))


def test_strings_are_not_empty(pair: SimulatedPair) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    texts = texts_by(pair, Constraint(json_schema=json.dumps(schema)))
    assert all(json.loads(text)["name"].strip() for text in texts)


def test_if_everything_is_allowed_the_text_is_the_text_models(pair: SimulatedPair) -> None:
    grammar = grammar_of(Constraint(lark="start: /(.|\\n)*/"))
    for seed in range(5):
        output = tokens_by(pair, grammar, seed)
        assert output == text_of(pair, seed, len(PROMPT), len(output))


def test_text_does_not_depend_on_where_it_is_continued(pair: SimulatedPair) -> None:
    """Each round continues what the rounds before it have committed."""
    grammar = grammar_of(Constraint(json_schema=json.dumps(PERSON)))
    output, params = tokens_by(pair, grammar, 3), SamplingParams(temperature=0.8, seed=3, grammar=grammar)
    for end in range(1, len(output)):
        held = [*PROMPT, *output[: end - 1]]
        text = TrueText(pair.text_model, params, held, output[end - 1], len(PROMPT), GRAMMARS.along(grammar, None))
        assert text[0] == output[end]


def test_a_draft_guesses_equally_well_with_a_grammar(pair: SimulatedPair, tmp_path: Path) -> None:
    grammar = grammar_of(Constraint(json_schema=json.dumps({"type": "array", "items": PERSON, "minItems": 2})))
    rights = {name: _share_of_first_guesses(pair, name) for name in (grammar, "")}
    assert rights[grammar] == pytest.approx(rights[""], abs=0.1)
    assert rights[""] == pytest.approx(0.6, abs=0.12), "the profile's"


def _share_of_first_guesses(pair: SimulatedPair, grammar: str) -> float:
    """How often the likeliest child of the root is the true token, over positions of several texts."""
    right = []
    for seed in range(3):
        params = SamplingParams(temperature=0.8, seed=seed, grammar=grammar)
        output = tokens_by(pair, grammar, seed) if grammar else text_of(pair, seed, len(PROMPT), 60)
        held = [*PROMPT, *output[:-1]]
        calls = [
            GrowCall(
                Context.of(ScopedId(str(end)), held[: end + 1], 0, len(PROMPT)),
                held[end],
                params,
                end,
                TreePlan(BestFirst(3, 1, 2)),
            )
            for end in range(len(PROMPT) - 1, len(held) - 1, 3)
        ]
        for call, result in zip(calls, grown(pair, SimulatedClock(), calls), strict=True):
            tree, first = result.tree, call.context.base_length + 1 - len(PROMPT)
            children = np.flatnonzero(tree.parents == 0)
            best = children[np.argmax(tree.log_probs[children])]
            right.append(int(tree.tokens[best]) == output[first])
    return float(np.mean(right))
