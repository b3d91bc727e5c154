"""Where the memory of a whole pipeline goes: what each process has, in which parts, after how many requests.

    python -m loadtest.memory [--requests 8] [--max-tokens 64] [-- FLAGS OF `bough up`]

Proportional set sizes (`Pss`): what several processes have mapped is divided among them, so that sums are what the
machine really gives. Ends in one JSON line, in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bough.cli import argument_parser
from bough.client import Client
from bough.commands.up import ensure_demonstration, settings_from
from bough.generation import ChatPrompt, GenerateOptions, Message
from bough.launch import Cluster, launched
from loadtest.prompts import load_prompts

KB, MB = 1024, 1000**2
ARENA_BYTES = 64 * 1024**2  # of the C library's allocator: each begins at a multiple of this


class Sizes(NamedTuple):
    """Of one process, in bytes, each its proportional share."""

    libraries: int  # files that are mapped: code, and constants that nobody has changed
    changed: int  # parts of libraries that were written to, by the linker above all
    heap: int  # of the C library's allocator: Python's objects, and whatever is small
    blocks: int  # mapped on their own: weights, keys and values, buffers of some size
    resident: int  # `Rss`: all of what is mapped, whoever shares it

    @property
    def total(self) -> int:
        """The process's share of the machine's memory."""
        return self.libraries + self.changed + self.heap + self.blocks


def sizes_of(process_id: int) -> Sizes:
    """Of a process that runs."""
    return read_smaps((Path("/proc") / str(process_id) / "smaps").read_text())


def read_smaps(text: str) -> Sizes:
    """Sums up what the kernel tells of every mapping (proc_pid_smaps(5))."""
    libraries = changed = heap = blocks = resident = share = 0
    begin, name = 0, ""
    for line in text.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, name = int(words[0].split("-")[0], 16), words[5] if len(words) > 5 else ""
            continue
        if words[0] == "Rss:":
            resident += int(words[1]) * KB
        elif words[0] == "Pss:":
            share = int(words[1]) * KB
        elif words[0] == "Anonymous:":  # a share of which nobody else has any, but after a fork
            own = min(share, int(words[1]) * KB)
            if name.startswith("/"):
                libraries, changed = libraries + share - own, changed + own
            elif name == "[heap]" or begin % ARENA_BYTES == 0:
                heap += share
            else:
                blocks += share
    return Sizes(libraries, changed, heap, blocks, resident)


def sizes_of_all(cluster: Cluster) -> dict[str, Sizes]:
    """By the name of the process."""
    return {name: sizes_of(child.process.pid) for name, child in sorted(cluster.children.items())}


def table(sizes: dict[str, Sizes]) -> str:
    """For people, in MB."""
    rows = [f"{'MB':14}{'':>9}" + "".join(f"{name:>11}" for name in ("total", *Sizes._fields))]
    for name, of_one in [*sizes.items(), ("all", Sizes(*map(sum, zip(*sizes.values(), strict=True))))]:
        rows.append(f"{name:23}" + "".join(f"{size / MB:11.1f}" for size in (of_one.total, *of_one)))
    return "\n".join(rows)


async def measure(up_flags: Sequence[str], num_requests: int, max_tokens: int) -> dict[int, dict[str, Sizes]]:
    """By the number of requests that have been answered, one after another, each a session of its own."""
    settings = settings_from(argument_parser().parse_args(["up", "--port", "0", *up_flags]))
    ensure_demonstration()
    measured = {}
    async with launched(settings, lambda _: None) as cluster, Client(cluster.address) as client:
        measured[0] = sizes_of_all(cluster)
        prompts, options = load_prompts(), GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number in range(num_requests):
            prompt = ChatPrompt((Message("user", prompts[number % len(prompts)]),))
            async for _ in client.generate(prompt, options):
                pass
            measured[number + 1] = sizes_of_all(cluster)
    return measured


def main() -> None:
    """Prints a table after the start and after the last request, and the totals in between as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("up_flags", nargs="*", help="flags of `bough up`, after --")
    arguments = parser.parse_args()
    measured = asyncio.run(measure(arguments.up_flags, arguments.requests, arguments.max_tokens))
    for number in (0, arguments.requests):
        print(f"after {number} requests\n{table(measured[number])}\n")
    totals = {name: [round(sizes[name].total / MB, 1) for sizes in measured.values()] for name in measured[0]}
    last = {
        name: {part: round(size / MB, 1) for part, size in of_one._asdict().items()}
        for name, of_one in measured[arguments.requests].items()
    }
    print(json.dumps({"requests": arguments.requests, "total_mb": totals, "last_mb": last}))


if __name__ == "__main__":
    main()
