"""Simulated workers as processes: the text of a profile's model with any guesses, on the wire of the real ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from bough.cli.machine.up import settings_from
from bough.cli.main import argument_parser
from bough.client import Client
from bough.config.processes import DraftConfig, TargetConfig, parse
from bough.errors import ConfigError
from bough.processes.exit_with_parent import MODULE
from bough.processes.launch import Cluster
from bough.protocol.generation import (
    ChatPrompt,
    Constraint,
    Event,
    Finished,
    GenerateOptions,
    Message,
    Prompt,
    Speculation,
    Started,
    TextPrompt,
    Tokens,
)
from bough.simulation.clock import SimulatedClock
from bough.simulation.pair import SimulatedPair, simulated_pair
from bough.simulation.profile import shipped_profiles
from bough.trees.tree_plan import Scheme, StaticShape
from draft_worker.simulated import SimulatedDraftWorker
from target_worker.simulated import SimulatedTarget
from tests.conftest import pipeline
from tests.fakes.simulated import pair_of, simulated_settings, text_of, write_profile

pytestmark = pytest.mark.slow  # running services are called
PROMPT = TextPrompt("Once upon a time")
PLAIN = Speculation(disabled=True)
SIZE = Speculation(budget=24)
SHAPE = StaticShape((0, 0, 0, 1, 1, 2, 4))
OPTIONS = GenerateOptions(max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = replace(OPTIONS, temperature=0.8)
WAYS = {
    "plain": replace(OPTIONS, speculation=PLAIN),
    "greedy": OPTIONS,
    "narrow": replace(OPTIONS, speculation=Speculation(budget=5, width=1, depth=4)),
    "greedy, a size": replace(OPTIONS, speculation=SIZE),
    "sampled": replace(SAMPLED, seed=7),
    "sampled, a size": replace(SAMPLED, seed=7, speculation=SIZE),
    "sampled, plain": replace(SAMPLED, seed=7, speculation=PLAIN),
    "shape": replace(SAMPLED, seed=2**64 - 1, speculation=Speculation(growth=SHAPE)),
    "without replacement": replace(
        SAMPLED, seed=9, speculation=Speculation(growth=SHAPE, scheme=Scheme.WITHOUT_REPLACEMENT, lookup=0)
    ),
    "chains without replacement": replace(
        SAMPLED,
        seed=10,
        speculation=Speculation(growth=StaticShape.chains(3, 3), scheme=Scheme.WITHOUT_REPLACEMENT, lookup=0),
    ),
    "traversal, greedy": replace(
        OPTIONS, speculation=Speculation(growth=StaticShape.chains(2, 4), scheme=Scheme.TRAVERSAL, lookup=0)
    ),
    "penalties": replace(SAMPLED, seed=3, repetition_penalty=1.4, logit_bias={300: 5.0}, top_k=3, logprobs=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def pair(folder: Path) -> SimulatedPair:
    return pair_of(folder)


@pytest.fixture(scope="module")
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    profile = write_profile(folder)
    async with pipeline(simulated_settings(profile, profile)) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.address) as connected:
        yield connected


async def events_of(client: Client, options: GenerateOptions, prompt: Prompt = PROMPT) -> list[Event]:
    return [event async for event in client.generate(prompt, options)]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def started(events: list[Event]) -> Started:
    assert isinstance(events[0], Started)
    return events[0]


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def expected(pair: SimulatedPair, events: list[Event], options: GenerateOptions) -> list[int]:
    """The model's text from the end of the prompt on."""
    seed = 0 if options.temperature == 0 else options.seed or 0
    return text_of(pair, seed, started(events).prompt_tokens, options.max_tokens)


