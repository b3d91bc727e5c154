"""What an earlier version of bough has recorded is read; what it did not say is unknown, and is not guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import NotFound
from bough.protocol.generation import GenerateOptions, Resume, TextPrompt
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord, pack_tokens
from tests.fakes.fleet import FakeTarget, Fleet
from tests.fakes.streams import OPTIONS, PROMPT, expected, read, until

NEXT = GenerateOptions(session_id="s", seed=3, max_tokens=20, ignore_eos=True, continues=True)
MORE = TextPrompt("more")
EPOCH = 1_763_000_000_000_000
LATER = {"born_us", "model_name", "model_identity", "weights_hash", "target_identity", "keeps_session"}


def without(json_text: str, names: set[str]) -> bytes:
    fields: Mapping[str, object] = json.loads(json_text)
    return json.dumps({name: value for name, value in fields.items() if name not in names}).encode()


@pytest.mark.parametrize("names", [LATER, *({name} for name in sorted(LATER))])
def test_fields_that_came_later_may_be_missing(names: set[str]) -> None:
    """They were required, and every session was forgotten with an upgrade."""
    session = SessionRecord("s", "t", "d", EPOCH, 2, 1, (1, 2, 3), EPOCH, "name", "identity", "hash")
    found = SessionRecord.from_json("s", without(session.to_json(), names), pack_tokens(session.tokens))
    assert found is not None
    for name in ("model_name", "model_identity", "weights_hash"):
        assert getattr(found, name) == ("" if name in names else getattr(session, name))
    assert found.born_us == EPOCH, "the time of its epoch, where no other is known"
    sampling, stops = SamplingParams(seed=3), StopConditions(20, ())
    request = RequestRecord("r", "s", EPOCH, 1, (1, 2), sampling, stops, target_identity="identity", weights_hash="h")
    again = RequestRecord.from_json("r", without(request.to_json(), names), pack_tokens(request.tokens))
    assert again is not None
    assert again.target_identity == ("" if "target_identity" in names else "identity")
    assert again.keeps_session


async def forget_models(fakes: Fleet, session_id: str, request_id: str = "") -> None:
    """Records as an earlier version has written them, in place of those that are there."""
    session = await fakes.registry.load_session(session_id)
    assert session is not None
    claim = await fakes.registry.claim_session(session_id, "old")
    old = replace(session, epoch=claim.epoch, model_name="", model_identity="", weights_hash="")
    await fakes.registry.record_session(old, 0)
    if request_id:
        request = await fakes.registry.load_request(request_id)
        assert request is not None
        of_epoch = replace(request, epoch=claim.epoch, target_identity="", weights_hash="")
        await fakes.registry.record_request(of_epoch, 0)


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_session_without_a_model_goes_on_where_it_was_or_nowhere(fakes: Fleet, is_there: bool) -> None:
    """Its target is one process with one model; any other may have another one."""
    targets = {name: await fakes.target_of(f"t-{name}", name) for name in ("a", "b")}
    requests, process = await fakes.orchestrator("--failover-timeout", "1", num_targets=2)
    async with Client(process.address, patience_seconds=0.5) as client:
        await read(client, replace(OPTIONS, session_id="s", model="b"))
        await fakes.written("r")
        await forget_models(fakes, "s", "r")
        if is_there:
            assert (await read(client, NEXT, MORE)).started.model_name == "b"
            return
        await targets["b"][1].kill()
        await until(lambda: [target.info.model_name for target in requests.directory.targets] == ["a"])
        with pytest.raises(
            NotFound, match=r"session_id: 's' was recorded by an earlier version of bough, which did no"
        ):
            await read(client, NEXT, MORE)
        with pytest.raises(NotFound, match=r"request_id: 'r' was recorded by an earlier version of bough, which did n"):
            await read(client, replace(OPTIONS, session_id="s", resume=Resume(0)))
        assert targets["a"][0].calls == []
        anew = await read(client, replace(NEXT, continues=False), PROMPT)
        assert (anew.started.model_name, anew.end.usage.cached_tokens) == ("a", 0), "a whole text begins anew"


async def test_a_request_without_an_identity_is_resumed_where_it_was(fakes: Fleet) -> None:
    for name in ("a", "b"):
        await fakes.target_of(f"t-{name}", name)
    _, process = await fakes.orchestrator("--failover-timeout", "1", num_targets=2)
    async with Client(process.address, patience_seconds=0.5) as client:
        await read(client, replace(OPTIONS, session_id="s", model="b"))
        await fakes.written("r")
        await forget_models(fakes, "s", "r")
        seen = await read(client, replace(OPTIONS, session_id="s", resume=Resume(0)))
        assert (seen.started.model_name, seen.token_ids) == ("b", expected(fakes))


async def test_one_model_for_all_is_no_proof_that_it_was_that(fakes: Fleet) -> None:
    """The only target that is there may have been started with another model since."""
    _, gone = await fakes.target_of("t-b", "b")
    requests, process = await fakes.orchestrator("--failover-timeout", "1")
    async with Client(process.address, patience_seconds=0.5) as client:
        await read(client, replace(OPTIONS, session_id="s"))
        await fakes.written("r")
        await forget_models(fakes, "s")
        await gone.kill()
        other = FakeTarget("t-a", fakes.tokenizer, "a")
        await fakes.worker(other)
        await until(lambda: [target.record.worker_id for target in requests.directory.targets] == ["t-a"])
        with pytest.raises(NotFound, match="send the full history, with continues false"):
            await read(client, NEXT, MORE)
    assert other.calls == []
