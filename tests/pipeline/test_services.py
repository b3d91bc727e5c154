"""Bad input against the three services: a clear status that names the field, and processes that stay up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import draft_worker.__main__
import target_worker.__main__
from bough.client import Client
from bough.errors import AlreadyRunning, BoughError, InvalidRequest, NotFound
from bough.model.backend import load
from bough.pb import common_pb2, draft_pb2, target_pb2
from bough.processes import process
from bough.processes.compatibility import fetch_tokenizer
from bough.processes.launch import Cluster
from bough.protocol.generation import (
    ChatPrompt,
    Finished,
    GenerateOptions,
    Message,
    Speculation,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from bough.protocol.prefix_hash import block_hashes, prefix_hash
from bough.registry.registry import Registry
from bough.rpc.server import is_serving, open_channel
from bough.rpc.services import DRAFT, TARGET, stub_of
from bough.rpc.status_map import HASH_KEY, LENGTH_KEY, MAX_MESSAGE_BYTES
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import Scheme
from loadtest.common.tiny_model import TINY, save_model
from loadtest.common.tiny_tokenizer import save_tokenizer
from target_worker.identity.code_hash import code_hash
from tests.fakes.waiting import PATIENCE_SECONDS, until

START_SECONDS = 60.0
SHORT = GenerateOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = TextPrompt("hello")


@pytest.fixture
async def client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(tiny_cluster.address) as client:
        yield client


async def worker_address(cluster: Cluster, kind: str) -> str:
    registry = Registry(cluster.index_url)
    try:
        return next(record.address for record in await registry.workers() if record.kind == kind)
    finally:
        await registry.close()


@pytest.fixture
async def target(tiny_cluster: Cluster) -> AsyncIterator[Any]:
    async with open_channel(await worker_address(tiny_cluster, "target")) as channel:
        yield stub_of(TARGET, channel)


@pytest.fixture
async def draft(tiny_cluster: Cluster) -> AsyncIterator[Any]:
    async with open_channel(await worker_address(tiny_cluster, "draft")) as channel:
        yield stub_of(DRAFT, channel)


async def finish(client: Client, prompt: object, options: GenerateOptions = SHORT) -> Finished:
    """The last event."""
    events = [event async for event in client.generate(prompt, options)]
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (TextPrompt(""), {}, "prompt: must have at least one token"),
        (TokenPrompt(()), {}, "prompt: must have at least one token"),
        (ChatPrompt(()), {}, r"chat\.messages: must have at least one"),
        (TokenPrompt((1, 262)), {}, r"token_ids\.ids\[1\]: must be 0 to 261, got 262"),
        (
            TokenPrompt((1,) * 512),
            {},
            "prompt: 512 tokens, so the prompt is too long: this model's maximum context length is 512 tokens",
        ),
        (PROMPT, {"temperature": -1.0}, "temperature: must .* got -1.0"),
        (PROMPT, {"temperature": float("nan")}, "temperature: must .* got nan"),
        (PROMPT, {"top_p": 0.0}, "top_p: must .* got 0.0"),
        (PROMPT, {"top_p": 1.5}, "top_p: must .* got 1.5"),
        (PROMPT, {"min_p": 2.0}, "min_p: must .* got 2.0"),
        (PROMPT, {"repetition_penalty": -1.0}, "repetition_penalty: must .* got -1.0"),
        (PROMPT, {"logit_bias": {999: 1.0}}, "logit_bias: must .* got 999"),
        (PROMPT, {"stop": ("",)}, r"stop\[0\]: must .* got ''"),
        (PROMPT, {"stop_token_ids": frozenset({262})}, "stop_token_ids: must .* got 262"),
        (PROMPT, {"max_tokens": 0}, "max_tokens: must .* got 0"),
        (PROMPT, {"logprobs": 1000}, "logprobs: must .* got 1000"),
        (PROMPT, {"speculation": Speculation(budget=0)}, r"speculation\.budget: must .* got 0"),
        (PROMPT, {"speculation": Speculation(budget=33)}, r"speculation\.budget: must be 1 to 32, got 33"),
        (PROMPT, {"speculation": Speculation(lookup=33)}, r"speculation\.lookup: must be 0 to 32, got 33"),
    ],
)
async def test_invalid_requests_are_refused(
    client: Client, prompt: object, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await finish(client, prompt, replace(SHORT, **changes))
    assert (await finish(client, PROMPT)).usage.completion_tokens == 4


async def test_a_message_over_the_limit_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=f"must have at most {MAX_MESSAGE_BYTES} bytes, got: .*larger than max"):
        await finish(client, TextPrompt("x" * (MAX_MESSAGE_BYTES + 1)))
    assert (await finish(client, PROMPT)).finish_reason == "length"


async def test_unknown_requests_and_sessions_are_refused(client: Client, target: Any) -> None:
    with pytest.raises(NotFound, match="request_id: 'nobody' is not running"):
        await client.abort("nobody")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.Release(common_pb2.ReleaseRequest(session_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'nobody'" in str(caught.value.details())


def verify_request(**changes: object) -> target_pb2.VerifyRequest:
    values: dict[str, object] = {
        "context": common_pb2.Context(session_id="bad-input", prefix_hash=prefix_hash([]), tokens=[1, 2]),
        "tree": common_pb2.Tree(tokens=[3]),
        "sampling": common_pb2.SamplingParams(temperature=0.0),
    }
    return target_pb2.VerifyRequest(**{**values, **changes})


def wire_tree(tokens: list[int], parents: list[int]) -> common_pb2.Tree:
    return common_pb2.Tree(tokens=tokens, parents=parents, log_probs=[-1.0] * len(parents))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": common_pb2.Tree()}, "tree: must have at least one node"),
        ({"tree": wire_tree([1, 2, 3], [0])}, "3 tokens, 1 parents"),
        ({"tree": wire_tree([1, 2, 3], [2, 1])}, r"tree\.parents\[1\]: must .* got 2"),
        ({"tree": wire_tree([1, 2], [1])}, r"tree\.parents\[1\]: must .* got 1"),
        ({"tree": wire_tree([1, 262], [0])}, r"tree\.tokens\[1\]: must .* got 262"),
        ({"tree": wire_tree([1, -5], [0])}, r"tree\.tokens\[1\]: must .* got -5"),
        ({"tree": wire_tree([1, 4, 4], [0, 0])}, r"tree\.tokens\[2\]: must differ .* got 4"),
        ({"tree": wire_tree(list(range(33)), list(range(32)))}, "must have at most 32 nodes, got 33"),
        ({"context": common_pb2.Context()}, r"context\.session_id"),
        ({"context": common_pb2.Context(session_id="x", tokens=[999])}, r"context\.tokens\[0\]: must .* got 999"),
        ({"sampling": common_pb2.SamplingParams(top_p=0.0)}, "top_p: must .* got 0.0"),
    ],
)
async def test_invalid_trees_and_contexts_are_refused(target: Any, changes: dict[str, object], message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await target.Verify(verify_request(**changes))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await target.Verify(verify_request())).held_length == 3
    await target.Release(common_pb2.ReleaseRequest(session_id="bad-input"))


def sampled_tree(drawn_from: list[int], draws: list[int]) -> common_pb2.Tree:
    """Root 3 with the children 4 and 5."""
    tree = wire_tree([3, 4, 5], [0, 0])
    weights = [1.0] * len(drawn_from)
    if drawn_from:
        expanded = common_pb2.DraftProbs(nodes=[0], sizes=[len(drawn_from)], tokens=drawn_from, weights=weights)
        tree.draft_probs.CopyFrom(expanded)
    tree.draws.extend(draws)
    return tree


@pytest.mark.parametrize(
    ("scheme", "tree", "message"),
    [
        (
            common_pb2.WITHOUT_REPLACEMENT,
            sampled_tree([], []),
            r"tree\.draft_probs: must have the distribution .* node 0",
        ),
        (
            common_pb2.WITHOUT_REPLACEMENT,
            sampled_tree([4, 9], []),
            r"tree\.tokens\[2\]: must be a token of tree\.draft_probs of node 0, got 5",
        ),
        (
            common_pb2.WITHOUT_REPLACEMENT,
            sampled_tree([4, 5], [1, 3]),
            r"tree\.draws: must be nodes from 1 to 2, got 3",
        ),
        (2, sampled_tree([4, 5], []), r"scheme: must be one of 0 \(target\).* got 2"),
        (
            common_pb2.WITHOUT_REPLACEMENT,
            sampled_tree([4, 5], [1, 1]),
            r"tree\.draws: must have each node at most once",
        ),
        (7, sampled_tree([4, 5], []), r"scheme: must be one of 0 \(target\).* got 7"),
    ],
)
async def test_trees_that_were_not_sampled_for_the_scheme_are_refused(
    target: Any, scheme: common_pb2.VerificationScheme, tree: common_pb2.Tree, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await target.Verify(verify_request(tree=tree, scheme=scheme))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("scheme", [common_pb2.WITHOUT_REPLACEMENT, common_pb2.TRAVERSAL])
async def test_sampled_trees_are_verified_by_their_schemes(target: Any, scheme: common_pb2.VerificationScheme) -> None:
    """At temperature 0 the answer is the target's own, whatever was drawn; a tree of one node needs no sample."""
    sampling = verify_request().sampling
    plain = await target.Verify(verify_request(scheme=scheme))
    best = plain.bonus_token
    for round_, drawn in enumerate(([best, best + 1], [best + 1, best + 2]), start=1):
        tree = sampled_tree(drawn, [])
        tree.tokens[1:] = drawn
        context = common_pb2.Context(session_id="bad-input", context_start=2, prefix_hash=prefix_hash([1, 2]))
        request = verify_request(context=context, tree=tree, scheme=scheme, sampling=sampling, round=round_)
        reply = await target.Verify(request)
        assert list(reply.accepted_nodes) == ([1] if drawn[0] == best else [])
        assert drawn[0] == best or reply.bonus_token == best
    await target.Release(common_pb2.ReleaseRequest(session_id="bad-input"))


