"""`bough explain`: the reasons for the sizes of a session's trees, predictions against outcomes, and a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from bough.cli.flags.reaching import client_from
from bough.errors import ConfigError, NotFound, Unavailable
from bough.protocol.decision import Decision, Mode
from bough.runtime.log_lines import say
from bough.sizing.account import PART_NAMES, Account, account, why

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LEAST_SECONDS = 0.0005  # an activity that takes less in every round has no column
COLOURS = {
    Mode.DRAFT: "tab:green",
    Mode.LOOKUP: "tab:blue",
    Mode.PROBE: "tab:orange",
    Mode.FIXED: "tab:grey",
    Mode.OFF: "lightgrey",
}


async def explain(arguments: argparse.Namespace) -> int:
    """Print a line for each round and a summary, or one JSON line.

    Raises:
        NotFound, Unavailable: no orchestrator in --address has decisions of the session, or none answers.
        ConfigError: the plot cannot be written.
    """
    decisions = await _decisions(arguments)
    if arguments.plot:
        save_decisions(decisions, _title(arguments.session), arguments.plot)
    if arguments.json:
        print(json.dumps(as_json(arguments.session, decisions)))
    else:
        say(_title(arguments.session), "", *table(decisions), "", *summary(decisions))
    return 0


async def _decisions(arguments: argparse.Namespace) -> tuple[Decision, ...]:
    """Decisions from the first orchestrator that has some of the session."""
    problem: NotFound | Unavailable | None = None
    for address in arguments.address.split(","):
        async with client_from(arguments, address) as client:
            try:
                return await client.decisions(arguments.session)
            except (NotFound, Unavailable) as exc:
                problem = exc if problem is None or isinstance(exc, NotFound) else problem
    assert problem is not None, "there is at least one address"
    raise problem


def as_json(session: str, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The content of `--json`: rounds with their reasons, and the summary."""
    rounds = [asdict(each) | {"mode": each.mode.value, "why": why(each)} for each in decisions]
    summed = account(decisions)
    shares = {mode.value: round(share, 4) for mode, share in summed.shares.items()}
    return {"session": session, "rounds": rounds, "summary": asdict(summed) | {"shares": shares}}


class Column(NamedTuple):
    """One right-aligned column of the table."""

    title: str
    width: int
    cell: Callable[[Decision], str]


def table(decisions: Sequence[Decision]) -> Iterator[str]:
    """A heading and a line for each round; pairs are expected/real."""
    price = Column("lambda", 8, lambda each: f"{each.price:.3g}" if each.price else "-")
    columns = [*_rounds(), *_parts(decisions), *_experts(decisions), price]
    yield "".join(f"{column.title:>{column.width}}" for column in columns) + "  why"
    for each in decisions:
        yield "".join(f"{column.cell(each):>{column.width}}" for column in columns) + f"  {why(each)}"


def _rounds() -> list[Column]:
    return [
        Column("round", 5, lambda each: str(each.number)),
        Column("mode", 8, lambda each: each.mode.value),
        Column("budget", 8, lambda each: str(each.budget)),
        Column("width", 7, lambda each: str(each.width or "-")),
        Column("depth", 7, lambda each: str(each.depth or "-")),
        Column("grown", 7, lambda each: str(each.num_grown)),
        Column("sent", 6, lambda each: str(each.num_sent)),
        Column("left out", 10, lambda each: str(each.num_left_out)),
        Column("rows", 6, lambda each: str(each.num_rows)),
        Column("steps", 7, lambda each: str(each.num_steps)),
        Column("tokens", 11, lambda each: f"{_expected(each, f'{each.expected_tokens:.1f}')}/{each.tokens}"),
        Column("seconds", 15, lambda each: _pair(each, each.expected.total, each.seconds.total)),
    ]


def _parts(decisions: Sequence[Decision]) -> Iterator[Column]:
    for name in PART_NAMES:

        def pair(each: Decision, name: str = name) -> str:
            return _pair(each, getattr(each.expected, name), getattr(each.seconds, name))

        longest = max(max(getattr(each.expected, name), getattr(each.seconds, name)) for each in decisions)
        if longest >= LEAST_SECONDS:
            yield Column(name, 15, pair)


def _experts(decisions: Sequence[Decision]) -> Iterator[Column]:
    def pair(each: Decision) -> str:
        return f"{each.expected_expert_ratio:.2f}/{each.expert_ratio:.2f}" if each.expert_ratio else "-"

    if any(each.expert_ratio for each in decisions):
        yield Column("experts", 11, pair)


def _pair(decision: Decision, expected: float, real: float) -> str:
    return f"{_expected(decision, f'{expected:.3f}')}/{real:.3f}"


def _expected(decision: Decision, text: str) -> str:
    return text if decision.is_predicted else "-"


