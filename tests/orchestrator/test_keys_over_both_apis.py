"""An orchestrator with a file of keys: which callers both APIs accept; tenants learn nothing of each other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from bough.client import Client
from bough.config.processes import OrchestratorConfig, parse
from bough.errors import BoughError, Exhausted, InvalidRequest, NotFound, Unauthenticated
from bough.pb import generation_pb2 as pb
from bough.protocol import codec_generation as wire
from bough.protocol.generation import Finished, GenerateOptions, Resume, Started, TextPrompt
from bough.rpc.server import is_serving, open_channel
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from bough.security.keys import hash_of
from loadtest.locust.plan import Question
from orchestrator.assembly import Orchestrator, assembled
from orchestrator.http_api.body import LARGE_BYTES
from tests.fakes.http_stack import error_of
from tests.fakes.stage import Stage, staged
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
PROMPT = TextPrompt("hello")
SHORT = GenerateOptions(max_tokens=3, temperature=0.0)
BODY = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
ALICE, BOB = "sk-alice", "sk-bob"


@dataclass(frozen=True, slots=True)
class Guarded:
    """An orchestrator with keys."""

    stage: Stage
    orchestrator: Orchestrator
    file: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.orchestrator.port}"

    def client(self, key: str | None) -> Client:
        return Client(self.address, patience_seconds=0.0, api_key=key)

    def http(self, key: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.orchestrator.requests.http_url, timeout=60, headers=headers)

    def write(self, *lines: dict[str, Any]) -> None:
        self.file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(name: str, key: str, **limits: int) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(key), **limits}


@asynccontextmanager
async def guarded(folder: Path, *flags: str, **limits: int) -> AsyncIterator[Guarded]:
    """Alice, to whom `limits` apply, and Bob."""
    file = folder / "keys"
    file.touch(0o600)
    async with staged(folder) as stage:
        everywhere = ["--index-url", stage.index_url, "--draft", "none", "--port", "0", "--keys", str(file)]
        config = parse(OrchestratorConfig, "o", [*everywhere, *flags], {})
        file.write_text(f"{json.dumps(line('alice', ALICE, **limits))}\n{json.dumps(line('bob', BOB))}\n")
        async with assembled(config, asyncio.Event()) as orchestrator:
            await until(lambda: orchestrator.directory.has_target)
            yield Guarded(stage, orchestrator, file)


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path) as running:
        yield running


async def answer(client: Client, options: GenerateOptions = SHORT) -> tuple[Started, Finished]:
    events = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    return events[0], events[-1]


@pytest.mark.parametrize("key", ["", "sk-nobody", ALICE[:-1], hash_of(ALICE)])
async def test_grpc_refuses_every_call_without_a_key(endpoint: Guarded, key: str) -> None:
    """Every call of the service, unknown ones and reflection: before a message of theirs is read."""
    async with endpoint.client(key) as client:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: answer(client), lambda: client.abort("r"), lambda: client.close_session("s"), client.models,
            client.server_info, client.loads, client.acceptance, client.decisions,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(Unauthenticated, match="authorization: must be Bearer and a valid key"):
                await call()
    async with open_channel(endpoint.address) as channel:
        for method in ("/bough.v1.Generation/NoSuch", "/nothing", "/bough.v1.Generation/Generate"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"\xff" * 1000)
            # Unknown names are refused before they are looked up.
            is_there = method.endswith("/Generate")
            assert refused.value.code() is getattr(grpc.StatusCode, "UNAUTHENTICATED" if is_there else "UNIMPLEMENTED")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = stub.ServerReflectionInfo()  # one that sends meanwhile may see its own call end instead
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await is_serving(channel, "", 5.0)  # balancers have no key
    assert not endpoint.stage.target.asked


async def test_a_key_works_over_both_apis(endpoint: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint.client(ALICE) as client:
        started, finished = await answer(client)
        assert (finished.finish_reason, len(started.request_id)) == ("length", 32)
        assert await client.models()
    monkeypatch.setenv("BOUGH_API_KEY", BOB)
    async with endpoint.client(None) as client:
        await answer(client)
    async with endpoint.http(ALICE) as client:
        assert (await client.post("/v1/completions", json=BODY)).json()["usage"]["completion_tokens"] == 3
        assert (await client.get("/v1/models")).status_code == 200


async def test_users_of_a_load_test_send_their_key(endpoint: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator under load could not be tested with proper access control."""
    endpoints = pytest.importorskip("loadtest.locust.apis", reason="extra `loadtest`")
    for key in (ALICE, ""):
        monkeypatch.setenv("BOUGH_API_KEY", key)
        url = endpoint.orchestrator.requests.http_url
        for user in (endpoints.GrpcApi(endpoint.address, 60.0, 0.0), endpoints.HttpApi(url, 60.0, 0.0)):
            sample = await asyncio.to_thread(user.ask, endpoints.Conversation(), Question("hello", 3), 1)
            user.close()
            assert ("authorization: must be Bearer" in sample.error) is (key == ""), sample


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-nobody"}, {"authorization": ALICE}])
async def test_http_refuses_every_request_without_a_key(endpoint: Guarded, headers: dict[str, str]) -> None:
    """But health; also no path that is not there, and before a body is read."""
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/x/cancel", "/tokenize")
    asked = [("POST", path) for path in (*paths, "/detokenize")] + [("DELETE", "/v1/responses/x")]
    asked += [
        ("GET", path)
        for path in (
            "/v1/models",
            "/v1/models/fake",
            "/v1/responses/x",
            "/metrics",
            "/service-discovery",
            "/version",
            "/nothing",
        )
    ]
    async with endpoint.http() as client:
        for method, path in asked:
            response = await client.request(method, path, headers=headers, json=BODY if method == "POST" else None)
            error = error_of(response)
            assert (response.status_code, error["type"], error["code"]) == (
                401, "invalid_request_error", "invalid_api_key",
            )  # fmt: skip
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        assert (await client.get("/health")).status_code == 200
    assert not endpoint.stage.target.asked


