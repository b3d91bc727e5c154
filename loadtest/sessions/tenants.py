"""Measures how long a tenant waits for the KV that another tenant's named sessions hold.

    python -m loadtest.sessions.tenants

One tenant, whose key allows one request at a time, fills the KV of a simulated target with sessions, one after
another; then the other tenant sends a request. Ends with one JSON line:

first_token_seconds    of the second tenant: `alone`, and `beside` the sessions
sessions               of the first tenant, which hold all KV
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.config.flag_parser import FlagParser
from bough.processes.launch import launched
from bough.protocol.generation import GenerateOptions, TokenPrompt
from bough.security.keys import ApiKey, hash_of, new_key
from loadtest.common.stacks import stack_settings
from loadtest.common.streams import stream
from loadtest.served.stack import write_profile

PROMPT_TOKENS, ANSWER_TOKENS = 448, 8
WORDS = range(300, 700)  # token ids


async def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of the JSON line."""
    num_sessions, rng = arguments.kv_tokens // (PROMPT_TOKENS + ANSWER_TOKENS), random.Random(arguments.seed)

    async def first_token_seconds(client: Client, session_id: str = "") -> float:
        prompt = TokenPrompt(tuple(rng.choices(WORDS, k=PROMPT_TOKENS)))
        options = GenerateOptions(seed=1, max_tokens=ANSWER_TOKENS, ignore_eos=True, session_id=session_id)
        return round((await stream(client, prompt, options)).first_token_seconds, 3)

    profile = write_profile(folder, 0.02, kv_tokens=arguments.kv_tokens, max_context=1024, max_nodes=16)
    keys, file = (new_key(), new_key()), folder / "keys"
    tenants = ApiKey("many-sessions", hash_of(keys[0]), requests=1), ApiKey("other", hash_of(keys[1]))
    file.write_text("\n".join(tenant.to_line() for tenant in tenants))
    file.chmod(0o600)
    async with (
        launched(stack_settings(str(profile), ["--keys", str(file)]), lambda _: None) as cluster,
        Client(cluster.address, api_key=keys[0]) as first,
        Client(cluster.address, api_key=keys[1]) as second,
    ):
        alone = await first_token_seconds(second)
        for number in range(num_sessions):
            await first_token_seconds(first, f"session {number}")
        seconds = {"alone": alone, "beside": await first_token_seconds(second)}
    return {"first_token_seconds": seconds, "sessions": num_sessions, "settings": vars(arguments)}


def main() -> None:
    """Print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--kv-tokens", type=int, default=4096, help="that the target holds")
    parser.add_argument("--seed", type=int, default=1)
    with TemporaryDirectory(prefix="bough-tenants-") as folder:
        print(json.dumps(asyncio.run(measured(parser.parse_args(), Path(folder)))))


if __name__ == "__main__":
    main()
