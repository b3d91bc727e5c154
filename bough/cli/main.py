"""The `bough` command: `demo`, `up`, `generate`, `chat`, `explain`, `plan`, `shape`, `simulate`, `pack`, `keys`, ..."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields

from bough import __version__
from bough.cli.closed_pipe import reader_may_leave
from bough.cli.keys import add_keys, keys
from bough.cli.reaching import add_address
from bough.cli.simulate_flags import add_simulate
from bough.cli.speculation import add_speculation, speculation_from
from bough.config.parsers import DRAFT_BITS, DTYPE_NAMES
from bough.config.processes import DEFAULT_PORT, PLANNERS, PlanConfig
from bough.errors import BoughError
from bough.protocol.generation import GenerateOptions
from bough.trees.tree_plan import Scheme

PLAN_SETTINGS = (
    "draft", "draft_bits", "device", "device_memory", "host_memory", "kv_memory", "kv_sessions", "kv_tier",
    "ring_memory", "resident_devices", "resident_layers", "experts", "max_context", "max_nodes", "max_sweep_tokens",
    "rows", "dtype", "bits", "threads", "link_threads", "link_speed", "host_link_speed", "crossing_speed",
    "compute_speed", "memory_speed", "unpack_speed", "tokens_per_round",
)  # fmt: skip
OURS = frozenset({"", "bough", "draft_worker", "orchestrator", "target_worker"})  # not installable modules
COMPUTING = frozenset({"pack", "plan", "shape", "simulate"})  # commands that do not await
Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


@reader_may_leave()
def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; a BoughError is printed as one line on standard error, with exit status 2."""
    arguments = argument_parser().parse_args(argv)
    if arguments.command in COMPUTING:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        raise SystemExit(asyncio.run(_command(arguments.command)(arguments)))
    except BoughError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(2) from exc
    except ModuleNotFoundError as exc:
        module = (exc.name or "").split(".")[0]
        if module in OURS:
            raise
        extra = "plan" if module in ("simpy", "matplotlib") else "worker"
        print(f"error: bough {arguments.command} needs {module}: pip install 'bough[{extra}]'", file=sys.stderr)
        raise SystemExit(2) from exc
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, or SIGTERM as `bough.processes.launch` takes it
        raise SystemExit(130) from None


def _interrupt(*_: object) -> None:
    """A SIGINT handler for computing commands; asyncio's own acts only when a command awaits."""
    raise KeyboardInterrupt


def _command(name: str) -> Command:
    """Import and return a command, so that each command imports only what it needs."""
    if name == "demo":
        from bough.cli.demo import demo as command
    elif name == "up":
        from bough.cli.up import up as command
    elif name == "doctor":
        from bough.cli.doctor import doctor as command
    elif name == "pack":
        from bough.cli.pack import pack as command
    elif name == "plan":
        from bough.cli.plan import plan as command
    elif name == "shape":
        from bough.cli.shape import shape as command
    elif name == "simulate":
        from bough.cli.simulate import simulate as command
    elif name == "explain":
        from bough.cli.explain import explain as command
    elif name == "keys":
        command = keys
    elif name == "top":
        from bough.cli.top import top as command
    elif name == "chat":
        from bough.cli.generate import chat as command
    else:
        from bough.cli.generate import generate as command
    return command