@pytest.mark.pipeline
@pytest.mark.parametrize("way", WAYS)
async def test_every_speculation_gives_the_text_models_text(client: Client, pair: SimulatedPair, way: str) -> None:
    events = await events_of(client, WAYS[way])
    assert tokens_of(events) == expected(pair, events, WAYS[way])
    speculation = finished(events).speculation
    if WAYS[way].speculation.disabled:
        assert speculation.num_rounds == 40
    else:
        assert speculation.num_degraded_rounds == 0
        is_chosen = WAYS[way].speculation == Speculation()  # by what this machine takes, where little is simulated
        assert is_chosen or speculation.tokens_per_round > 1.2, "the draft is right in three of five places"


@pytest.mark.pipeline
async def test_a_text_that_may_end_ends_at_the_text_models_end(client: Client, pair: SimulatedPair) -> None:
    options = replace(SAMPLED, ignore_eos=False, max_tokens=1000, seed=4, speculation=Speculation(budget=16))
    events = await events_of(client, options)
    text = expected(pair, events, options)
    end = text.index(pair.tokenizer.eos_token_ids[0])
    assert tokens_of(events) == text[: end + 1]
    assert finished(events).finish_reason == "stop"


@pytest.mark.pipeline
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
async def test_every_speculation_gives_the_same_text_with_a_schema(client: Client, temperature: float) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    texts, rates = set(), {}
    for way, options in WAYS.items():
        own = replace(options, temperature=temperature, seed=8, max_tokens=400, ignore_eos=False)
        own = replace(own, constraint=Constraint(json_schema=json.dumps(schema)))
        events = await events_of(client, own)
        assert finished(events).finish_reason == "stop"
        texts.add("".join(event.text for event in events if isinstance(event, Tokens)))
        rates[way] = finished(events).speculation.tokens_per_round
    (text,) = texts
    jsonschema.validate(json.loads(text), schema)
    assert rates["plain"] == 1.0
    assert rates["greedy, a size"] > 1.3, "the draft knows the grammar"


@pytest.mark.pipeline
async def test_concurrent_sessions_have_their_own_texts(client: Client, pair: SimulatedPair) -> None:
    options = [replace(SAMPLED, seed=seed) for seed in range(20, 28)]
    runs = await asyncio.gather(*(events_of(client, own) for own in options))
    for events, own in zip(runs, options, strict=True):
        assert tokens_of(events) == expected(pair, events, own)
    assert len({tuple(tokens_of(events)) for events in runs}) == len(runs)


@pytest.mark.pipeline
async def test_a_second_turn_and_a_shared_prefix_are_not_computed_again(client: Client) -> None:
    long = TextPrompt("the same beginning of many prompts " * 12)
    first, second = [finished(await events_of(client, OPTIONS, long)).usage for _ in range(2)]
    assert second.cached_tokens > 0.8 * first.prompt_tokens
    turn = replace(OPTIONS, session_id="talk")
    chat = ChatPrompt((Message("user", "Hello!"),))
    before = finished(await events_of(client, turn, chat)).usage
    after = finished(
        await events_of(client, replace(turn, continues=True), ChatPrompt((Message("user", "And?"),)))
    ).usage
    assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1


@pytest.mark.pipeline
async def test_log_probabilities_come_from_the_text_model(client: Client) -> None:
    events = await events_of(client, replace(SAMPLED, seed=5, logprobs=3))
    told = [each for event in events if isinstance(event, Tokens) for each in event.logprobs]
    assert [each.token.token_id for each in told] == tokens_of(events)
    assert all(-100.0 < each.token.logprob <= 0.0 for each in told)
    assert all(len(each.top) == 3 and each.top[0].logprob >= each.top[1].logprob for each in told)


@pytest.mark.pipeline
async def test_workers_report_that_they_are_simulated(client: Client) -> None:
    workers = {worker.info.kind: worker for worker in (await client.server_info()).workers}
    for worker in workers.values():
        assert worker.problem == ""
        assert worker.info.model_description == f"simulated {worker.info.kind}"
        notes = " ".join(worker.info.notes)
        assert "simulated: profile quick, no weights" in notes
        assert "made up for tests" in notes
        assert "100 simulated seconds in a real one" in notes
        assert "do not change simulated text" in notes
    assert workers["target"].info.max_nodes == 512