async def test_an_unknown_session_is_answered_with_its_cached_tokens(target: Any) -> None:
    context = common_pb2.Context(session_id="unknown", context_start=7, prefix_hash=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await target.Verify(verify_request(context=context))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    metadata = dict(caught.value.trailing_metadata() or ())
    assert (metadata[LENGTH_KEY], metadata[HASH_KEY]) == ("0", str(prefix_hash([])))
    with pytest.raises(grpc.aio.AioRpcError, match="has no slot here"):
        await target.Release(common_pb2.ReleaseRequest(session_id="unknown"))  # it has taken no slot


async def test_a_call_for_another_worker_is_refused(target: Any) -> None:
    """It was at this address before, perhaps with another model: a connection goes to the present server."""
    with pytest.raises(grpc.aio.AioRpcError, match="at this address, got 'target-1-a'") as caught:
        await target.Verify(verify_request(worker_id="target-1-a"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    info = await target.GetServerInfo(common_pb2.GetServerInfoRequest())
    await target.Verify(verify_request(worker_id=info.worker_id))
    await target.Release(common_pb2.ReleaseRequest(session_id="bad-input"))


async def test_a_draft_refuses_invalid_sizes(draft: Any) -> None:
    good = verify_request()
    request = draft_pb2.GrowRequest(
        context=good.context,
        root_token=3,
        sampling=good.sampling,
        growth=common_pb2.Growth(best_first=common_pb2.BestFirst(budget=8, width=0, depth=2)),
    )
    with pytest.raises(grpc.aio.AioRpcError, match="width: must be 1 to 512, got 0"):
        await draft.Grow(request)
    request.growth.best_first.width = 4
    assert len((await draft.Grow(request)).tree.tokens) == 8


async def test_invalid_bytes_are_refused(tiny_cluster: Cluster) -> None:
    async with open_channel(await worker_address(tiny_cluster, "target")) as channel:
        raw = channel.unary_unary("/bough.v1.Target/Verify")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff\xff\xff\xff garbage")
        assert await is_serving(channel, "bough.v1.Target", 5.0)


async def test_health_and_reflection_work_on_all_three(tiny_cluster: Cluster) -> None:
    for kind, service in (
        ("target", "bough.v1.Target"),
        ("draft", "bough.v1.Draft"),
        ("orchestrator", "bough.v1.Generation"),
    ):
        async with open_channel(await worker_address(tiny_cluster, kind)) as channel:
            assert await is_serving(channel, "", 60.0)
            async with asyncio.timeout(60.0):
                while not await is_serving(channel, service, 60.0):  # an orchestrator looks once a second what it has
                    await asyncio.sleep(0.1)
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [s.name async for reply in call for s in reply.list_services_response.service]
            assert service in names


async def test_server_info_describes_the_server(client: Client) -> None:
    model, server, loads = await client.model_info(), await client.server_info(), await client.loads()
    assert (model.vocab_size, model.max_context, model.eos_token_ids) == (262, 512, (261,))
    arithmetic = {worker.info.kind: worker.info.arithmetic for worker in server.workers}
    assert arithmetic.keys() == {"draft", "target"}
    assert arithmetic["target"].endswith(
        f"code {code_hash(load('cpu'))}"
    )  # sessions do not move to what may round otherwise
    assert server.index_problem == ""
    assert loads.num_requests_running == 0


async def test_acceptance_is_counted_while_running(client: Client) -> None:
    """Every round with a tree counts, each of its nodes that had children once."""
    options = replace(SHORT, max_tokens=30, speculation=Speculation(budget=16))
    before = next((c.num_rounds for c in await client.acceptance() if c.scheme is Scheme.TARGET), 0)
    rounds = [event async for event in client.generate(PROMPT, options) if isinstance(event, Tokens)]
    counts = next(c for c in await client.acceptance() if c.scheme is Scheme.TARGET)
    assert counts.num_rounds - before == sum(event.num_nodes > 1 for event in rounds) > 0
    at_roots = sum(counts.depths[0].accepted) + sum(counts.depths[0].rejected)
    assert 0 < at_roots <= counts.num_rounds
    below = sum(sum(depth.accepted) + sum(depth.rejected) for depth in counts.depths[1:2])
    assert below <= sum(counts.depths[0].accepted)  # nodes at depth 1 that were walked through, and had children


async def test_tokens_are_bounded_by_the_context(client: Client) -> None:
    last = await finish(client, TokenPrompt(tuple(range(200)) * 2), replace(SHORT, max_tokens=10_000))
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 112)


async def test_an_abort_ends_a_stream_at_once(client: Client) -> None:
    options = replace(SHORT, max_tokens=400, request_id="long", speculation=Speculation(disabled=True))
    stream = client.generate(PROMPT, options)
    await anext(stream)
    await anext(stream)
    await client.abort("long")
    events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason == "abort"


async def test_a_request_ends_when_its_client_leaves(client: Client) -> None:
    stream = client.generate(PROMPT, replace(SHORT, max_tokens=400))
    await anext(stream)
    await anext(stream)
    await stream.aclose()

    async def is_idle() -> bool:
        return (await client.loads()).num_requests_running == 0

    await until(is_idle)


async def test_a_second_turn_finds_its_tokens_cached(client: Client) -> None:
    options = replace(SHORT, session_id="talk", max_tokens=12)
    first = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(first[-1], Finished)
    output = [token for event in first[1:-1] for token in event.token_ids]
    with_history = TokenPrompt((*await tokens_of("hello", client), *output, 1, 2, 3))
    second = await finish(client, with_history, options)
    history = len(with_history.token_ids) - 3
    assert second.usage.cached_tokens >= 0.9 * history
    fresh = await finish(client, with_history, replace(options, session_id=""))
    assert fresh.usage.cached_tokens == 0


async def tokens_of(text: str, client: Client) -> list[int]:
    """Ids of a text, by the tokenizer that the target hands out."""
    address = next(w.address for w in (await client.server_info()).workers if w.info.kind == "target")
    async with open_channel(address) as channel:
        return Tokenizer(await fetch_tokenizer(channel, "target")).encode(text)


async def test_a_session_takes_one_request_at_a_time(client: Client) -> None:
    stream = client.generate(PROMPT, replace(SHORT, session_id="busy", max_tokens=400))
    await anext(stream)
    with pytest.raises(AlreadyRunning, match="session_id: 'busy' has a request running"):
        await finish(client, PROMPT, replace(SHORT, session_id="busy"))
    await stream.aclose()


async def test_penalties_bias_stops_and_logprobs_are_the_same_with_and_without_trees(client: Client) -> None:
    options = GenerateOptions(
        temperature=0.7,
        seed=11,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={65: 2.0},
        max_tokens=40,
        logprobs=2,
        ignore_eos=True,
    )
    outcomes = []
    for speculation in (Speculation(disabled=True), Speculation(budget=2), Speculation(budget=32, depth=5)):
        events = [e async for e in client.generate(PROMPT, replace(options, speculation=speculation))]
        rounds = events[1:-1]
        tokens = [token for event in rounds for token in event.token_ids]
        logprobs = [entry for event in rounds for entry in event.logprobs]
        assert [entry.token.token_id for entry in logprobs] == tokens
        assert all(len(entry.top) == 2 for entry in logprobs)
        outcomes.append((tokens, logprobs))
    assert outcomes[0] == outcomes[1] == outcomes[2]


async def test_a_stop_text_ends_the_output_where_it_begins(client: Client) -> None:
    whole = [e async for e in client.generate(PROMPT, replace(SHORT, max_tokens=60))]
    text = "".join(event.text for event in whole[1:])
    middle = next(text[i : i + 3] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 3])
    cut = [e async for e in client.generate(PROMPT, replace(SHORT, max_tokens=60, stop=(middle,)))]
    assert "".join(event.text for event in cut[1:]) == text[: text.find(middle)]
    last = cut[-1]
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.stop_reason) == ("stop", middle)