async def test_metrics_need_a_key_unless_they_are_public(tmp_path: Path) -> None:
    async with guarded(tmp_path) as endpoint, endpoint.http(ALICE) as client:
        assert any(text_string_to_metric_families((await client.get("/metrics")).text))
        assert endpoint.orchestrator.requests.metrics_url.startswith("http://127.0.0.1:")
    async with guarded(tmp_path, "--open-metrics") as endpoint, endpoint.http() as client:
        assert any(text_string_to_metric_families((await client.get("/metrics")).text))
        assert (await client.get("/v1/models")).status_code == 401


async def test_keys_change_while_streams_run(endpoint: Guarded) -> None:
    """By SIGHUP at once, and soon by itself; running requests continue, and a mistake in the file changes nothing."""
    endpoint.stage.target.may_answer.clear()
    async with endpoint.client(ALICE) as alice, endpoint.client("sk-carol") as carol:
        running = asyncio.create_task(answer(alice))
        await until(lambda: endpoint.stage.target.asked)
        endpoint.write(line("carol", "sk-carol"))
        endpoint.orchestrator.callers.refresh()
        await carol.models()
        with pytest.raises(Unauthenticated):
            await alice.models()
        endpoint.stage.target.may_answer.set()
        assert (await running)[1].finish_reason == "length"
        endpoint.write({"name": "carol"})
        endpoint.orchestrator.callers.refresh()
        await carol.models()
        endpoint.write(line("alice", ALICE))
        await until(lambda: [key.name for key in endpoint.orchestrator.callers.keyring.file.value] == ["alice"])
        await alice.models()


async def test_a_tenants_ids_are_unknown_to_others(endpoint: Guarded) -> None:
    """Equal names at one time are two requests in two sessions; a foreign name is answered as an unknown one."""
    named = GenerateOptions(request_id="r", session_id="s", max_tokens=3, temperature=0.0)
    endpoint.stage.target.may_answer.clear()
    async with endpoint.client(ALICE) as alice, endpoint.client(BOB) as bob:
        running = asyncio.create_task(answer(alice, named))
        await until(lambda: endpoint.stage.target.asked)
        other = asyncio.create_task(answer(bob, named))
        await until(lambda: len(set(endpoint.stage.target.asked)) == 2)
        for call in (lambda c: c.abort("q"), lambda c: c.close_session("q"), lambda c: c.decisions("q")):
            assert str(await refusal(call(bob))) == str(await refusal(call(alice)))
        endpoint.stage.target.may_answer.set()
        assert ((await running)[0].request_id, (await other)[0].request_id) == ("r", "r")
        await bob.close_session("s")
        assert "session_id: 's' is not known" in str(await refusal(bob.close_session("s")))
        again, _ = await answer(alice, GenerateOptions(session_id="s", continues=True, max_tokens=3, temperature=0.0))
        assert again.prompt_tokens == 5 + 3 + 5  # Alice's session is still there


