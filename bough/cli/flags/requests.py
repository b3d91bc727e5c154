"""Flags of requests, and the options made from them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from bough.errors import ConfigError
from bough.protocol.generation import Constraint, GenerateOptions, Speculation
from bough.protocol.sampling_params import PARAMETERS
from bough.trees.tree_plan import Growth, Scheme, StaticShape, require_growth

MOST_NODES = 4096  # of a shape; each target has its own, lower limit
BEST_FIRST = "best-first"
CHAINS = re.compile(r"chain:(?P<alone>[1-9][0-9]{0,3})|chains:(?P<num>[1-9][0-9]{0,3})x(?P<length>[1-9][0-9]{0,3})")
SIZES = ("budget", "width", "depth")
AS_GIVEN = (*PARAMETERS, "model", "max_tokens", "include_stop", "ignore_eos")  # options of the same names


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough generate` and `bough chat`."""
    defaults = GenerateOptions()
    add = parser.add_argument
    add("--system", default="", help="system message")
    add("--chat-template-kwargs", default="", metavar="JSON", help="variables of the template: '{\"thinking\": true}'")
    add("--model", default="", help="name of the model, if several are served (`bough doctor` lists them)")
    add("--session", default="", help="keep KV under this name for the next turn")
    for name, parameter in PARAMETERS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        add(flag, type=parameter.kind, default=default, help=parameter.help)
    bias = "added to the logit of a token, by its id; -inf bans it; may be repeated"
    add("--logit-bias", type=_bias, action="append", default=[], metavar="TOKEN=BIAS", help=bias)
    add("--max-tokens", type=int, default=defaults.max_tokens, help="maximum tokens of the output (default 256)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the output; may be repeated",
    )
    add(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="id of a token that ends the output; may be repeated",
    )
    add("--include-stop", action="store_true", help="include the stop text or token in the output")
    add("--ignore-eos", action="store_true", help="continue after the model's end-of-text token")
    add("--json-schema", metavar="FILE", help="the output is JSON that this JSON Schema allows")
    add("--regex", help="the whole output matches this regular expression")
    add("--choice", action="append", default=[], metavar="TEXT", help="the output is one of these; may be repeated")
    add("--grammar", metavar="FILE", help="the output follows this grammar, in llguidance's dialect of Lark")
    add_speculation(parser)


def options_from(arguments: argparse.Namespace) -> GenerateOptions:
    """Request options from the flags of `add_sampling`.

    Raises:
        ConfigError, InvalidRequest: names the invalid flag.
    """
    return GenerateOptions(
        session_id=arguments.session,
        logit_bias=dict(arguments.logit_bias),
        stop=tuple(arguments.stop),
        stop_token_ids=frozenset(arguments.stop_token_id),
        speculation=speculation_from(arguments),
        constraint=_constraint(arguments),
        **{name: getattr(arguments, name) for name in AS_GIVEN},
    )


def _constraint(arguments: argparse.Namespace) -> Constraint | None:
    schema, lark = (
        None if path is None else _read(flag, path)
        for flag, path in (("--json-schema", arguments.json_schema), ("--grammar", arguments.grammar))
    )
    constraint = Constraint(schema, arguments.regex, tuple(arguments.choice), lark)
    return None if constraint == Constraint() else constraint


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag}: must be a file of text, got {path!r}: {exc}") from exc


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a token id and a number, such as 42=-1.5, got {text!r}") from None


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `speculation_from` reads."""
    add = parser.add_argument
    add("--no-speculation", action="store_true", help="plain decoding: the same tokens, one per sweep")
    add("--budget", type=int, help="nodes of a tree that grows best first (default: trees size themselves)")
    add("--width", type=int, help="nodes of such a tree that a draft step expands")
    add("--depth", type=int, help="maximum depth of such a tree below the root")
    growth = "best-first (default); FILE, a shape as `bough shape` prints it; chain:LENGTH, or chains:NUMxLENGTH"
    add("--growth", default=BEST_FIRST, metavar="HOW", help=growth)
    schemes = "how guesses are verified (default %(default)s); the others verify samples, in a shape or chains"
    add("--scheme", choices=[scheme.value for scheme in Scheme], default=Scheme.TARGET.value, help=schemes)
    lookup = "maximum nodes from the session's own text; 0 disables (default: the orchestrator's setting)"
    add("--lookup", type=int, metavar="N", help=lookup)


def read_json(flag: str, what: str, file: str) -> Any:
    """The JSON value in a file. Raises ConfigError, which names the flag and says that it must be `what`."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{flag}: must be {what}, got {file}, which cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # not UTF-8, not JSON, or nested too deeply
        raise ConfigError(f"{flag}: must be {what}, got {file}, which is not JSON: {exc}") from exc


def speculation_from(arguments: argparse.Namespace) -> Speculation:
    """Speculation settings from the flags.

    Raises:
        ConfigError, InvalidRequest: names a flag that is invalid or contradicts another.
    """
    growth, scheme = _growth(arguments.growth), Scheme(arguments.scheme)
    for name in SIZES:
        if growth is not None and getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name}: must not be given with --growth {arguments.growth}, which sets the size of a tree, "
                f"got {getattr(arguments, name)}"
            )
    if scheme.is_sampled and growth is None:
        raise ConfigError(
            "--scheme: must be target with best-first growth, which does not sample, or given with --growth FILE (a "
            f"shape), chain:LENGTH or chains:NUMxLENGTH, got {arguments.scheme}"
        )
    sizes = {name: getattr(arguments, name) for name in SIZES}
    return Speculation(arguments.no_speculation, **sizes, growth=growth, scheme=scheme, lookup=arguments.lookup)


def _growth(text: str) -> Growth | None:
    """The growth of `--growth`; None is best-first, sized by other flags or the planner."""
    if text == BEST_FIRST:
        return None
    if match := CHAINS.fullmatch(text):
        chains = StaticShape.chains(int(match["num"] or 1), int(match["length"] or match["alone"]))
        require_growth(f"--growth {text}", chains, MOST_NODES)
        return chains
    if text.startswith(("chain:", "chains:")):
        raise ConfigError(f"--growth: must be a chain such as chain:5, or chains such as chains:4x5, got {text}")
    return _shape(text)


def _shape(file: str) -> StaticShape:
    """The shape in a file with the output of `bough shape`."""
    content = read_json("--growth", f"{BEST_FIRST}, chain:LENGTH, chains:NUMxLENGTH or a file from `bough shape`", file)
    parents = content.get("parents") if isinstance(content, dict) else None
    if not isinstance(parents, list) or not all(type(parent) is int for parent in parents):
        raise ConfigError(f"--growth: {file} must have a list `parents` of nodes, as `bough shape` prints it")
    shape = StaticShape(tuple(parents))
    require_growth(f"--growth: {file}", shape, MOST_NODES)
    return shape
