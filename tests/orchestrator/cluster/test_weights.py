"""Targets that pass for one model by their samples and are not: no session moves from one to the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bough.client import Client
from bough.errors import BoughError, PairingError, Unavailable
from bough.health.problems import find_problems
from bough.processes.compatibility import check_compatibility
from bough.protocol.generation import GenerateOptions, Resume, TextPrompt, WorkerInfo
from orchestrator.serving.requests import Requests
from tests.fakes.fleet import FakeTarget, Fleet, Process
from tests.fakes.streams import OPTIONS, expected, kill_the_one_that_gets, once, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
TURN = GenerateOptions(session_id="s", seed=3, max_tokens=20, ignore_eos=True)
NEXT = replace(TURN, continues=True)
MORE = TextPrompt("more")
Targets = dict[str, tuple[FakeTarget, Process]]


async def fleet_of(
    fakes: Fleet, hashes: dict[str, str], weights_seconds: float = 0.02
) -> tuple[Targets, Requests, Client]:
    """Targets of these names, which say these hashes, and a client of an orchestrator that knows them."""
    targets = {}
    for name, weights_hash in hashes.items():
        target = FakeTarget(name, fakes.tokenizer)
        target.weights_hash = weights_hash
        targets[name] = target, await fakes.worker(target)
    requests, process = await fakes.orchestrator(
        "--failover-timeout", "1", num_targets=len(targets), poll_seconds=0.05, weights_seconds=weights_seconds
    )
    return targets, requests, Client(process.address, patience_seconds=0.5)


@pytest.mark.parametrize(
    ("hashes", "takes_over"),
    [
        (("h1", "h1"), True),
        (("", ""), True),
        (("h1", ""), True),  # its samples are the same, and more is not known yet
        (("h1", "h2"), False),
        (("h1", "", "h2"), False),  # of the one that is not known it is known that it may be either
    ],
)
async def test_a_session_is_only_taken_over_by_the_same_weights(
    fakes: Fleet, hashes: tuple[str, ...], takes_over: bool
) -> None:
    targets, requests, client = await fleet_of(fakes, {f"t{n}": each for n, each in enumerate(hashes)})
    for name, _ in list(targets.items())[1:]:
        requests.directory.find(name).num_running += 1  # the first is the one to choose
    kill_the_one_that_gets(3, [targets["t0"]])
    async with client:
        if takes_over:
            seen = await read(client)
            assert (seen.token_ids, seen.end.num_failovers) == (expected(fakes), 1)
            return
        with pytest.raises(Unavailable, match="no target with this model could be used"):
            await asyncio.wait_for(read(client), 30)
    assert all(not target.calls for name, (target, _) in targets.items() if name != "t0")


async def test_a_hash_that_becomes_known_later_is_respected(fakes: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    targets, requests, client = await fleet_of(fakes, {"t0": "h1", "t1": ""})
    targets["t1"][0].weights_hash = "h2"
    async with client:
        await until(lambda: requests.directory.find("t1").info.weights_hash == "h2")
        await until(lambda: "t0 and t1 claim the same model but have different weights: h1 and h2" in caplog.text)
        problems = find_problems(await client.server_info())
        assert any("t0 and t1 claim the same model but have different weights: h1 and h2;" in each for each in problems)
        for _ in range(3):  # both keep serving new requests
            await read(client, replace(OPTIONS, request_id=""))
    assert caplog.text.count("sessions do not move between them") == 1


async def test_a_stream_ends_if_its_target_turns_out_to_have_other_weights(fakes: Fleet) -> None:
    """It was taken over while nothing was known against that."""
    targets, requests, client = await fleet_of(fakes, {"t0": "h1", "t1": ""})
    requests.directory.find("t1").num_running += 1
    kill_the_one_that_gets(3, [targets["t0"]])

    async def find_out() -> None:
        targets["t1"][0].weights_hash = "h2"
        await until(lambda: requests.directory.find("t1").info.weights_hash == "h2")

    targets["t1"][0].after = once(find_out, 2)
    async with client:
        with pytest.raises(
            BoughError, match=r"weights: must be h1, with which the session began, got h2 of t1; the last tokens"
        ):
            await asyncio.wait_for(read(client), 30)


async def test_a_target_is_asked_for_its_hash_before_a_takeover(fakes: Fleet) -> None:
    targets, requests, client = await fleet_of(fakes, {"t0": "h1", "t1": ""}, weights_seconds=1000.0)
    requests.directory.find("t1").num_running += 1
    targets["t1"][0].weights_hash = "h2"
    kill_the_one_that_gets(3, [targets["t0"]])
    async with client:
        with pytest.raises(Unavailable, match="no target with this model could be used"):
            await asyncio.wait_for(read(client), 30)
    assert targets["t1"][0].calls == []


async def test_a_session_and_a_request_stay_with_their_weights(fakes: Fleet) -> None:
    targets, requests, client = await fleet_of(fakes, {"t0": "h1", "t1": "h2"})
    requests.directory.find("t1").num_running += 1
    async with client:
        await read(client, replace(TURN, request_id="r"))
        await fakes.written("r")
        requests.directory.find("t0").num_running += 5
        await read(client, replace(NEXT, request_id="next"), MORE)
        assert targets["t1"][0].calls == [], "however busy the other is"
        await fakes.written("next")
        requests.directory.find("t0").num_running -= 5
        await targets["t0"][1].kill()
        await until(lambda: [target.record.worker_id for target in requests.directory.targets] == ["t1"])
        for options, whose in ((NEXT, "session_id: 's'"), (TURN, "session_id: 's'")):
            with pytest.raises(
                Unavailable, match=rf"{whose} cannot continue: weights: it began with h1, and t1 has h2"
            ):
                await read(client, options, MORE)
        with pytest.raises(Unavailable, match=r"request_id: 'next' cannot continue: weights: it began with h1, and t1"):
            await read(client, replace(NEXT, request_id="next", resume=Resume(0)), MORE)
        anew = await read(client, replace(TURN, model="fake"))
        assert anew.end.usage.cached_tokens == 0, "a whole text begins anew with a model that is named"
        assert len(targets["t1"][0].calls) > 0


@pytest.mark.parametrize(("mine", "theirs", "fits"), [("h1", "h2", False), ("h1", "h1", True), ("", "h2", True)])
async def test_a_target_is_refused_at_start_if_another_has_other_weights(
    fakes: Fleet, mine: str, theirs: str, fits: bool
) -> None:
    target = FakeTarget("t-theirs", fakes.tokenizer)
    target.weights_hash = theirs
    await fakes.worker(target)
    info = WorkerInfo(
        "target", "t-mine", "fake", "a fake", "fake", fakes.tokenizer.fingerprint, 1, 1, 1, 1, weights_hash=mine
    )
    if fits:
        await check_compatibility(fakes.registry, info, fakes.tokenizer)
        return
    await check_compatibility(fakes.registry, replace(info, model_fingerprint="other"), fakes.tokenizer)
    with pytest.raises(
        PairingError, match=r"t-mine and t-theirs claim the same model .*: h1 and h2; must be the same files"
    ):
        await check_compatibility(fakes.registry, info, fakes.tokenizer)
