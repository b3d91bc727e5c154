"""The `bough` command: `demo`, `up`, `generate`, `chat`, `explain`, `plan`, `shape`, `simulate`, `keys`, ..."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

from bough import __version__
from bough.cli.completion import add_completion, commands_of, flags_of
from bough.cli.flags.machine import add_demo, add_up
from bough.cli.flags.planning import add_plan, add_shape, add_simulate
from bough.cli.flags.reaching import add_address, with_hint
from bough.cli.flags.requests import add_sampling
from bough.cli.keys import add_keys
from bough.config.flag_parser import FlagParser, checked, flags_from
from bough.config.parsers import number
from bough.errors import BoughError, ConfigError
from bough.runtime.exit_status import EXIT_SIGNAL, MEANINGS, MISUSED, status_of
from bough.runtime.log_lines import report, say_error

EXIT_PIPE = EXIT_SIGNAL + signal.SIGPIPE  # the shell's status for SIGPIPE, which Python ignores

OURS = frozenset({"", "bough", "draft_worker", "orchestrator", "simulator", "target_worker"})  # not installable modules
COMPUTING = frozenset({"plan", "shape", "simulate"})  # commands that do not await
LEAST_SECONDS = 0.01  # between two refreshes of `top`, each of which queries all workers
MODULES = {  # each has a function of the command's name
    "chat": "generation.generate",
    "completion": "completion",
    "demo": "machine.demo",
    "doctor": "inspection.doctor",
    "explain": "inspection.explain",
    "generate": "generation.generate",
    "keys": "keys",
    "plan": "planning.plan",
    "shape": "planning.shape",
    "simulate": "planning.simulate",
    "top": "inspection.top",
    "up": "machine.up",
}

EXAMPLES = {
    "up": (
        "bough up                                    # the demonstration model",
        "bough up --target FOLDER --draft SMALLER_FOLDER --kv-memory 4GB",
        'bough up --config bough.toml                # target = "FOLDER" and kv-memory = "4GB" on two lines',
        "bough up --simulate rtx4090-70b-4bit        # no weights, no GPU",
    ),
    "demo": ("bough demo --max-tokens 64",),
    "generate": (
        'bough generate "Why is the sky blue?"',
        "cat report.txt | bough generate --system 'Summarise.' -",
        'bough generate --json --seed 1 --max-tokens 32 "Once upon a time" | jq .usage',
    ),
    "chat": ("bough chat --system 'You are brief.'       # Ctrl-C ends an answer; /help lists commands",),
    "plan": ("bough plan meta-llama/Llama-3.3-70B-Instruct --device gpu --device-memory 24GB",),
    "explain": ("bough explain                               # the most recent session",),
    "top": ("bough top --interval 2",),
    "doctor": ("bough doctor", "bough doctor --json | jq .problems"),
    "keys": ("bough keys add alice --file keys.jsonl --requests 4",),
    "completion": ('eval "$(bough completion bash)"',),
}
VARIABLES = (
    "BOUGH_ADDRESS            --address of all commands that call a server",
    "BOUGH_API_KEY            the API key that these commands send",
    "BOUGH_TLS_CA, BOUGH_TLS_CERT, BOUGH_TLS_KEY",
    "                         certificates of all processes and commands",
    "BOUGH_CACHE_DIR          where the demonstration model and compiled kernels are",
    "BOUGH_ORCHESTRATOR_KEYS  file of API keys, for `bough up` and `bough keys`",
    "BOUGH_ORCHESTRATOR_INDEX_URL",
    "                         --index-url of `bough up`, which may have a password",
    "BOUGH_TARGET_..., BOUGH_DRAFT_..., BOUGH_ORCHESTRATOR_...",
    "                         any setting of a process of `bough up`, as BOUGH_TARGET_KV_MEMORY=4GB;",
    "                         `python -m orchestrator --help` (target_worker, draft_worker) lists them",
)
SEE = ("`bough --help` lists environment variables and exit statuses",)

Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit silently if the process that reads standard output has closed the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # at exit, the interpreter would print the error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards unwritten output
        raise SystemExit(EXIT_PIPE) from None


@reader_may_leave()
def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; a BoughError is printed as one line on standard error, and the exit status is `status_of` it."""
    try:
        arguments = parsed(sys.argv[1:] if argv is None else argv)
    except ConfigError as exc:
        say_error(exc)
        raise SystemExit(MISUSED) from exc
    # asyncio needs the default handler, but a script's shell starts `bough generate &` with SIGINT ignored.
    signal.signal(signal.SIGINT, _interrupt if arguments.command in COMPUTING else signal.default_int_handler)
    logging.basicConfig(handlers=[_Warnings()])
    try:
        raise SystemExit(asyncio.run(_command(arguments.command)(arguments)))
    except BoughError as exc:
        say_error(with_hint(exc) if "address" in arguments else exc)
        raise SystemExit(status_of(exc)) from exc
    except ModuleNotFoundError as exc:
        module = (exc.name or "").split(".")[0]
        if module in OURS:
            raise
        extra = "plan" if arguments.command in ("shape", "simulate") or module == "matplotlib" else "worker"
        print(f"error: bough {arguments.command} needs {module}: pip install '.[{extra}]'", file=sys.stderr)
        raise SystemExit(MISUSED) from exc
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(EXIT_SIGNAL + signal.SIGINT) from None


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with flags of a --config before it, so that those of the line win. Raises ConfigError."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if path := getattr(arguments, "config", None):
        flags = {flag.name for flag in flags_of(commands_of(parser)[arguments.command])} - {"--config", "--help"}
        at = argv.index(arguments.command) + 1
        return parser.parse_args([*argv[:at], *flags_from(path, flags), *argv[at:]])
    return arguments


