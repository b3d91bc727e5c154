"""Streams that break: the rest comes from any orchestrator, and joins without a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from bough.client import Client
from bough.errors import ConfigError, InvalidRequest, NoAnswer, StaleEpoch, Unavailable
from bough.pb import generation_pb2
from bough.protocol import codec_generation as wire
from bough.protocol.generation import GenerateOptions, Resume, Started, TextPrompt
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall
from bough.rpc.server import serving
from bough.rpc.services import GENERATION, add_service
from tests.fakes.fleet import Fleet
from tests.fakes.streams import OPTIONS, Gate, expected, once, read, read_rounds, renamed
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called


@pytest.mark.parametrize("stop", [(), ("tr",), ("y 木",), ("🌳b", "bb"), ("never",)])
async def test_a_finished_request_can_be_resumed_from_every_token(fakes: Fleet, stop: tuple[str, ...]) -> None:
    """On another orchestrator, with the tokens or without: texts, stops and lengths join."""
    await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    async with Client(first.address) as one, Client(second.address) as other:
        for seed, sends_tokens in ((5, False), (6, True)):
            options = replace(OPTIONS, stop=stop, seed=seed, request_id=f"r{seed}", max_tokens=40)
            whole = await read(one, options)
            await fakes.written(options.request_id)
            for cut in range(len(whole.token_ids) + 1):
                token_ids = tuple(whole.token_ids[:cut]) if sends_tokens else ()
                rest = await read(other, replace(options, resume=Resume(cut, token_ids)))
                assert rest.started.resumed_tokens == cut
                assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
                assert "".join(whole.texts[:cut]) + rest.text == whole.text
                assert rest.ending == whole.ending


@pytest.mark.parametrize("stop", [(), ("b木",)])
async def test_a_request_that_only_the_client_knows_can_be_resumed(fakes: Fleet, stop: tuple[str, ...]) -> None:
    """The index has lost everything: what the client sends back is all there is."""
    target, _ = await fakes.target("t1")
    _, server = await fakes.orchestrator()
    options = replace(OPTIONS, stop=stop, max_tokens=40)
    async with Client(server.address) as client:
        whole = await read(client, options)
        for cut in range(len(whole.token_ids) + 1):
            unknown = replace(options, request_id=f"r{cut}", resume=Resume(cut, tuple(whole.token_ids[:cut])))
            rest = await read(client, unknown)
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert "".join(whole.texts[:cut]) + rest.text == whole.text
            assert rest.ending == whole.ending
    assert all(call.max_length == whole.started.prompt_tokens + 40 for call in target.calls)


@pytest.mark.parametrize("num_rounds", [0, 1, 4, 9])
async def test_an_abandoned_stream_is_resumed(fakes: Fleet, num_rounds: int) -> None:
    """The transcript may be behind what the client has seen, or ahead of it."""
    await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    async with Client(first.address) as one, Client(second.address) as other:
        begun = await read_rounds(one, num_rounds)
        for cut in {0, len(begun.token_ids) // 2, len(begun.token_ids)}:
            resume = Resume(cut, tuple(begun.token_ids[:cut]))
            rest = await read(other, replace(OPTIONS, resume=resume))
            assert begun.token_ids[:cut] + rest.token_ids == expected(fakes)


async def test_a_resumed_request_does_not_compute_generated_tokens_again(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        whole = await read(client)
        await fakes.written("r")
        num_calls = len(target.calls)
        rest = await read(client, replace(OPTIONS, resume=Resume(10)))
        assert len(target.calls) == num_calls
        assert [event.num_nodes for event in rest.rounds] == [0]
        again = await read(client, replace(OPTIONS, logprobs=0, request_id="with"))
        await fakes.written("with")
        num_calls = len(target.calls)
        rest = await read(client, replace(OPTIONS, logprobs=0, request_id="with", resume=Resume(10)))
    assert len(target.calls) > num_calls  # log-probabilities are in no transcript
    assert again.token_ids[:10] + rest.token_ids == whole.token_ids


@pytest.mark.parametrize("is_same", [True, False], ids=["same orchestrator", "another"])
async def test_a_resumed_request_replaces_a_stream_that_still_runs(fakes: Fleet, is_same: bool) -> None:
    """Its place too: where no other was free, it was refused for the very place that the stream was about to leave."""
    target, _ = await fakes.target("t1")
    flags = ("--max-running", "1", "--max-waiting", "0")
    (_, first), (_, second) = await fakes.orchestrator(*flags), await fakes.orchestrator(*flags)
    gate = Gate(target, 5)
    address = first.address if is_same else second.address
    async with Client(first.address) as old, Client(address, patience_seconds=0.0) as new:
        running = asyncio.create_task(read(old))
        await gate.reached()
        await until(lambda: fakes.registry.load_request(ScopedId("r")))
        seen = await read(new, replace(OPTIONS, resume=Resume(0)))
        gate.open()
        with pytest.raises(StaleEpoch, match="has been resumed by another call" if is_same else "is over"):
            await running
    assert seen.token_ids == expected(fakes)


async def test_an_aborted_request_cannot_be_resumed(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    _, server = await fakes.orchestrator()
    gate = Gate(target, 5)
    async with Client(server.address) as client:
        running = asyncio.create_task(read(client))
        await gate.reached()
        await client.abort("r")
        seen = await running
        gate.open()
        await fakes.written("r")
        rest = await read(client, replace(OPTIONS, resume=Resume(1)))
    assert seen.ending == rest.ending == ("abort", "", len(seen.token_ids))
    assert seen.token_ids[:1] + rest.token_ids == seen.token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"resume": Resume(3), "request_id": "unknown"},
            r"resume\.num_tokens: must be at most 0, the tokens of request_id 'unknown' that are known, got 3",
        ),
        (
            {"resume": Resume(61)},
            r"resume\.num_tokens: must be at most 60, the tokens of request_id 'r' that are known, got 61",
        ),
        (
            {"resume": Resume(2, (1, 2, 3))},
            r"resume\.token_ids: must have 2 tokens, as resume\.num_tokens says, or none, got 3",
        ),
        ({"resume": Resume(1, (999,))}, r"resume\.token_ids\[0\]: must be 0 to \d+, got 999"),
        ({"resume": Resume(61, (1,) * 61)}, r"resume\.num_tokens: must be at most 60, where the request ends, got 61"),
        ({"resume": Resume(3), "seed": 6}, "request_id 'r' must have the same sampling parameters"),
        ({"resume": Resume(3), "max_tokens": 61}, "request_id 'r' must have the same stop conditions"),
        ({"resume": Resume(3), "session_id": "s"}, "session_id: must be that of request_id 'r', got 's'"),
    ],
)
async def test_invalid_resumptions_are_refused(fakes: Fleet, changes: dict[str, object], message: str) -> None:
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        await read(client)
        await fakes.written("r")
        with pytest.raises(InvalidRequest, match=message):
            await read(client, replace(OPTIONS, **changes))
        with pytest.raises(InvalidRequest, match="request_id 'r' must have the same prompt"):
            await read(client, replace(OPTIONS, resume=Resume(3)), TextPrompt("other"))
        rest = await read(client, replace(OPTIONS, resume=Resume(58)))
    assert rest.token_ids == expected(fakes)[58:]


async def test_the_client_hides_the_death_of_its_orchestrator(fakes: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """One Started, every token once, one Finished, which reports it; the log mentions the retry at once."""
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()

    async def die() -> None:
        asyncio.get_running_loop().create_task(first.kill())
        await asyncio.sleep(60)

    target.before = once(die, 5)
    async with Client(first.address, second.address) as client:
        seen = await asyncio.wait_for(read(client), 30)
        assert client.address == second.address
    assert seen.token_ids == expected(fakes)
    assert [type(event).__name__ for event in seen.events].count("Started") == 1
    assert [warning[:22] for warning in seen.end.warnings] == ["the stream broke after"], "once, not for every attempt"
    assert seen.end.usage.completion_tokens == 60
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("bough.client")]
    assert warning.startswith(f"connection lost, trying again for at most 60 s: {first.address} ")


async def test_a_request_that_ends_two_servers_is_not_sent_to_a_third(fakes: Fleet) -> None:
    """One request ended every orchestrator of a cluster, as its client took it from each to the next."""
    target, _ = await fakes.target("t1")
    servers = [server for _, server in [await fakes.orchestrator() for _ in range(3)]]
    of_address, killed = {server.address: server for server in servers}, list[str]()

    async def end_its_server(_: VerifyCall) -> None:
        killed.append(client.address)
        asyncio.get_running_loop().create_task(of_address[client.address].kill())
        await asyncio.sleep(60)

    target.before = end_its_server
    async with Client(*of_address) as client:
        with pytest.raises(NoAnswer, match="not sent again, as its connection was lost 2 times in a row without a new"):
            await asyncio.wait_for(read(client), 30)
    assert killed == [server.address for server in servers[:2]]


async def test_a_request_that_loses_its_server_before_its_first_token_continues_at_another(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()

    async def die() -> None:
        asyncio.get_running_loop().create_task(first.kill())
        await asyncio.sleep(60)

    target.before = once(die, 1)
    async with Client(first.address, second.address) as client:
        assert (await asyncio.wait_for(read(client), 30)).token_ids == expected(fakes)


async def test_a_client_without_any_server_fails_soon(fakes: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async with Client("127.0.0.1:1", "127.0.0.1:2") as client:
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.wait_for(read(client), 15)
        with pytest.raises(Unavailable, match="does not answer"):
            await client.model_info()
    assert not caplog.records, "no connection was lost"


async def test_one_reachable_address_is_enough(fakes: Fleet) -> None:
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client("127.0.0.1:1", server.address) as client:
        assert (await client.model_info()).model_name == "fake"
    async with Client("127.0.0.1:1", server.address) as client:
        assert (await read(client, renamed(OPTIONS, ""))).token_ids == expected(fakes)


async def test_requests_without_names_get_names(fakes: Fleet) -> None:
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        options = GenerateOptions(max_tokens=5, ignore_eos=True)
        seen = await read(client, options)
        again = await read(client, replace(options, seed=seen.started.seed))
    assert seen.started.request_id != again.started.request_id
    assert seen.token_ids == again.token_ids


async def test_an_http_port_is_distinguished_from_one_that_does_not_answer() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"127.0.0.1:{port}") as client:
            with pytest.raises(Unavailable, match="it speaks HTTP: the address must be that of the gRPC API"):
                await client.model_info()


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ConfigError, match=r"addresses: must be one or more such as .*, got ''"):
        Client("")


@pytest.mark.parametrize(
    "address", ["caf\udce9:7411", "127.0.0.1", "http://127.0.0.1:8000"], ids=["no text", "no port", "of HTTP"]
)
def test_an_invalid_address_is_refused(address: str) -> None:
    """Without a port gRPC would ask at 443, and of a URL it would say that it does not answer."""
    with pytest.raises(
        ConfigError, match=r"addresses: must be such as 127\.0\.0\.1:7411 or grpcs://127\.0\.0\.1:7411, got"
    ):
        Client(address)


async def test_a_stream_that_breaks_after_a_long_sweep_is_resumed(fakes: Fleet) -> None:
    """Patience is with what follows the break, not with the sweep before it."""
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()

    async def sweep_long_and_die() -> None:
        await asyncio.sleep(4.0)
        asyncio.get_running_loop().create_task(first.kill())
        await asyncio.sleep(60)

    target.before = once(sweep_long_and_die, 5)
    async with Client(first.address, second.address, patience_seconds=3.5) as client:
        seen = await asyncio.wait_for(read(client), 30)
    assert seen.token_ids == expected(fakes)


class Draining:
    """An orchestrator that refuses its first requests, and then ends each at once."""

    def __init__(self) -> None:
        self.num_refused = 0

    async def Generate(self, request: generation_pb2.GenerateRequest, context: object) -> AsyncIterator[object]:
        if self.num_refused < 3:
            self.num_refused += 1
            raise Unavailable("this orchestrator is draining")
        yield wire.event_to_wire(Started(request.request_id, 1, 5, "fake"))
        yield generation_pb2.GenerateEvent(finished=generation_pb2.Finished(finish_reason="length"))


@pytest.mark.parametrize("is_alone", [False, True])
async def test_the_client_waits_while_all_orchestrators_drain(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has not begun is sent again; if there is one address, its refusal is reported soon."""
    monkeypatch.setattr("bough.client.client.START_PATIENCE_SECONDS", 0.0)

    def add(server: grpc.aio.Server) -> None:
        add_service(GENERATION, Draining(), server)

    async with serving("127.0.0.1", 0, "bough.v1.Generation", add, grace_seconds=0.0) as served:
        addresses = [f"127.0.0.1:{served.port}", f"localhost:{served.port}"]
        async with Client(*addresses[: 1 if is_alone else 2]) as client:
            if is_alone:
                with pytest.raises(Unavailable, match="is draining"):
                    await asyncio.wait_for(read(client), 10)
            else:
                assert (await asyncio.wait_for(read(client), 10)).end.finish_reason == "length"


class AlwaysBreaking:
    """An orchestrator whose streams begin, and no more."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: object) -> AsyncIterator[object]:
        yield wire.event_to_wire(Started(request.request_id, 1, 5, "fake"))
        raise Unavailable("as always")


async def test_a_request_that_always_breaks_is_given_up() -> None:
    """That its stream begins again is no sign of anything to come."""

    def add(server: grpc.aio.Server) -> None:
        add_service(GENERATION, AlwaysBreaking(), server)

    async with (
        serving("127.0.0.1", 0, "bough.v1.Generation", add, grace_seconds=0.0) as served,
        Client(f"127.0.0.1:{served.port}", patience_seconds=1.0) as client,
    ):
        with pytest.raises(Unavailable, match="as always"):
            await asyncio.wait_for(read(client), 10)
