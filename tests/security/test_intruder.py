"""The intruder gets in nowhere, and it would get in without access control."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.fakes.intruder import other_ports, strangers, tenants
from tests.fakes.intruder.certificates import at_certificates, secured
from tests.fakes.intruder.stage import Stage, new_secrets, staged
from tests.fakes.intruder.tally import Tally
from tests.fakes.processes.fork_server import started_anew
from tests.fakes.stage import Orchestrator

MANY, MANY_CERTIFICATES = 1500, 30


@pytest.mark.slow
async def test_intruders_without_credentials_are_refused(tmp_path: Path) -> None:
    """With no key, a wrong one, or another tenant's."""
    tally = Tally()
    async with AsyncExitStack() as stack:
        stack.enter_context(started_anew())
        stage = await stack.enter_async_context(staged(tmp_path))
        await intrude(stage, tally, tmp_path)
        ids = stage.stack.process_ids().values()
        children = [child for each in stage.stack.replicas.values() for child, _ in each]
        titles = [Path(f"/proc/{number}/cmdline").read_bytes() for number in ids]
        told = [*titles, *(child.log.read_bytes() for child in children)]
    assert any(b"orchestrator" in title for title in titles), "they were started by their own command lines"
    assert not [secret for secret in astuple(stage.secrets) if secret.encode() in b"".join(told)], "in logs or titles"
    assert not tally.admitted
    assert not tally.locked_out
    assert tally.num_attempts > MANY
    assert tally.is_safe


async def intrude(stage: Stage, tally: Tally, folder: Path) -> None:
    """Make all attempts; `folder` is that of the stage."""
    await strangers.at_grpc(tally, stage.addresses, stage.secrets)
    await strangers.at_http(tally, stage.url, stage.secrets)
    await strangers.controls(tally, stage.addresses, stage.url, stage.secrets)
    await other_ports.at_forwarder(tally, stage)
    await other_ports.at_metrics(tally, stage)
    await other_ports.at_index(tally, stage, folder)
    endpoints = tenants.Endpoints(stage.addresses["orchestrator"], stage.url, stage.figures, stage.secrets)
    await tenants.try_names(tally, endpoints)
    await tenants.try_prompts(tally, endpoints)


@pytest.mark.slow
async def test_intruders_without_a_valid_certificate_are_refused(tmp_path: Path) -> None:
    """All have the right key or secret, and speak no TLS, or have a wrong certificate or none."""
    tally = Tally()
    async with secured(tmp_path) as bough:
        await at_certificates(tally, bough)
    assert not tally.admitted
    assert not tally.locked_out
    assert tally.num_attempts > MANY_CERTIFICATES
    assert tally.is_safe


async def test_without_keys_the_intruder_gets_in(orchestrator: Orchestrator) -> None:
    """A test that could not fail would say nothing."""
    tally = Tally()
    await strangers.at_grpc(tally, {"orchestrator": orchestrator.address}, new_secrets())
    unknown = [what for what in tally.admitted if "/Other with" in what or "/other with" in what]
    assert not unknown, "methods that are not there let nobody in"
    assert len(tally.admitted) > 0.7 * tally.num_attempts > 0
    assert not tally.is_safe