@pytest.mark.pipeline
async def test_a_round_takes_the_seconds_of_the_profile(client: Client) -> None:
    """4 ms of link, and calls that cross a network: waiting times are separated."""
    events = await events_of(client, replace(OPTIONS, speculation=PLAIN))
    timings = [event.timings for event in events if isinstance(event, Tokens)][1:]
    assert len(timings) == OPTIONS.max_tokens - 1
    assert all(own.link_ns == 4_000_000 for own in timings)
    assert all(own.wait_ns == 2_900_000 for own in timings)
    assert all(own.target_ns >= 4_000_000 and own.network_ns >= 1_000_000 for own in timings)


@pytest.mark.pipeline
async def test_another_target_of_the_profile_takes_over(folder: Path, pair: SimulatedPair) -> None:
    """One whose clock goes faster, and to whom other things happen."""
    profile = write_profile(folder)
    like = write_profile(folder, "like", clock_scale=200, events=[{"at_second": 1, "link": 2}])
    async with pipeline(simulated_settings(profile, profile)) as cluster, Client(cluster.address) as client:
        other = [sys.executable, *MODULE, "target_worker", "--simulate", str(like)]
        options = replace(SAMPLED, seed=6, max_tokens=100)
        stream = client.generate(PROMPT, options)
        events: list[Event] = [await anext(stream) for _ in range(4)]
        cluster.start("other", [*other, "--index-url", cluster.index_url])
        cluster.children["target_worker"].process.kill()
        events += [event async for event in stream]
        assert tokens_of(events) == expected(pair, events, options)
        assert finished(events).num_failovers == 1


@pytest.mark.pipeline
async def test_workers_that_fail_sometimes_cost_rounds_and_no_tokens(folder: Path, pair: SimulatedPair) -> None:
    flaky = write_profile(
        folder, "flaky", failures=[{"worker": kind, "probability": 0.3} for kind in ("draft", "target")]
    )
    async with pipeline(simulated_settings(flaky, flaky)) as cluster, Client(cluster.address) as client:
        options = replace(OPTIONS, max_tokens=60, speculation=SIZE)
        events = await events_of(client, options)
    assert tokens_of(events) == expected(pair, events, options)
    assert finished(events).speculation.num_degraded_rounds > 0, "the draft's fifth call fails"


@pytest.mark.parametrize("package", ["target_worker", "draft_worker"])
def test_simulated_workers_load_neither_torch_nor_numba(package: str) -> None:
    """From the settings to a worker that has started: all that a process has loaded when it serves."""
    config = {"target_worker": "TargetConfig", "draft_worker": "DraftConfig"}[package]
    code = f"""
import sys
from {package} import __main__
from bough.config.processes import {config}, parse
servicer, load = __main__.simulated_parts(parse({config}, "{package}", ["--simulate", "all-resident"], {{}}), "w")
worker = load()
print(worker.info().kind, sorted({{"torch", "transformers", "numba", "safetensors"}} & set(sys.modules)))
worker.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{package.removesuffix('_worker')} []\n"


@pytest.mark.parametrize("name", shipped_profiles())
def test_workers_of_every_shipped_profile_start(name: str) -> None:
    """With the profile's limits, and with less where settings want less."""
    pair, clock = simulated_pair(name), SimulatedClock()
    limits = pair.profile.target
    flags = ["--simulate", name, "--max-nodes", "99"]
    draft = SimulatedDraftWorker(parse(DraftConfig, "d", flags[:2], {}), "d", pair, clock)
    target = SimulatedTarget(parse(TargetConfig, "t", [*flags, "--metrics-port", "-1"], {}), "t", pair, clock)
    try:
        assert (draft.max_nodes, draft.info().max_context) == (limits.max_nodes, limits.max_context)
        assert (target.max_nodes, target.info().max_context) == (99, min(limits.max_context, limits.kv_tokens - 99))
        assert target.info().max_sessions >= 1
    finally:
        target.close()
        draft.close()


