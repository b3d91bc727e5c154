"""Attempts unauthorised access, and counts what was not refused.

    python -m loadtest.intruder

Starts simulated workers, an index and an orchestrator of its own, with keys for tenants and a secret among processes,
and then others that speak TLS, and tries, at every call of both doors and of the workers, through what Ray Serve's
proxy forwards to, at ports of metrics, and at an index with a password, alone and behind TLS:

- no key, and keys that are wrong, nearly right, expired, removed while all runs, or shown in another way
- a tenant's key at workers, the workers' secret at the doors
- plain text to ports of TLS; no certificate, and those of another authority, of another name, or that are over
- another tenant's sessions and request ids, as they are and spelled in ways that may come to hers
- another tenant's prompts: cached tokens, and the tokens and rows that the target reads for the first answer, must be
  those of a prompt that nobody has sent (time decides nothing here: what is computed does)

Ends with one JSON line, and exit status 1 where anybody got in who may not, or did not who may:

attempts            so many
admitted            of these, how many got anything but a refusal; `admitted_examples` says which
controls            calls of those who may: without these a door that is shut would look safe
locked_out          of these, those that were refused
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.config.flag_parser import FlagParser
from loadtest.intruder import other_doors, strangers, tenants
from loadtest.intruder.certificates import at_certificates, secured
from loadtest.intruder.stage import Stage, staged
from loadtest.intruder.tally import Tally


async def intrude(stage: Stage, tally: Tally, folder: Path) -> None:
    """Make all attempts; `folder` is that of the stage."""
    _report("who has no key, or a wrong one")
    await strangers.at_grpc(tally, stage.addresses, stage.secrets)
    await strangers.at_http(tally, stage.url, stage.secrets)
    await strangers.controls(tally, stage.addresses, stage.url, stage.secrets)
    await other_doors.at_forwarder(tally, stage)
    await other_doors.at_metrics(tally, stage)
    await other_doors.at_index(tally, stage, folder)
    _report("who has a key of another tenant")
    doors = tenants.Doors(stage.addresses["orchestrator"], stage.url, stage.figures, stage.secrets)
    await tenants.try_names(tally, doors)
    await tenants.try_prompts(tally, doors)


async def run() -> dict[str, Any]:
    """Start everything, make all attempts, and return the figures."""
    tally = Tally()
    with TemporaryDirectory(prefix="bough-intruder-") as folder:
        async with staged(Path(folder)) as stage:
            await intrude(stage, tally, Path(folder))
        _report("who has no certificate, or a wrong one")
        async with secured(Path(folder)) as bough:
            await at_certificates(tally, bough)
    return {**tally.figures(), "is_safe": tally.is_safe}


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.parse_args()
    figures = asyncio.run(run())
    print(json.dumps(figures))
    return 0 if figures["is_safe"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
