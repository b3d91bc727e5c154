"""Measures the memory of a whole pipeline by process, by part, and by number of requests.

    python -m loadtest.pipeline.memory [--requests 8] [--turns] [--bits 4] [--limit 2.5GB] [-- FLAGS OF `bough up`]

Memory is divided as `bough up` divides it. Proportional set sizes (`Pss`): what several processes have mapped is
divided among them, so that sums are what the machine really gives. With --limit all of it runs in a control group of
its own with no more memory than that, files' pages included, and ends with status 1 where a process did not live. The
last line is JSON, in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bough.cli.generation.generate import CollectedAnswer
from bough.cli.machine.up import divided, ensure_demonstration, settings_from
from bough.cli.main import argument_parser
from bough.client import Client
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_bytes
from bough.processes.launch import Cluster, PendingProcesses, Settings
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from bough.runtime.log_lines import tell
from loadtest.common.limits import limited
from loadtest.common.prompts import load_prompts

KB, MB = 1024, 1000**2
ARENA_BYTES = 64 * 1024**2  # alignment of arenas of the C library's allocator
LOADS = "reading weights"  # logged by a worker just before it loads its model


class Sizes(NamedTuple):
    """Memory of one process in bytes; shared pages count proportionally."""

    libraries: int  # mapped files: code and unchanged constants
    changed: int  # pages of libraries that were written to, mainly by the linker
    heap: int  # the C library's allocator: Python objects and small buffers
    blocks: int  # anonymous mappings: Python objects, embeddings, buffers, and a target's KV
    model: int  # in huge pages: weights or their ring, and a draft's KV
    resident: int  # Rss: all mapped pages, shared ones in full

    @property
    def total(self) -> int:
        """The process's share of memory (Pss)."""
        return self.libraries + self.changed + self.heap + self.blocks + self.model


def sizes_of(process_id: int) -> Sizes:
    """The memory of a running process."""
    return read_smaps((Path("/proc") / str(process_id) / "smaps").read_text())


def read_smaps(text: str) -> Sizes:
    """Sum up all mappings in smaps (proc_pid_smaps(5))."""
    sums = dict.fromkeys(Sizes._fields, 0)
    begin, name, share, own = 0, "", 0, 0
    for line in text.splitlines():
        words = line.split()
        match words[0]:
            case "Rss:":
                sums["resident"] += int(words[1]) * KB
            case "Pss:":
                share = int(words[1]) * KB
            case "Anonymous:":  # not shared, except after a fork
                own = min(share, int(words[1]) * KB)
            case "VmFlags:":
                if name.startswith("/"):
                    sums["libraries"] += share - own
                    sums["changed"] += own
                else:
                    sums[_kind(name, begin, words)] += share
            case word if not word.endswith(":"):
                begin, name = int(word.split("-")[0], 16), words[5] if len(words) > 5 else ""
    return Sizes(**sums)


def _kind(name: str, begin: int, flags: Sequence[str]) -> str:
    """The kind of an anonymous mapping; the flag `hg` marks memory from `bough.model.cpu.huge_pages`."""
    if "hg" in flags:
        return "model"
    return "heap" if name == "[heap]" or begin % ARENA_BYTES == 0 else "blocks"


def sizes_of_all(cluster: Cluster) -> dict[str, Sizes]:
    """Memory by name of the process. Raises SystemExit if one has ended."""
    for child in cluster.children.values():
        if child.has_ended():
            raise SystemExit(f"{child.title} {child.how_it_ended()}:\n{child.tail()}")
    return {name: sizes_of(child.process.pid) for name, child in sorted(cluster.children.items())}


def table(sizes: dict[str, Sizes]) -> str:
    """A table in MB."""
    rows = [f"{'MB':14}{'':>9}" + "".join(f"{name:>11}" for name in ("total", *Sizes._fields))]
    for name, of_one in [*sizes.items(), ("all", Sizes(*map(sum, zip(*sizes.values(), strict=True))))]:
        rows.append(f"{name:23}" + "".join(f"{size / MB:11.1f}" for size in (of_one.total, *of_one)))
    return "\n".join(rows)


class Measured(NamedTuple):
    """Measurements of one run."""

    before: dict[str, Sizes]  # of workers, just before they load their models
    answered: list[dict[str, Sizes]]  # by number of answered requests, from 0


