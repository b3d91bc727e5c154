"""The test of tests: the whole pipeline on SmolLM2, token for token what transformers' own generate gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bough.client import Client
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.processes.launch import Cluster
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TextPrompt, TokenPrompt, Tokens
from bough.tokenization.tokenizer import Tokenizer
from loadtest.common.prompts import load_prompts
from tests.conftest import pipeline, settings

# Shallow trees: on two cores the draft steps of many sessions are most of the time that these tests take.
# Large trees take most of it, so fewer sessions have them, and shorter ones, unless BOUGH_ALL_PROMPTS is set.
ALL_PROMPTS = bool(os.environ.get("BOUGH_ALL_PROMPTS"))
NUM_PROMPTS, LENGTH = (12, 64) if ALL_PROMPTS else (3, 32)
NUM_PROMPTS_OF = {} if ALL_PROMPTS else {"1": 2, "64": 2, "256": 1}
LENGTH_OF = {} if ALL_PROMPTS else {"256": 20}
SIZES = {str(budget): Speculation(budget=budget, width=32, depth=4) for budget in (1, 16, 64, 256)}
WAYS = {"none": Speculation(disabled=True), "self-sized": Speculation(), **SIZES}
GREEDY = GenerateOptions(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
async def cluster(smollm: Path) -> AsyncIterator[Cluster]:
    """SmolLM2 in float32, a third of it streamed, with a substitute draft of it; room for all prompts at once.

    The ring has room for half of the streamed layers, so that each sweep must read the others itself: with room for all
    of them, a sweep may be over before a slow disk has read anything.
    """
    patient = ("--draft-timeout", "300")  # twelve sessions wait in line for one draft model
    target_flags = ("--resident-layers", "20", "--max-context", "512", "--ring-memory", "72MB")
    config = settings(smollm, smollm, *target_flags, drops="3,14", orchestrator=patient)
    async with pipeline(config) as running:
        yield running


@pytest.fixture(scope="module")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def prompts(smollm: Path) -> list[list[int]]:
    tokenizer = Tokenizer(load_tokenizer_files(smollm))
    return [tokenizer.encode_chat([("user", text)]) for text in load_prompts()[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def expected(smollm: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy text on the same weights, float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    length = max(map(len, prompts))
    padded = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output: list[list[int]] = model.generate(padded, attention_mask=mask, **greedy)[:, length:].tolist()
    return output


def count_of(name: str) -> int:
    """Prompts that a way to speculate is tried with."""
    return NUM_PROMPTS_OF.get(name, NUM_PROMPTS)


def length_of(name: str) -> int:
    """Tokens that it goes on for."""
    return LENGTH_OF.get(name, LENGTH)


async def tokens_for(client: Client, prompt: list[int], options: GenerateOptions) -> list[int]:
    """The output tokens; checks that the stream's own counts agree with them."""
    events = [event async for event in client.generate(TokenPrompt(tuple(prompt)), options)]
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == len(tokens)
    assert finished.warnings == ()
    return tokens


async def all_tokens(client: Client, prompts: list[list[int]], options: GenerateOptions) -> list[list[int]]:
    """All prompts at once: their trees share sweeps."""
    return list(await asyncio.gather(*(tokens_for(client, prompt, options) for prompt in prompts)))


async def test_greedy_output_is_that_of_generate(
    client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Of trees of every size, in sweeps that all of them share."""
    options = {name: replace(GREEDY, speculation=way, max_tokens=length_of(name)) for name, way in WAYS.items()}
    asked = (all_tokens(client, prompts[: count_of(name)], own) for name, own in options.items())
    outputs = dict(zip(options, await asyncio.gather(*asked), strict=True))
    assert outputs == {name: [tokens[: length_of(name)] for tokens in expected[: count_of(name)]] for name in WAYS}


async def test_sampled_output_is_the_same_for_every_size(client: Client, prompts: list[list[int]]) -> None:
    sampled = replace(GREEDY, temperature=0.8, seed=2024, max_tokens=24)
    options = {name: replace(sampled, speculation=way) for name, way in WAYS.items()}
    options["another seed"] = replace(options["none"], seed=2025)
    counts = {name: count_of(name) // 2 for name in options}
    asked = (all_tokens(client, prompts[: counts[name]], own) for name, own in options.items())
    outputs = dict(zip(options, await asyncio.gather(*asked), strict=True))
    plain, other_seed = outputs["none"], outputs.pop("another seed")
    assert outputs == {name: plain[: counts[name]] for name in outputs}
    assert all(mine != theirs for mine, theirs in zip(other_seed, plain, strict=True))


async def test_speculation_accepts_several_tokens_a_round(client: Client, prompts: list[list[int]]) -> None:
    """A draft that is never right would pass every test of equality."""
    options = replace(
        GREEDY, max_tokens=48, speculation=SIZES["16"]
    )  # one that is chosen follows from how busy this machine is
    events = [event async for event in client.generate(TokenPrompt(tuple(prompts[0])), options)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.speculation.tokens_per_round > 2.5
    rounds = [event for event in events if isinstance(event, Tokens)]
    assert sum(sum(event.drafted) for event in rounds) == finished.speculation.num_accepted_tokens
    idle = [event.timings for event in rounds if not (event.timings.link_bytes > 0 and event.timings.compute_ns > 0)]
    assert not idle


async def test_text_outside_the_basic_plane_is_streamed_whole(client: Client) -> None:
    """A globe is four bytes in several tokens; the prompt makes the model go on with more of them."""
    prompt = TextPrompt("one 🌍 two 🚀 three 🌍 four 🚀 five 🌍 six 🚀 seven")
    events = [event async for event in client.generate(prompt, replace(GREEDY, max_tokens=16))]
    pieces = [text for event in events if isinstance(event, Tokens) for text in event.texts]
    assert sum("🌍" in piece for piece in pieces) >= 3
    assert "" in pieces, "a token that is no whole character shows nothing"
    assert "\ufffd" not in "".join(pieces)
