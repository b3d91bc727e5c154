"""`bough demo`: runs the demonstration model with and without speculation, and compares."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from bough.cli.flags.machine import up_arguments
from bough.cli.machine.demo_runs import Contest, Run, Side
from bough.cli.machine.up import announce_first_start, divided, settings_from
from bough.client import Client
from bough.processes.demonstration import ensure_demonstration
from bough.processes.launch import launched, supervised
from bough.processes.progress import Progress
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Speculation, Tokens
from bough.protocol.worker_info import WorkerInfo
from bough.runtime.log_lines import say, shown, tell

GRID_TOKENS = 24  # tokens of each run that compares sizes
GRID_NODES = (4, 16, 64)
SELF_SIZED = 0  # stands for a self-sized tree among these numbers of nodes
GREEN, YELLOW, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"


async def demo(arguments: argparse.Namespace) -> int:
    """Write the model, start all processes, generate in several ways, compare; exit status 1 if outputs differ."""
    settings = settings_from(up_arguments(*([] if arguments.simulate is None else ["--simulate", arguments.simulate])))
    if not arguments.simulate:
        await asyncio.to_thread(ensure_demonstration)  # Ctrl-C acts where a command awaits
        announce_first_start()
    settings = divided(settings, tell)
    progress = Progress()
    async with launched(settings, progress) as cluster, supervised(cluster, tell), cluster.client() as client:
        progress.clear()
        workers = {worker.info.kind: worker.info for worker in (await client.server_info()).workers}
        contest = await _run_all(client, arguments, workers["target"].max_nodes)
    print("\n" + "\n".join(contest.table()) + "\n")
    if arguments.simulate:
        print("Workers were simulated: times are a profile's, and words mean nothing.")
    else:
        print("The target, block-expanded, has the text of SmolLM2-135M-Instruct and the cost of a 2.1 GB model.")
    models = {kind: _described(info) for kind, info in sorted(workers.items())}
    say(*(f"{kind}: {words}" for kind, words in models.items()), "")
    print(json.dumps({**contest.summary(), **models}))
    return 0 if contest.is_same else 1


async def _run_all(client: Client, arguments: argparse.Namespace, max_nodes: int) -> Contest:
    """Run the prompt with trees and without; then, unless --budget is given, its first tokens with several sizes."""
    is_asked = arguments.budget is not None
    title = f"{arguments.budget} nodes" if is_asked else "self-sized, cold"
    first_words = "of the size asked for" if is_asked else "that size themselves, of which nothing is known yet"
    legend = f"{GREEN}drafted{PLAIN}, {YELLOW}bonus{PLAIN}" if sys.stdout.isatty() else "greedy"
    print(f"prompt: {arguments.prompt}\n\nwith trees {first_words} ({legend}):\n")
    first = await _run(client, arguments, Speculation(budget=arguments.budget))
    print("\nwithout speculation:\n")
    plain = await _run(client, arguments, Speculation(disabled=True))
    sides = Side(title, [first]), Side("plain", [plain])
    if is_asked:
        return Contest(*sides)
    warm, fixed = await _run_grid(client, arguments, [nodes for nodes in GRID_NODES if nodes <= max_nodes])
    return Contest(*sides, warm, fixed)


async def _run_grid(client: Client, arguments: argparse.Namespace, grid: list[int]) -> tuple[Side, dict[int, Side]]:
    """Run each size twice, in order and reversed, so that a drift of the machine's speed affects all alike."""
    tokens = min(GRID_TOKENS, arguments.max_tokens)
    print(f"\nthe first {tokens} tokens again, in fixed sizes and self-sized (warm by now), in turns:\n")
    order = [*grid[:2], SELF_SIZED, *grid[2:]]
    runs: dict[int, list[Run]] = {nodes: [] for nodes in order}
    for nodes in [*order, *reversed(order)]:
        run = await _run(client, arguments, Speculation(budget=nodes or None), tokens)
        runs[nodes].append(run)
        title = f"{nodes} nodes" if nodes else f"self-sized, {Side('', [run]).mean_nodes:.3g} nodes a round"
        print(f"  {Side('', [run]).tokens_per_second:6.2f} tokens per second: {title}", flush=True)
    fixed = {nodes: Side(f"best fixed: {nodes}", runs[nodes]) for nodes in grid}
    return Side("self-sized, warm", runs[SELF_SIZED]), fixed


async def _run(
    client: Client, arguments: argparse.Namespace, speculation: Speculation, part_tokens: int | None = None
) -> Run:
    """Run one request; print its text unless only `part_tokens` of it are generated."""
    options = GenerateOptions(
        temperature=0.0, max_tokens=part_tokens or arguments.max_tokens, ignore_eos=True, speculation=speculation
    )
    run = Run()
    async for event in client.generate(ChatPrompt((Message("user", arguments.prompt),)), options):
        run.add(event)
        if isinstance(event, Tokens) and not part_tokens:
            print(_coloured(event), end="", flush=True)
    if not part_tokens:
        print()
    assert run.answer.started is not None, "a finished stream has started"
    run.decisions = await client.decisions(run.answer.started.request_id)
    return run


def _coloured(tokens: Tokens) -> str:
    if not sys.stdout.isatty():
        return tokens.text
    pairs = zip(tokens.texts, tokens.drafted, strict=True)
    return "".join(f"{GREEN if drafted else YELLOW}{shown(text, sys.stdout)}{PLAIN}" for text, drafted in pairs)


def _described(info: WorkerInfo) -> str:
    return "; ".join((f"{info.model_name}: {info.model_description}", *info.notes))