def options_from(arguments: argparse.Namespace) -> GenerateOptions:
    """Request options from the flags of `_add_sampling`.

    Raises:
        ConfigError, InvalidRequest: names the invalid flag.
    """
    return GenerateOptions(
        session_id=arguments.session,
        model=arguments.model,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=dict(arguments.logit_bias),
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        stop_token_ids=tuple(arguments.stop_token_id),
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        speculation=speculation_from(arguments),
    )


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bough", description=__import__("bough").__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="everything from nothing: build the model, start, compare"))
    _add_up(commands.add_parser("up", help="start the index, the workers and the orchestrator, and keep them running"))
    _add_pack(commands.add_parser("pack", help="write a smaller checkpoint, in 4 or 8 bits, or a draft"))
    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="what to answer; - reads standard input")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON line instead of the text")
    _add_sampling(generate)
    add_address(generate)
    chat = commands.add_parser("chat", help="talk; KV is kept from turn to turn")
    _add_sampling(chat)
    add_address(chat)
    _add_plan(commands.add_parser("plan", help="what a model would need and how fast it would be, before it is there"))
    _add_shape(commands.add_parser("shape", help="the tree worth most, given how often guesses are accepted"))
    add_simulate(
        commands.add_parser("simulate", help="what many users of many machines would get, and what to buy next")
    )
    _add_explain(commands.add_parser("explain", help="why a session's trees were as large as they were"))
    add_keys(commands.add_parser("keys", help="who may come in: add, list and remove keys of applications"))
    running = commands.add_parser("top", help="what is running now, shown again and again")
    running.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default 1)")
    running.add_argument("--count", type=int, default=0, help="looks, after which it ends (default: never)")
    add_address(running)
    _add_doctor(commands.add_parser("doctor", help="what is running, where, with which models, and what is wrong"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default="Explain how a rainbow forms, step by step.", help="what to answer")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the answer (default 64)")
    parser.add_argument("--budget", type=int, help="nodes of a tree (they size themselves by default)")
    parser.add_argument("--simulate", metavar="PROFILE", help="workers without weights, as for `bough up`")


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="model folder or cached hub id; the demonstration model by default")
    parser.add_argument("--draft", help="the same for the draft, or none; the demonstration model has one by default")
    parser.add_argument(
        "--simulate",
        metavar="PROFILE",
        help="workers without weights: a shipped profile's name or a JSON file (docs/simulated-workers.md)",
    )
    parser.add_argument("--drop-layers", help="layers that a substitute leaves out, such as 12-15")
    parser.add_argument(
        "--dtype", choices=DTYPE_NAMES, help="data type of the target (default: its own on a GPU, else bfloat16)"
    )
    parser.add_argument("--max-context", help="most tokens of a session, prompt and output (default 2048)")
    parser.add_argument("--device-memory", help="memory for the target, KV and all (default: most of what is free)")
    parser.add_argument(
        "--kv-memory", help="of that, for the keys and values of all sessions (default: an eighth, at most 2GB)"
    )
    parser.add_argument("--host-memory", help="beside a GPU: pinned memory for layers (default: most of what is free)")
    parser.add_argument(
        "--ahead-steps", help="draft steps while the target verifies, at most (default 64 on a GPU of the draft's own)"
    )
    parser.add_argument("--draft-bits", choices=DRAFT_BITS, help="bits of the draft's products (default auto)")
    parser.add_argument("--draft-device", help="where the draft computes: cpu, cuda or cuda:1 (default: a GPU, if any)")
    parser.add_argument("--draft-dtype", choices=DTYPE_NAMES, help="data type of the draft (default: likewise)")
    parser.add_argument("--planner", choices=PLANNERS, help="who sizes trees (default self; fixed is to compare with)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"of the orchestrator (default {DEFAULT_PORT})")
    http = "of the orchestrator, for OpenAI's clients (default 8000, or a free one; -1 is none)"
    parser.add_argument("--http-port", help=http)
    index = "a running Redis or Valkey; one is started by default. BOUGH_ORCHESTRATOR_INDEX_URL keeps passwords unseen"
    parser.add_argument("--index-url", default="", help=index)


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model folder or cached hub id, in 16 or 32 bits")
    parser.add_argument("--draft", action="store_true", help="write a draft: it shares embeddings and head with MODEL")
    parser.add_argument("--drop-layers", help="of a draft: layers to leave out, such as 3,14")
    parser.add_argument(
        "--bits", type=float,
        help="for a weight: 4 (default) or 8; of a draft the average, scales included (default 6.5)",
    )  # fmt: skip
    parser.add_argument(
        "--whole", action="store_true", help="of a draft: copy what it would share, to use it elsewhere"
    )
    parser.add_argument("--out", help="folder to write, continue or repair; MODEL-4bit or MODEL-draft here by default")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder or hub id; its config.json is enough")
    texts = {setting.name: setting.metadata["help"] for setting in fields(PlanConfig)}
    for name in PLAN_SETTINGS:
        parser.add_argument("--" + name.replace("_", "-"), help=texts[name])
    parser.add_argument("--png", metavar="FILE", help="also draw the plot into a file")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--vector", metavar="FILE", help="JSON list of acceptances by rank, or of such lists by depth")
    source.add_argument("--from-live", action="store_true", help="what a running orchestrator has measured, smoothed")
    parser.add_argument("--nodes", type=int, required=True, help="most nodes, the root included")
    parser.add_argument("--levels", type=int, help="most levels, the root's included (any number by default)")
    parser.add_argument("--branch", type=int, help="most children of a node (as many as were measured by default)")
    parser.add_argument(
        "--sweep-seconds", type=_seconds, action="append", default=[], metavar="NODES=SECONDS",
        help="a measured sweep; from two of them on the size with most tokens per second is chosen, up to --nodes",
    )  # fmt: skip
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a measured draft step, one for each level")
    parser.add_argument("--plot", metavar="FILE", help="also draw the tree into a PNG file")
    schemes = [scheme.value for scheme in Scheme]
    parser.add_argument("--scheme", choices=schemes, help=f"of --from-live (default {Scheme.TARGET.value})")
    parser.add_argument("--by-depth", action="store_true", help="of --from-live: tell depths apart")
    add_address(parser)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", nargs="?", default="", help="a session, or a request that ran in it (default: the last at work)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="also draw the rounds into a PNG file")
    add_address(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    text = (
        "dashboard of a Ray cluster, such as http://HEAD:8265: show its nodes and replicas, and ask its orchestrators"
    )
    parser.add_argument("--ray", metavar="URL", default="", help=text)
    add_address(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    defaults = GenerateOptions()
    add = parser.add_argument
    add("--system", default="", help="system message")
    add("--model", default="", help="its name, where several are served (bough doctor lists them)")
    add("--session", default="", help="keep KV under this name for the next turn")
    add("--temperature", type=float, default=defaults.temperature, help="0 is greedy (default 1)")
    add("--top-k", type=int, default=defaults.top_k, help="0 is off")
    add("--top-p", type=float, default=defaults.top_p, help="1 is off")
    add("--min-p", type=float, default=defaults.min_p, help="0 is off")
    add("--seed", type=int, help="equal seeds give equal tokens; random by default")
    add("--repetition-penalty", type=float, default=defaults.repetition_penalty, help="1 is off")
    add("--presence-penalty", type=float, default=defaults.presence_penalty, help="0 is off")
    add("--frequency-penalty", type=float, default=defaults.frequency_penalty, help="0 is off")
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="-inf bans it; may be repeated",
    )
    add("--max-tokens", type=int, default=defaults.max_tokens, help="default 256")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the output; may be repeated")
    add("--stop-token-id", type=int, action="append", default=[], metavar="TOKEN", help="may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the model's own end")
    add("--logprobs", type=int, help="report log-probabilities with so many alternatives")
    add_speculation(parser)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a token id and a number, such as 42=-1.5, got {text!r}") from None


def _seconds(text: str) -> tuple[int, float]:
    nodes, _, seconds = text.partition("=")
    try:
        return int(nodes), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be nodes and seconds, such as 64=1.3, got {text!r}") from None


if __name__ == "__main__":
    main()