class _Warnings(logging.Handler):
    """Prints warnings, such as those of the client about lost connections, on two lines."""

    def emit(self, record: logging.LogRecord) -> None:
        report(record.getMessage())


def _interrupt(*_: object) -> None:
    """A SIGINT handler for computing commands; asyncio's own acts only when a command awaits."""
    raise KeyboardInterrupt


def _command(name: str) -> Command:
    """Import and return a command, so that each command imports only what it needs."""
    command: Command = getattr(importlib.import_module(f"bough.cli.{MODULES[name]}"), name)
    return command


def argument_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="bough", description=__import__("bough").__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(
        commands.add_parser("demo", help="write the demonstration model, start everything, compare with plain decoding")
    )
    add_up(commands.add_parser("up", help="start the index, the workers and the orchestrator, and keep them running"))
    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="the prompt; - reads standard input")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON line instead of the text")
    add_sampling(generate)
    add_address(generate)
    chat = commands.add_parser("chat", help="hold a conversation; its KV is reused from turn to turn")
    add_sampling(chat)
    add_address(chat)
    add_plan(commands.add_parser("plan", help="predict a model's memory and speed before you download it"))
    add_shape(commands.add_parser("shape", help="compute the best tree shape from acceptance rates"))
    add_simulate(
        commands.add_parser("simulate", help="predict speed for many users and machines, and what to buy next")
    )
    _add_explain(commands.add_parser("explain", help="explain the tree sizes of a session"))
    add_keys(commands.add_parser("keys", help="add, list and remove API keys of applications"))
    running = commands.add_parser("top", help="show the current load, refreshed periodically")
    often, looks = checked(number(float, LEAST_SECONDS)), checked(number(int, 0))
    running.add_argument("--interval", type=often, default=1.0, help="seconds between refreshes (default 1)")
    running.add_argument("--count", type=looks, default=0, help="number of refreshes (default: unlimited)")
    add_address(running)
    _add_doctor(commands.add_parser("doctor", help="report processes, models and problems"))
    shells = commands.add_parser("completion", help="print a shell script that completes commands and flags")
    add_completion(shells, parser)
    for name, command in commands.choices.items():
        lines = [f"  {line}" for line in EXAMPLES.get(name, ())]
        command.epilog = "\n".join(["examples:", *lines, "", *SEE] if lines else SEE)
    parser.epilog = "\n".join(["environment variables:", *(f"  {line}" for line in VARIABLES), "", MEANINGS])
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    text = "a session, or a request that ran in it (default: the most recent)"
    parser.add_argument("session", nargs="?", default="", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="also draw the rounds into a PNG file")
    add_address(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    text = "dashboard of a Ray cluster, such as http://HEAD:8265: shows nodes, replicas and their orchestrators"
    parser.add_argument("--ray", metavar="URL", default="", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a report")
    add_address(parser)


if __name__ == "__main__":
    main()
