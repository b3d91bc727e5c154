"""The test of tests: the whole pipeline on SmolLM2, token for token what transformers' own generate gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from tests.fakes.tiers import long_but

# Shallow trees: on two cores the draft steps of many sessions are most of the time that these tests take.
SIZES = {str(budget): Speculation(budget=budget, width=32, depth=4) for budget in (1, 16, 64, 256)}
WAYS = {"none": Speculation(disabled=True), "self-sized": Speculation(), **SIZES}
GREEDY = GenerateOptions(temperature=0.0, max_tokens=32, ignore_eos=True)


class Load(NamedTuple):
    """Prompts and tokens of each way to speculate. Large trees take most of the time, and may have fewer of both."""

    num_prompts: int
    length: int
    counts: Mapping[str, int]
    lengths: Mapping[str, int]

    def options(self, options: GenerateOptions, way: str) -> GenerateOptions:
        return replace(options, speculation=WAYS[way], max_tokens=self.lengths.get(way, self.length))

    def count(self, way: str) -> int:
        return self.counts.get(way, self.num_prompts)


FEW = Load(1, 14, {"none": 2, "16": 2}, {"64": 8, "256": 5})
MANY = Load(3, 32, {"1": 2, "64": 2, "256": 1}, {"256": 20})
if os.environ.get("BOUGH_ALL_PROMPTS"):
    MANY = Load(12, 64, {}, {})  # minutes
LOADS = {"few prompts": FEW, "many prompts": MANY}


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
    return [tokenizer.encode_chat([("user", text)]) for text in load_prompts()[: MANY.num_prompts]]


def generated(smollm: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' own greedy text on the same weights, float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    length = max(map(len, prompts))
    padded = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output: list[list[int]] = model.generate(padded, attention_mask=mask, **greedy)[:, length:].tolist()
    return output


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


@pytest.mark.parametrize("load", long_but([FEW], LOADS.values()), ids=LOADS)
async def test_greedy_output_equals_generate(
    client: Client, smollm: Path, prompts: list[list[int]], load: Load
) -> None:
    """Of trees of every size, in sweeps that all of them share."""
    expected = generated(smollm, prompts[: max(map(load.count, WAYS))], load.length)
    options = {name: load.options(GREEDY, name) for name in WAYS}
    asked = (all_tokens(client, prompts[: load.count(name)], own) for name, own in options.items())
    outputs = dict(zip(options, await asyncio.gather(*asked), strict=True))
    wanted = {name: [tokens[: own.max_tokens] for tokens in expected] for name, own in options.items()}
    assert outputs == {name: tokens[: load.count(name)] for name, tokens in wanted.items()}


async def test_sampled_output_is_the_same_for_every_size(client: Client, prompts: list[list[int]]) -> None:
    sampled = replace(GREEDY, temperature=0.8, seed=2024)
    options = {name: FEW.options(sampled, name) for name in WAYS}
    options["another seed"] = replace(options["none"], seed=2025)
    outputs = await asyncio.gather(*(tokens_for(client, prompts[0], own) for own in options.values()))
    texts = dict(zip(options, outputs, strict=True))
    plain, other_seed = texts["none"], texts.pop("another seed")
    assert texts == {name: plain[: options[name].max_tokens] for name in texts}
    assert other_seed != plain


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


async def test_text_outside_the_basic_plane_is_streamed_completely(client: Client) -> None:
    """A globe is four bytes in several tokens; the prompt makes the model continue with more of them."""
    prompt = TextPrompt("one 🌍 two 🚀 three 🌍 four 🚀 five 🌍 six 🚀 seven")
    events = [event async for event in client.generate(prompt, replace(GREEDY, max_tokens=16))]
    pieces = [text for event in events if isinstance(event, Tokens) for text in event.texts]
    assert sum("🌍" in piece for piece in pieces) >= 3
    assert "" in pieces, "a token that is no whole character shows nothing"
    assert "\ufffd" not in "".join(pieces)
