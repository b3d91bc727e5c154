"""Flags of requests, and the options made from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from bough.cli.flags.speculation import add_speculation, speculation_from
from bough.errors import ConfigError
from bough.protocol.generation import Constraint, GenerateOptions
from bough.protocol.sampling_params import PARAMETERS

AS_GIVEN = (*PARAMETERS, "model", "max_tokens", "include_stop", "ignore_eos")  # options of the same names


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough generate` and `bough chat`."""
    defaults = GenerateOptions()
    add = parser.add_argument
    add("--system", default="", help="system message")
    add("--chat-template-kwargs", default="", metavar="JSON", help="variables of the template: '{\"thinking\": true}'")
    add("--model", default="", help="name of the model, where several are served (`bough doctor` lists them)")
    add("--session", default="", help="keep KV under this name for the next turn")
    for name, parameter in PARAMETERS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        add(flag, type=parameter.kind, default=default, help=parameter.help)
    bias = "added to the logit of a token, by its id; -inf bans it; may be repeated"
    add("--logit-bias", type=_bias, action="append", default=[], metavar="TOKEN=BIAS", help=bias)
    add("--max-tokens", type=int, default=defaults.max_tokens, help="most tokens of the output (default 256)")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text that ends the output; may be repeated")
    add("--stop-token-id", type=int, action="append", default=[], metavar="ID", help="ends the output; may be repeated")
    add("--include-stop", action="store_true", help="the stop text or token that ends the output is part of it")
    add("--ignore-eos", action="store_true", help="go on past the model's own end")
    add("--json-schema", metavar="FILE", help="the output is JSON that this JSON Schema allows")
    add("--regex", help="the output is a text that this matches as a whole")
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
