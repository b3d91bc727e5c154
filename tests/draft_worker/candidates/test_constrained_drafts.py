"""Guesses stay within the grammar that the target's tokens follow: others would be nodes that no target keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models

from bough.grammar.allowed_tokens import Grammars
from bough.grammar.grammar import grammar_of
from bough.protocol.generation import Constraint
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.tree_plan import Guess, Scheme, StaticShape, TreePlan
from tests.fakes.draft import PLAN, VOCAB, FakeModel, grow_call, grow_now, new_engine

END = VOCAB - 1
LETTERS = "abcde"  # tokens 0 to 4
SHAPE = TreePlan(StaticShape((0, 0, 0, 1, 1, 2, 4)))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(LETTERS)}, "</s>": END}, merges=[]))
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [
        {"id": END, "content": "</s>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    described["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return Grammars(TokenizerFiles(json.dumps(described).encode(), "", (END,)), VOCAB)


def greedy(regex: str) -> SamplingParams:
    grammar = grammar_of(Constraint(regex=regex))
    return SamplingParams(temperature=0.0, grammar=grammar, stop_token_ids=frozenset((END,)))


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        SHAPE,
        replace(PLAN, guess=Guess.DISTRIBUTION),
        replace(SHAPE, scheme=Scheme.TRAVERSAL),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("ahead_steps", [0, 3])
def test_no_node_breaks_the_grammar_from_the_prompts_last_token_on(
    grammars: Grammars, plan: TreePlan, temperature: float, ahead_steps: int
) -> None:
    """While the text grows by what was guessed, and is then another one."""
    engine = new_engine(FakeModel(), ahead_steps=ahead_steps, grammars=grammars)
    sampling = replace(greedy(r"a(bc|d)*e?"), temperature=temperature, seed=3)
    text, num_nodes = [3, 1, 4], 0  # the prompt
    for _ in range(4):
        tree = grow_now(engine, grow_call(text, sampling=sampling, plan=plan)).tree
        allowed = grammars.along(sampling.grammar, None)
        assert allowed is not None
        allowed.stand_on(text[3:])
        for node in range(1, len(tree)):
            path = [int(tree.tokens[i]) for i in tree.path(node)][1:]
            following, ended = allowed.after(path[:-1]), END in path[:-1]
            num_nodes += 1
            # samples fill up a shape with tokens of no probability where the grammar allows too few
            assert plan.scheme.is_sampled or ended or (following is not None and following[path[-1]])
        while engine.can_go_ahead:
            engine.step()
        best = [int(token) for token in tree.tokens[tree.path(len(tree) - 1)]][1:]
        text = [*text, *best[: 1 + best.index(END) if END in best else None]] if END not in best else [*text[:3], 0]
    assert num_nodes > 8


def test_another_grammar_of_the_session_gives_another_tree(grammars: Grammars) -> None:
    engine = new_engine(FakeModel(), grammars=grammars)
    for regex, tokens in (("a+", {0, END}), ("[bc]+", {1, 2, END}), ("a+", {0, END})):
        tree = grow_now(engine, grow_call([3, 1, 4], sampling=greedy(regex))).tree
        assert {*tree.tokens[1:].tolist()} <= tokens
        assert len(tree) > 2
    free = grow_now(engine, grow_call([3, 1, 4])).tree
    assert len({*free.tokens[1:].tolist()}) > 2