async def test_chat_uses_the_models_template(client: Client) -> None:
    chat = ChatPrompt((Message("user", "hi"),))
    assert (await finish(client, chat)).usage.prompt_tokens == len("user: hi\nassistant:")


async def test_heartbeats_report_load_and_cached_prefixes(client: Client, tiny_cluster: Cluster) -> None:
    """What an orchestrator that has just started places its first sessions by."""
    tokens = tuple(range(100))
    done = await finish(client, TokenPrompt(tokens))
    registry = Registry(tiny_cluster.index_url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            target = next(record for record in await registry.workers() if record.kind == "target")
            fingerprint = (await client.model_info()).model_fingerprint
            found = await registry.find_prefixes(fingerprint, block_hashes(tokens), [target.worker_id])
            if found and target.load.kv_used_bytes:
                break
            await asyncio.sleep(0.05)
    await registry.close()
    assert done.usage.prompt_tokens == len(tokens)
    assert found == {target.worker_id: 3}
    assert 0 < target.load.kv_used_bytes <= target.load.kv_bytes


async def test_a_target_that_streams_its_layers_starts_before_the_draft(tiny_cluster: Cluster) -> None:
    """One that takes what is free comes after it (tests/orchestrator/test_drain.py)."""
    assert [name for name in tiny_cluster.children if "worker" in name] == ["target_worker", "draft_worker"]


async def test_workers_that_cannot_start_report_why(
    tiny_cluster: Cluster, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised becomes a line and a status: tests/simulation/test_simulated_workers.py."""
    index = ("--index-url", tiny_cluster.index_url)
    port = (await worker_address(tiny_cluster, "target")).split(":")[1]
    other = save_model(tmp_path / "other", TINY)
    save_tokenizer(other, swapped=True)
    broken = save_model(tmp_path / "broken", TINY)
    victim = sorted(broken.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-10])
    streaming = ["--model", str(tiny), "--resident-layers", "0"]
    monkeypatch.setattr(process, "stop_event", asyncio.Event)  # signals stay this process's own
    for module, flags, message in (
        (target_worker.__main__, ["--model", str(broken)], f"{victim.name}"),
        (target_worker.__main__, ["--model", str(tmp_path / "nowhere")], "nowhere"),
        (target_worker.__main__, ["--model", str(tiny), "--port", port], f"--port: cannot listen on 127.0.0.1:{port}"),
        (
            target_worker.__main__,
            ["--model", str(tiny), "--kv-memory", "1KB"],
            "got 1000",
        ),
        (target_worker.__main__, [*streaming, "--ring-memory", "1KB"], "--ring-memory: must be at least"),
        (target_worker.__main__, [*streaming, "--device-memory", "1MB"], "for 2 layers of 0.13 MB, got"),
        (draft_worker.__main__, ["--model", str(tiny), "--drop-layers", "7"], "--drop-layers: must be 0 to"),
        (
            draft_worker.__main__,
            ["--model", str(tiny), "--kv-memory", "1KB"],
            "got 1000",
        ),
        (draft_worker.__main__, ["--model", str(other)], "token 5 is"),
        (target_worker.__main__, ["--model", str(other)], "token 5 is"),
    ):
        monkeypatch.setattr(sys, "argv", ["worker", "--dtype", "float32", *flags, *index])
        with pytest.raises(BoughError) as raised:
            await asyncio.wait_for(module.main(), START_SECONDS)  # one that starts after all would serve forever
        assert message in str(raised.value), flags