@pytest.mark.parametrize("command", [["target_worker"], ["draft_worker"], ["bough.cli.main", "up"]])
def test_an_unknown_profile_is_refused_with_the_known_ones(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, *MODULE, *command, "--simulate", "no-such"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    line = ran.stderr.splitlines()[-1]
    must = f"must be a JSON file, or one of {', '.join(shipped_profiles())}"
    assert line == f"error: profile: {must}, got 'no-such': No such file or directory"


def test_a_profile_with_an_invalid_field_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.link_seconds: must be greater than or equal to 0, got -1"):
        simulated_pair(str(write_profile(tmp_path, target={"link_seconds": -1})))


def test_a_target_whose_kv_holds_no_session_does_not_start(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, target={"link_seconds": 1, "kv_tokens": 512})
    with pytest.raises(ConfigError, match=r"target\.kv_tokens: must be more than the nodes of a tree, 512, got 512"):
        SimulatedTarget(parse(TargetConfig, "t", ["--simulate", "p"], {}), "t", pair, SimulatedClock())


def test_targets_only_take_over_from_equal_targets(tmp_path: Path) -> None:
    """What happens to a worker, or how fast its clock is, makes it no other target."""
    own = pair_of(tmp_path).fingerprint
    assert pair_of(tmp_path, name="other", failures=[{"worker": "target"}], clock_scale=1).fingerprint == own
    assert pair_of(tmp_path, name="slower", target={"link_seconds": 0.5}).fingerprint != own
    assert len({simulated_pair(name).fingerprint for name in shipped_profiles()}) == len(shipped_profiles())


def test_up_starts_both_workers_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_TARGET_MODEL", "somewhere")  # a flag wins over it
    path = write_profile(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = settings_from(argument_parser().parse_args(["up", "--simulate", "quick.json", "--max-context", "99"]))
    assert settings.draft is not None
    assert {settings.target.simulate, settings.draft.simulate} == {str(path)}
    assert (settings.target.model, settings.draft.model, settings.target.max_context) == ("", "", 99)
    assert settings.orchestrator.draft == "workers"
    alone = settings_from(argument_parser().parse_args(["up", "--simulate", "two-cores", "--draft", "none"]))
    assert (alone.target.simulate, alone.draft, alone.orchestrator.draft) == ("two-cores", None, "none")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "T"], "--target: must not be given with --simulate, which has no model, got T"),
        (["--draft", "D"], "--draft: must be none or not given with --simulate, got D"),
        (["--draft-bits", "8"], "--draft-bits: must not be given .*, got 8"),
        (["--kv-memory", "1GB"], "--kv-memory: must not be given .*, got 1GB"),
    ],
)
def test_up_refuses_model_flags_with_a_profile(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from(argument_parser().parse_args(["up", "--simulate", "two-cores", *flags]))


def test_a_worker_has_a_model_or_a_profile() -> None:
    with pytest.raises(ConfigError, match="--simulate: must not be given with --model, got 'p' and 'm'"):
        parse(TargetConfig, "target_worker", ["--simulate", "p", "--model", "m"], {})
    with pytest.raises(
        ConfigError, match=r"--model: missing; must be set by .*BOUGH_DRAFT_MODEL, or --simulate in its place"
    ):
        parse(DraftConfig, "draft_worker", [], {})
    named = parse(TargetConfig, "target_worker", [], {"BOUGH_TARGET_SIMULATE": "p"})
    assert (named.model, named.simulate) == ("", "p")
    flagged = parse(TargetConfig, "target_worker", ["--model", "m"], {"BOUGH_TARGET_SIMULATE": "p"})
    assert (flagged.model, flagged.simulate) == ("m", "")
