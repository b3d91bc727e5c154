"""Models that share a tokenizer but pad their embeddings to different sizes (as Qwen 2.5 does with 0.5B and 7B)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.protocol.messages import GrowCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Growth, Guess, Scheme, StaticShape, TreePlan
from loadtest.common.tiny_model import SMALLEST, save_model, save_weights
from loadtest.common.tiny_tokenizer import save_tokenizer
from tests.fakes.draft import VOCAB, FakeModel, grow_call, grow_now, new_engine
from tests.fakes.stack import Stack, stack

NARROW, WIDE = SMALLEST.vocab_size, SMALLEST.vocab_size + 50
SHAPE = StaticShape((0, 0, 0, 1, 1, 2, 4, 4))
PLANS = [
    *(
        TreePlan(growth, guess=guess)
        for growth in (BestFirst(12, 3, 4), SHAPE, StaticShape.chains(2, 3))
        for guess in Guess
    ),
    TreePlan(SHAPE, Scheme.WITHOUT_REPLACEMENT),
    TreePlan(StaticShape.chains(3, 3), Scheme.WITHOUT_REPLACEMENT),
    TreePlan(SHAPE, Scheme.TRAVERSAL),
]


def grown(call: GrowCall) -> Tree:
    """By a draft whose model has VOCAB tokens."""
    return grow_now(new_engine(FakeModel()), call).tree


@given(st.data(), st.sampled_from(PLANS), st.integers(2, VOCAB + 4), st.sampled_from([0.0, 0.8]), st.booleans())
def test_a_draft_guesses_tokens_of_the_target_only_after_any_token(
    data: st.DataObject, plan: TreePlan, vocab_size: int, temperature: float, is_penalised: bool
) -> None:
    token = st.integers(0, vocab_size - 1)
    tokens = data.draw(st.lists(token, min_size=4, max_size=8))
    params = SamplingParams(temperature, seed=data.draw(st.integers(0, 99)), logit_bias={data.draw(token): 2.0})
    if is_penalised:
        params = replace(params, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3)
    tree = grown(replace(grow_call(tokens, sampling=params, plan=plan), vocab_size=vocab_size))
    tree.validate(vocab_size, plan.growth.budget, plan.scheme)
    assert len(tree) > 1


def test_an_exhausted_sample_continues_with_tokens_that_only_the_target_has() -> None:
    """The target computes the distribution of such draws from its own vocabulary, so the draft must draw from it."""
    plan, drawn = TreePlan(StaticShape((0, 0, 0)), Scheme.WITHOUT_REPLACEMENT), set()
    for seed in range(200):
        call = grow_call([3, 1, 4], sampling=SamplingParams(0.8, top_k=1, seed=seed), plan=plan)
        drawn |= {*grown(replace(call, vocab_size=VOCAB + 3)).tokens.tolist()[1:]}
    assert drawn == {*range(VOCAB + 3)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same model twice, one of them without the last tokens; by vocabulary size."""
    folder = tmp_path_factory.mktemp("padded")
    wide = save_model(folder / "wide", type(SMALLEST)(**SMALLEST.to_dict() | {"vocab_size": WIDE}))
    model = AutoModelForCausalLM.from_pretrained(wide)
    model.resize_token_embeddings(NARROW)
    save_weights(model, folder / "narrow")
    save_tokenizer(folder / "narrow")
    return {WIDE: wide, NARROW: folder / "narrow"}


async def tokens_of(running: Stack, options: GenerateOptions) -> tuple[list[int], int]:
    """What was generated, and how much of it had been guessed."""
    async with Client(running.addresses["orchestrator"]) as client:
        events = [event async for event in client.generate(TokenPrompt((*range(40, 60),)), options)]
    assert isinstance(events[-1], Finished)
    assert events[-1].speculation.num_degraded_rounds == 0, events[-1].warnings
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    return tokens, events[-1].speculation.num_accepted_tokens


GROWTHS: list[tuple[Growth | None, Scheme]] = [
    (None, Scheme.TARGET),
    (SHAPE, Scheme.TARGET),
    (SHAPE, Scheme.WITHOUT_REPLACEMENT),
    (StaticShape.chains(3, 3), Scheme.WITHOUT_REPLACEMENT),
    (SHAPE, Scheme.TRAVERSAL),
]


@pytest.mark.parametrize(("target", "draft"), [(WIDE, NARROW), pytest.param(NARROW, WIDE, marks=pytest.mark.long)])
async def test_output_equals_plain_decoding_whichever_vocabulary_is_padded_more(
    models: dict[int, Path], tmp_path: Path, target: int, draft: int
) -> None:
    """A random model says tokens that no tokenizer has as often as any other."""
    padding = dict.fromkeys(range(NARROW, target), 1.0)
    ended, num_guessed = set[int](), 0
    async with stack(tmp_path, model=models[target], draft_model=models[draft]) as running:
        for temperature in (0.0, 0.9):
            options = GenerateOptions(
                max_tokens=30,
                temperature=temperature,
                seed=3,
                ignore_eos=True,
                logit_bias=padding,
                frequency_penalty=0.2,
            )
            plain, _ = await tokens_of(running, replace(options, speculation=Speculation(disabled=True)))
            for growth, scheme in GROWTHS:
                speculation = Speculation(growth=growth, scheme=scheme, lookup=0)
                tokens, num_accepted = await tokens_of(running, replace(options, speculation=speculation))
                if scheme is Scheme.TARGET or temperature == 0.0:  # the others only have its distribution
                    assert tokens == plain
                ended |= {*tokens}
                num_guessed += num_accepted
    assert num_guessed > 0
    assert max(ended) >= NARROW or target == NARROW