async def test_another_tenants_request_is_neither_aborted_nor_resumed_nor_explained(endpoint: Guarded) -> None:
    endpoint.stage.target.may_answer.clear()
    async with endpoint.client(ALICE) as alice, endpoint.client(BOB) as bob:
        running = asyncio.create_task(answer(alice, GenerateOptions(request_id="r", max_tokens=3, seed=1)))
        await until(lambda: endpoint.stage.target.asked)
        assert isinstance(await refusal(bob.abort("r")), NotFound)
        endpoint.stage.target.may_answer.set()
        assert (await running)[1].finish_reason == "length"
        for name in ("r", "alice::r", ""):  # the last session at work is not Bob's
            assert isinstance(await refusal(bob.decisions(name)), NotFound)
        assert await alice.decisions("r") == await alice.decisions("")
        resume = GenerateOptions(request_id="r", max_tokens=3, seed=1, resume=Resume(2))
        seen = await refusal(raw(endpoint, BOB, resume))
        assert "at most 0, the tokens of request_id 'r' that are known" in str(seen)
        assert isinstance(seen, InvalidRequest)
        assert await raw(endpoint, ALICE, resume)


async def test_a_keys_limits_apply_to_both_apis(tmp_path: Path) -> None:
    async with guarded(tmp_path, requests=1, tokens_per_minute=20) as endpoint:
        endpoint.stage.target.may_answer.clear()
        async with endpoint.client(ALICE) as alice, endpoint.client(BOB) as bob, endpoint.http(ALICE) as http:
            running = asyncio.create_task(answer(alice))
            await until(lambda: endpoint.stage.target.asked)
            refused = await refusal(answer(alice))
            assert isinstance(refused, Exhausted)
            assert refused.retry_seconds
            response = await http.post("/v1/completions", json=BODY)
            assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
            assert int(response.headers["retry-after"]) >= 1
            endpoint.stage.target.may_answer.set()
            await running
            await answer(bob)
            await answer(alice, GenerateOptions(max_tokens=50, temperature=0.0))
            refused = await refusal(answer(alice))
            assert "tokens_per_minute: this key's 20 are used" in str(refused)
            assert isinstance(refused, Exhausted)
            assert refused.retry_seconds > 0
            response = await http.post("/v1/completions", json=BODY)
            assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
            assert int(response.headers["retry-after"]) >= 1
            await answer(bob)