def summary(decisions: Sequence[Decision]) -> Iterator[str]:
    """Lines that summarise all rounds."""
    summed = account(decisions)
    shares = ", ".join(f"{share:.0%} {mode.value}" for mode, share in summed.shares.items())
    yield (
        f"{summed.tokens} tokens in {summed.num_rounds} rounds and {summed.seconds:.3g} s; "
        f"{summed.mean_nodes:.3g} nodes a round; rounds: {shares}"
    )
    yield _predictions(summed)
    if summed.plain_rate is not None:
        yield (
            f"{summed.rate:.3g} tokens per second; plain decoding was predicted to reach {summed.plain_rate:.3g}, "
            f"of which that is {summed.rate / summed.plain_rate:.2f} times"
        )
    if (experts := summed.experts) is not None:
        yield (
            f"experts of sweeps with trees, in multiples of one row's: {experts.expected:.2f} expected and "
            f"{experts.chosen:.2f} chosen by {experts.num_rows:.3g} rows; these take {experts.sweep_growth:.2f} times "
            "as long as a sweep without a tree"
        )
    for mode, last in {decision.mode: decision for decision in decisions}.items():
        yield f"last {mode.value}: round {last.number}, {why(last)}"


def _predictions(summed: Account) -> str:
    if summed.token_bias is None or summed.seconds_bias is None:
        return "these rounds have no predictions"
    parts = ", ".join(
        f"{name} {getattr(summed.expected, name):.3f}/{getattr(summed.real, name):.3f}" for name in PART_NAMES
    )
    return (
        f"predicted and real, over {summed.num_predicted} rounds: tokens {summed.token_bias:+.1%}, seconds "
        f"{summed.seconds_bias:+.1%}; mean seconds: {parts}"
    )


def _title(session: str) -> str:
    return f"session {session}" if session else "the most recently active session"


def save_decisions(decisions: Sequence[Decision], title: str, file: str) -> None:
    """Save three panels over the rounds: nodes by mode, tokens, and seconds by activity.

    Raises:
        ConfigError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 9), layout="constrained")
    sizes, tokens, seconds = figure.subplots(3, 1, sharex=True)
    _draw_sizes(sizes, decisions)
    _draw_tokens(tokens, decisions)
    _draw_seconds(seconds, decisions)
    figure.suptitle(title)
    seconds.set(xlabel="round, counted from the first one recorded")
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (sizes, tokens, seconds):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as exc:
        raise ConfigError(f"--plot: {file} cannot be written: {exc}") from exc


def _draw_sizes(axes: Axes, decisions: Sequence[Decision]) -> None:
    """Bars of verified nodes in the mode's colour, nodes left out stacked on top, and dashes for budgets."""
    places = range(1, len(decisions) + 1)
    for mode, colour in COLOURS.items():
        bars = [(x, d.num_sent - d.num_left_out) for x, d in zip(places, decisions, strict=True) if d.mode is mode]
        if bars:
            axes.bar(*zip(*bars, strict=True), color=colour, label=mode.value)
            axes.plot(*zip(*bars, strict=True), "o", color=colour, markersize=4)  # visible for a root alone
    if any(each.num_left_out for each in decisions):
        left_out, below = [d.num_left_out for d in decisions], [d.num_sent - d.num_left_out for d in decisions]
        axes.bar(places, left_out, bottom=below, color="none", edgecolor="tab:red", label="left out by the target")
    budgets = [each.budget for each in decisions]
    axes.plot(places, budgets, "_", color="black", label="requested from the draft")
    axes.set(ylabel="nodes", ylim=(0, None))


def _draw_tokens(axes: Axes, decisions: Sequence[Decision]) -> None:
    places = range(1, len(decisions) + 1)
    axes.bar(places, [each.tokens for each in decisions], color="lightsteelblue", label="came")
    expected = [(x, d.expected_tokens) for x, d in zip(places, decisions, strict=True) if d.is_predicted]
    if expected:
        axes.plot(*zip(*expected, strict=True), "o-", color="black", markersize=3, label="expected")
    axes.set(ylabel="tokens", ylim=(0, None))


def _draw_seconds(axes: Axes, decisions: Sequence[Decision]) -> None:
    """Stacked bars of real seconds by activity, and a line of expected totals."""
    places = range(1, len(decisions) + 1)
    below = [0.0] * len(decisions)
    for name in PART_NAMES:
        parts = [getattr(each.seconds, name) for each in decisions]
        axes.bar(places, parts, bottom=below, label=name)
        below = [low + part for low, part in zip(below, parts, strict=True)]
    expected = [(x, d.expected.total) for x, d in zip(places, decisions, strict=True) if d.is_predicted]
    if expected:
        axes.plot(*zip(*expected, strict=True), "o-", color="black", markersize=3, label="expected")
    axes.set(ylabel="seconds", ylim=(0, None))
