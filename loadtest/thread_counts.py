"""Which threads should read and which compute: a sweep's time by the number of each.

    python -m loadtest.thread_counts

Workers of the demonstration target, from disk, one for each pair of counts; all take turns. Ends with one JSON line:
seconds of a sweep (median over turns) by threads that compute (--threads), threads that read (--link-threads) and
tokens, and the defaults' over the best pair's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from contextlib import ExitStack
from statistics import median

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.processes import TargetConfig, parse
from loadtest.draft_step import processor
from loadtest.sweep import SMALL, Contestant


def main() -> None:
    """Prints a line for each pair, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--link-threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    ensure_demonstration()
    model = str(demonstration_folder())
    usual = parse(TargetConfig, "bench", ["--model", model], {})
    pairs = sorted({(usual.threads, usual.link_threads), *itertools.product(arguments.threads, arguments.link_threads)})
    seconds: dict[tuple[int, int], dict[int, list[float]]] = {
        pair: {tokens: [] for tokens in arguments.tokens} for pair in pairs
    }
    with ExitStack() as stack:
        engines = {}
        for threads, link_threads in pairs:
            counts = ["--threads", str(threads), "--link-threads", str(link_threads)]
            flags = ["bough", "--model", model, "--resident-layers", "0", "--ring-memory", "256MB", *SMALL, *counts]
            engines[threads, link_threads] = stack.enter_context(Contestant(*flags, prefix=[]))
        for _, tokens in itertools.product(range(arguments.turns), arguments.tokens):
            for pair, engine in engines.items():
                seconds[pair][tokens].append(engine.seconds(tokens, 1))
    medians = {pair: {tokens: median(some) for tokens, some in of.items()} for pair, of in seconds.items()}
    rows = []
    for (threads, link_threads), of_pair in medians.items():
        times = {str(tokens): round(some, 3) for tokens, some in of_pair.items()}
        rows.append({"threads": threads, "link_threads": link_threads, "seconds": times})
        print(rows[-1], flush=True)
    own = medians[usual.threads, usual.link_threads]
    over_best = {tokens: round(own[tokens] / min(of[tokens] for of in medians.values()), 3) for tokens in own}
    print(json.dumps({"processor": processor(), "cores": cores, "counts": rows, "defaults_over_best": over_best}))


if __name__ == "__main__":
    main()