async def test_a_large_body_counts_for_its_key_even_if_it_is_refused(tmp_path: Path) -> None:
    """It was read for nothing as often as its sender liked."""
    many = {"prompt": [[]] * 70_000}
    long = {"prompt": "x" * LARGE_BYTES, "n": "many"}
    async with guarded(tmp_path, requests=1, tokens_per_minute=2_000) as endpoint, endpoint.http(ALICE) as http:
        for body, status in ((long, 400), (many, 413)):  # of 1,000 and 6,500 tokens
            assert (await http.post("/v1/completions", json=body)).status_code == status
        for body in (long, many, BODY):
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 429
            assert error_of(response)["message"].startswith("tokens_per_minute: this key's 2000 are used")
        async with endpoint.http(BOB) as bob:
            assert (await bob.post("/v1/completions", json=many)).status_code == 413
            assert (await bob.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_large_body_is_not_read_while_its_keys_request_limit_is_reached(tmp_path: Path) -> None:
    async with guarded(tmp_path, requests=1) as endpoint, endpoint.client(ALICE) as alice, endpoint.http(ALICE) as http:
        endpoint.stage.target.may_answer.clear()
        running = asyncio.create_task(answer(alice))
        await until(lambda: endpoint.stage.target.asked)
        response = await http.post("/v1/completions", json={"prompt": [[]] * 70_000})
        assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
        response = await http.post("/tokenize", json={"prompt": "x" * LARGE_BYTES})
        assert response.status_code == 200
        endpoint.stage.target.may_answer.set()
        await running


async def test_choices_count_as_requests_of_the_key(tmp_path: Path) -> None:
    """More than it allows at once can never fit; more than it allows now are refused before one begins."""
    async with guarded(tmp_path, requests=3) as endpoint, endpoint.client(ALICE) as alice, endpoint.http(ALICE) as http:
        response = await http.post("/v1/completions", json=BODY | {"n": 4})
        assert (response.status_code, error_of(response)["param"]) == (400, "n")
        assert (await http.post("/v1/completions", json=BODY | {"n": 3})).status_code == 200
        endpoint.stage.target.may_answer.clear()
        endpoint.stage.target.asked.clear()
        running = asyncio.create_task(answer(alice))
        await until(lambda: endpoint.stage.target.asked)
        response = await http.post("/v1/completions", json=BODY | {"n": 3})
        assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
        assert "requests: 1 of this key run, and 3 more are above its limit of 3" in error_of(response)["message"]
        assert len(endpoint.stage.target.asked) == 1
        endpoint.stage.target.may_answer.set()
        await running
        await until(lambda: not endpoint.orchestrator.requests.loads().num_requests_running)
        assert (await http.post("/v1/completions", json=BODY | {"n": 3})).status_code == 200


async def test_a_tenant_keeps_as_many_sessions_as_its_key_allows(tmp_path: Path) -> None:
    """One tenant's names filled the index for all, which forgets what was used longest ago, whosever it is."""
    async with guarded(tmp_path, sessions=2) as endpoint, endpoint.client(ALICE) as alice, endpoint.client(BOB) as bob:
        for client, name in ((bob, "a"), (alice, "a"), (alice, "b"), (alice, "a"), (alice, "c")):
            await answer(client, replace(SHORT, session_id=name))
        again = replace(SHORT, session_id="b", continues=True)
        assert isinstance(await refusal(answer(alice, again)), NotFound), "it was used before the others"
        for client, name in ((alice, "a"), (alice, "c"), (bob, "a")):
            await answer(client, replace(again, session_id=name))


@pytest.mark.pipeline
async def test_sighup_reloads_keys_without_ending_streams(tmp_path: Path) -> None:
    """The program's own handler, in a process of its own."""
    file = tmp_path / "keys"
    file.touch(0o600)
    async with staged(tmp_path) as stage:
        command = [sys.executable, "-m", "orchestrator", "--index-url", stage.index_url, "--draft", "none"]
        command += ["--port", "0", "--http-port", "-1", "--metrics-port", "-1", "--keys", str(file)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                while b": orchestrator-" not in (told := await process.stderr.readline()):
                    assert told, "it ended"
                file.write_text(json.dumps(line("alice", ALICE)) + "\n")
                os.kill(process.pid, signal.SIGHUP)
                while b"has been reloaded" not in (told := await process.stderr.readline()):
                    assert told, "it ended"
            assert process.returncode is None
        finally:
            process.terminate()
            assert await process.wait() == 0


async def refusal(call: Awaitable[object]) -> BoughError:
    """What a call is refused with."""
    with pytest.raises(BoughError) as refused:
        await call
    return refused.value


async def raw(endpoint: Guarded, key: str, options: GenerateOptions) -> list[pb.GenerateEvent]:
    """One call without the client's own resuming."""
    async with open_channel(endpoint.address) as channel:
        stub = stub_of(GENERATION, channel)
        call = stub.Generate(wire.request_to_wire(PROMPT, options), metadata=(("authorization", f"Bearer {key}"),))
        try:
            return [event async for event in call]
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, endpoint.address) from exc


async def test_the_workers_secret_allows_status_calls_and_no_access_to_tenants(tmp_path: Path) -> None:
    secret, file = "0123456789abcdef" * 4, tmp_path / "worker.key"
    file.touch(0o600)
    file.write_text(secret)
    async with guarded(tmp_path, "--worker-key-file", str(file)) as endpoint, endpoint.client(secret) as client:
        assert (await client.loads()).num_requests_running == 0
        assert (await client.server_info()).workers
        for call in (answer(client), client.abort("r"), client.close_session("s"), client.decisions()):
            assert isinstance(await refusal(call), Unauthenticated)
        async with endpoint.http(secret) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 401
    assert not endpoint.stage.target.asked
