"""Settings of processes that a benchmark starts: with the demonstration models, or with simulated workers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bough.client import Client
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.processes.launch import Settings
from bough.security.certificates import CertificateFiles


def stack_settings(
    profile: str = "", orchestrator_flags: Sequence[str] = (), everywhere_flags: Sequence[str] = ()
) -> Settings:
    """Settings of one target, one draft and one orchestrator on free ports.

    The demonstration target keeps no layer in memory; its draft is the same model without two layers.
    """
    if profile:
        target = draft = ["--simulate", profile]
    else:
        model = str(demonstration_folder())
        target = ["--model", model, "--resident-layers", "0"]
        draft = ["--model", model, "--drop-layers", SUBSTITUTE_DROPS]
    orchestrator = ["--http-port", "0", *orchestrator_flags, *everywhere_flags]
    return settings_of([*target, *everywhere_flags], [*draft, *everywhere_flags], orchestrator)


def settings_of(target: Sequence[str], draft: Sequence[str], orchestrator: Sequence[str] = ()) -> Settings:
    """Settings of one target, one draft and one orchestrator on free ports, from their flags and the environment."""
    return Settings(
        parse(TargetConfig, "target_worker", target, os.environ),
        parse(DraftConfig, "draft_worker", draft, os.environ),
        parse(OrchestratorConfig, "orchestrator", ["--port", "0", *orchestrator], os.environ),
    )


async def http_url_of(address: str, certificates: CertificateFiles | None = None) -> str:
    """URL, without /v1, of the HTTP API of the orchestrator whose gRPC address is given; empty if it has none."""
    async with Client(address, certificates=certificates) as client:
        return (await client.server_info()).http_url