@asynccontextmanager
async def running(settings: Settings, before: dict[str, Sizes]) -> AsyncIterator[Cluster]:
    """Run a cluster of processes while the block runs; adds the workers' memory before loading to `before`."""

    def look(_: PendingProcesses) -> None:
        for name, child in cluster.children.items():
            if "worker" in name and not child.has_ended() and LOADS not in child.log.read_text():
                before[name] = sizes_of(child.process.pid)

    with tempfile.TemporaryDirectory(prefix="bough-") as folder:
        cluster = Cluster(settings, Path(folder))
        try:
            cluster.start_all()
            await cluster.wait_until_ready(look)
            yield cluster
        finally:
            cluster.stop_all()


async def measure(settings: Settings, num_requests: int, max_tokens: int, is_conversation: bool) -> Measured:
    """Measure after each of several requests: new sessions, or turns of one conversation."""
    before: dict[str, Sizes] = {}
    prompts = load_prompts()
    options = GenerateOptions(
        session_id="conversation" if is_conversation else "", temperature=0.0, max_tokens=max_tokens, ignore_eos=True
    )
    async with running(settings, before) as cluster, Client(cluster.address) as client:
        answered, history = [sizes_of_all(cluster)], list[Message]()
        for number in range(num_requests):
            question = Message("user", prompts[number % len(prompts)])
            answer = await CollectedAnswer.read(client, ChatPrompt((*history, question)), options, is_shown=False)
            if is_conversation:
                history += (question, Message("assistant", answer.text))
            answered.append(sizes_of_all(cluster))
    return Measured(before, answered)


def settings_for(bits: int, up_flags: Sequence[str]) -> Settings:
    """Settings of `bough up` with these flags, by default for the packed demonstration."""
    ensure_demonstration()
    if bits != 16 and "--target" not in up_flags:
        model = demonstration_folder()
        packed = model.with_name(f"{model.name}-{bits}bit")
        if not (packed / "config.json").is_file():
            command = [
                sys.executable,
                "-m",
                "bough.cli.main",
                "pack",
                str(model),
                "--bits",
                str(bits),
                "--out",
                str(packed),
            ]
            subprocess.run(command, check=True)
        drafts = ["--draft", str(model), "--drop-layers", SUBSTITUTE_DROPS]
        up_flags = ["--target", str(packed), *drafts, *up_flags]
    return settings_from(argument_parser().parse_args(["up", "--port", "0", *up_flags]))


def within(limit: int) -> int:
    """Run this command again in a control group with a memory limit; returns its exit status."""
    own = sys.argv[1:]
    own.insert(own.index("--") if "--" in own else len(own), "--limit=0")
    with limited(memory_bytes=limit) as words:
        return subprocess.run([*words, sys.executable, "-m", "loadtest.pipeline.memory", *own], check=False).returncode


def _arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", action="store_true", help="the requests are turns of one conversation")
    parser.add_argument("--bits", type=int, default=16, choices=(16, 8, 4), help="of the demonstration's weights")
    parser.add_argument("--limit", type=parse_bytes, default=0, help="memory of all processes, such as 2.5GB")
    parser.add_argument("up_flags", nargs="*", help="flags of `bough up`, after --")
    return parser.parse_args()


def main() -> None:
    """Print tables after the start and after the last request, and one JSON line."""
    arguments = _arguments()
    settings = settings_for(arguments.bits, arguments.up_flags)
    if arguments.limit:
        raise SystemExit(within(arguments.limit))
    settings = divided(settings, tell)
    measured = asyncio.run(measure(settings, arguments.requests, arguments.max_tokens, arguments.turns))
    print(f"before weights\n{table(measured.before)}\n")
    for number in sorted({0, arguments.requests}):
        print(f"after {number} requests\n{table(measured.answered[number])}\n")
    totals = {name: [round(sizes[name].total / MB, 1) for sizes in measured.answered] for name in measured.answered[0]}
    parts = {
        name: {part: round(size / MB, 1) for part, size in of_one._asdict().items()}
        for name, of_one in measured.answered[-1].items()
    }
    print(json.dumps({"requests": arguments.requests, "total_mb": totals, "last_mb": parts}))


if __name__ == "__main__":
    main()
