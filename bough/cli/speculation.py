"""Flags that say how to speculate, for every command that generates: what they are, and what they ask for."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from bough.errors import ConfigError
from bough.protocol.generation import Speculation
from bough.trees.tree_plan import Chains, Growth, Guess, Scheme, StaticShape, require_growth

MOST_NODES = 4096  # of a shape that any target could be asked for; the one that is asked says what it takes
BEST_FIRST = "best-first"
CHAINS = re.compile(r"chains:([0-9]{1,4})x([0-9]{1,4})|chain:([0-9]{1,4})")
SIZES = ("budget", "width", "depth")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """The flags that `speculation_from` reads."""
    add = parser.add_argument
    add("--no-speculation", action="store_true", help="plain decoding: the same tokens, one a sweep")
    add("--budget", type=int, help="nodes of a tree that grows best first")
    add("--width", type=int, help="nodes of it that a draft step expands")
    add("--depth", type=int, help="levels of a tree that grows best first")
    add(
        "--growth", default=BEST_FIRST, metavar="HOW",
        help="best-first (default); FILE, a shape as `bough shape` prints it; chain:LENGTH, or chains:NUMxLENGTH",
    )  # fmt: skip
    add(
        "--scheme", choices=[scheme.value for scheme in Scheme], default=Scheme.TARGET.value,
        help="how guesses are verified (default %(default)s); the others verify samples, in a shape or chains",
    )  # fmt: skip
    add(
        "--guess", choices=[guess.value for guess in Guess],
        help="what a draft takes for likely: the token that the target will draw, or its distribution (default sample)",
    )  # fmt: skip
    add(
        "--lookup",
        type=int,
        metavar="N",
        help="most nodes from the session's own text; 0 is off (default 16; beside samples 0)",
    )


def speculation_from(arguments: argparse.Namespace) -> Speculation:
    """What the flags ask for.

    Raises:
        ConfigError, InvalidRequest: naming a flag that cannot be read, or that contradicts another.
    """
    growth, scheme = _growth(arguments.growth), Scheme(arguments.scheme)
    for name in SIZES:
        if growth is not None and getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name}: {getattr(arguments, name)}, but --growth {arguments.growth} says already how large a tree "
                "is; one of the two would do"
            )
    if scheme is not Scheme.TARGET:
        _require_samples(arguments, growth)
    return Speculation(
        arguments.no_speculation,
        arguments.budget,
        arguments.width,
        arguments.depth,
        growth,
        scheme,
        Guess(arguments.guess or Guess.SAMPLE.value),
        arguments.lookup,
    )


def _require_samples(arguments: argparse.Namespace, growth: Growth | None) -> None:
    """Raises ConfigError where something is asked for that is no sample of the draft's."""
    if growth is None:
        raise ConfigError(
            f"--scheme: {arguments.scheme} verifies samples, and growing best first takes none; --growth with the "
            "file of a shape, chain:LENGTH or chains:NUMxLENGTH would do"
        )
    if arguments.guess is not None:
        raise ConfigError(
            f"--guess: {arguments.guess}, but by --scheme {arguments.scheme} a draft samples its guesses; "
            "--scheme target would do"
        )


def _growth(text: str) -> Growth | None:
    """From `--growth`; None is best first, in the sizes that other flags or the planner say."""
    if text == BEST_FIRST:
        return None
    if match := CHAINS.fullmatch(text):
        num, length, alone = match.groups()
        chains = Chains(1, int(alone)) if alone else Chains(int(num), int(length))
        require_growth(f"--growth {text}", chains, MOST_NODES)
        return chains
    if text.startswith(("chain:", "chains:")):
        raise ConfigError(f"--growth: {text}; a chain such as chain:5, or chains such as chains:4x5, would do")
    return _shape(text)


def _shape(file: str) -> StaticShape:
    """The shape in a file that holds what `bough shape` prints."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"--growth: {file} cannot be read: {exc.strerror}; {BEST_FIRST}, chain:LENGTH, chains:NUMxLENGTH or a file "
            "that `bough shape` wrote would do"
        ) from exc
    except (ValueError, RecursionError) as exc:  # not UTF-8, not JSON, or lists in lists without end
        raise ConfigError(f"--growth: {file} is no JSON: {exc}") from exc
    parents = content.get("parents") if isinstance(content, dict) else None
    if not isinstance(parents, list) or not all(type(parent) is int for parent in parents):
        raise ConfigError(f"--growth: {file} has no list `parents` of nodes; what `bough shape` prints would do")
    shape = StaticShape(tuple(parents))
    require_growth(f"--growth: {file}", shape, MOST_NODES)
    return shape
