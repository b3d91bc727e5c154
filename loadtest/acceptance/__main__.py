"""Measures tokens per round by verification scheme, growth, tree size and temperature, and how well they are predicted.

    python -m loadtest.acceptance

Draft and target run in this process; the target is the unexpanded demonstration model, whose text is the expanded
one's. Trees are grown by the draft worker as it is, all prompts in step, and judged by the target worker's own code;
only, the target computes logits where the walk through a tree asks for them, not at every node. So tokens per round are
what the pipeline gives, and the sweeps that they would have cost are not paid for. With --crossed the same of ways that
the papers do not compare; with --contestants of those alone whose names hold what it says. Drafts learn how sure they
may be as in service, but SpecExec's takes its probabilities as they are, as the paper does. Ends with one JSON line:

tokens_per_round   by temperature, contestant and nodes: [mean over prompts, half the width of its 95 % confidence
                   interval (bootstrap over prompts)]
prediction_error   mean of |predicted / measured - 1| by contestant, of tokens per round where every round weighs the
                   same: shapes and chains, predicted from the acceptance by rank along the same texts.
                   prediction_error_before has the vectors of another seed's texts, by which the shapes were chosen:
                   what chance does to a text is in it too. prediction_errors and _before have the worst sizes as well
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.processes import DraftConfig, parse
from bough.processes.demonstration import ensure_demonstration
from bough.tokenization.tokenizer import Tokenizer
from draft_worker.worker import DraftWorker
from loadtest.acceptance.bench import RANKS, Bench
from loadtest.acceptance.contestants import EVERYONE, contestants_at
from loadtest.acceptance.measure import measure, rows_before, settings_of
from loadtest.acceptance.multi_round import MultiRoundBench
from loadtest.acceptance.report import plot, prediction_errors, table, tokens_per_round
from loadtest.acceptance.target import LazyTarget
from loadtest.common.prompts import load_prompts


def main() -> None:
    """Print tables and one JSON line."""
    arguments = arguments_from()
    rows = rows_before(arguments)
    ensure_demonstration(0)
    folder = demonstration_folder(0)
    flags = ["--model", str(folder), "--drop-layers", arguments.drop_layers, "--bits", arguments.bits]
    sizes = ["--max-nodes", "1024", "--max-children", str(RANKS), "--max-context", "512"]
    config = parse(DraftConfig, "bench", [*flags, *sizes, "--threads", str(arguments.threads)], {})
    as_it_is = replace(config, inverse_temperature=1.0)
    drafts = {True: DraftWorker(config, "bench"), False: DraftWorker(as_it_is, "as it is")}
    tokenizer, target = Tokenizer(drafts[True].tokenizer), LazyTarget(folder, 1024)
    texts = load_prompts(arguments.prompts)[: arguments.num]
    prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
    benches = {
        (is_multi_round, is_calibrated): kind(draft, target, prompts, arguments.max_tokens)
        for is_multi_round, kind in ((False, Bench), (True, MultiRoundBench))
        for is_calibrated, draft in drafts.items()
    }
    for temperature in arguments.temperatures:
        measure(benches, temperature, arguments, rows)
    for note in drafts[True].info().notes:
        print(note, file=sys.stderr)
    for draft in drafts.values():
        draft.close()
    for temperature in arguments.temperatures:
        print(table(rows, temperature, arguments.nodes) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    figures: dict[str, object] = {"tokens_per_round": tokens_per_round(rows)}
    for which in ("", "_before"):
        errors = prediction_errors(rows, f"predicted{which}")
        figures[f"prediction_error{which}"] = {name: error["mean"] for name, error in errors.items()}
        figures[f"prediction_errors{which}"] = errors
    print(json.dumps({**settings_of(arguments), **figures, "rows": rows}))


def arguments_from(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse arguments, by default the command line's; exits with a message if a contestant is unknown."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--crossed", action="store_true", help="the other growths of each scheme instead")
    parser.add_argument(
        "--contestants", nargs="+", default=[EVERYONE], help="as the tables name them, or parts of their names"
    )
    parser.add_argument("--num", type=int, default=24, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL file with `text` or `turns`; bough's own by default")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument(
        "--repeats", type=int, default=2, help="of the schemes whose texts depend on the trees, with other seeds"
    )
    parser.add_argument("--drop-layers", default=SUBSTITUTE_DROPS, help="of the substitute draft (default %(default)s)")
    parser.add_argument("--bits", choices=["auto", "8", "16"], default="auto", help="of the draft's products")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="one is best where others compute too")
    parser.add_argument("--rows", type=Path, help="JSONL file: what is in it is not measured again, what is new added")
    parser.add_argument("--plot", type=Path, help="PNG file")
    arguments = parser.parse_args(argv)
    _require_known(arguments, parser)
    return arguments


def _require_known(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    everyone = argparse.Namespace(crossed=arguments.crossed, contestants=[EVERYONE])
    known = dict.fromkeys(name for t in arguments.temperatures for name in contestants_at(t, everyone))
    for wanted in arguments.contestants:
        if not any(wanted in name for name in known):
            parser.error(
                f"--contestants: must be part of a name at these temperatures ({'; '.join(known)}), got {wanted!r}"
            )


if __name__ == "__main__":
    main()
