"""Measures the acceptance of each verification scheme with k children below one node, and upper bounds for any scheme.

    python -m loadtest.acceptance.schemes [--temperatures 0.6 1.0] [--model] [--drop-layers 3,14]

On synthetic pairs of distributions, and with --model on those of the demonstration model and its substitute. A draft
takes its children from its 64 likeliest tokens. The table gives the mean acceptance over positions; the JSON line the
same, and each scheme's difference from the default (shared noise) on the same positions with its 95 % half-width. The
bounds hold for every verification of such children by which the text keeps the target's law. "placed": k children on
average, more of them where the draft is in doubt, as best-first trees do it; all other lines give each node the same k.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from bough.cli.machine.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.config.parsers import parse_layers
from bough.protocol.sampling_params import SamplingParams
from loadtest.acceptance.pairs import SPREADS, Logits, Models, from_models, pair_of, synthetic
from loadtest.acceptance.rates import (
    Hits,
    Pair,
    best_then_sampled,
    bound_with_replacement,
    bound_without_replacement,
    by_distribution,
    by_sample,
    in_rounds,
    one_after_another,
    placed,
)

SIZES = [1, 2, 4, 8, 16]
DEFAULT = "target, shared noise"


def rates(pair: Pair, noise: Hits, rng: np.random.Generator) -> dict[str, list[float]]:
    """Acceptance by scheme, for each of SIZES."""
    return {
        DEFAULT: noise.of_each(SIZES),
        "target, top k": by_distribution(pair).of_each(SIZES),
        "without replacement": one_after_another(pair, SIZES, rng),
        "multi-round": [in_rounds(pair, k) for k in SIZES],
        "top k - 1 and one drawn": [best_then_sampled(pair, k) for k in SIZES],
        "bound, without replacement": [bound_without_replacement(pair, k) for k in SIZES],
        "bound, with replacement": [bound_with_replacement(pair, k) for k in SIZES],
    }


def measure(name: str, temperature: float, logits: Iterable[Logits], seed: int) -> dict[str, object]:
    """Print one block of the table; returns its figures for the JSON line."""
    params, rng = SamplingParams(temperature=temperature), np.random.default_rng(seed)
    pairs = [pair_of(both, params) for both in logits]
    noise = [by_sample(pair, temperature, rng) for pair in pairs]
    measured = [rates(pair, hits, rng) for pair, hits in zip(pairs, noise, strict=True)]
    print(f"\n{name}, temperature {temperature}, {len(pairs)} positions" + "".join(f"{k:>8}" for k in SIZES))
    row: dict[str, object] = {"pairs": name, "temperature": temperature, "positions": len(pairs)}
    for scheme in measured[0]:
        by_position = np.array([position[scheme] for position in measured])
        difference = by_position - np.array([position[DEFAULT] for position in measured])
        row[scheme] = {
            "acceptance": by_position.mean(0).round(4).tolist(),
            "difference": difference.mean(0).round(4).tolist(),
            "half_width": (1.96 * difference.std(0) / np.sqrt(len(pairs))).round(4).tolist(),
        }
        _print(scheme, by_position.mean(0).tolist())
    for scheme, all_hits in ((DEFAULT, noise), ("target, top k", [by_distribution(pair) for pair in pairs])):
        acceptance = placed(all_hits, SIZES)
        row[f"{scheme}, placed"] = {"acceptance": np.round(acceptance, 4).tolist()}
        _print(f"{scheme}, placed", acceptance)
    return row


def _print(scheme: str, acceptance: list[float]) -> None:
    print(f"  {scheme:<34}" + "".join(f"{mean:8.3f}" for mean in acceptance), flush=True)


def main() -> None:
    """Print a table and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--num", type=int, default=100, help="synthetic pairs of a kind")
    parser.add_argument("--model", action="store_true", help="also the demonstration model and its substitute")
    parser.add_argument("--drop-layers", default="3,14", help="of the substitute")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=32, help="positions of a prompt's answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = {name: list(synthetic(spread, arguments.num, arguments.seed)) for name, spread in SPREADS.items()}
    if arguments.model:
        ensure_demonstration(0)
        drops = parse_layers(arguments.drop_layers)
        name = f"SmolLM2 without layers {arguments.drop_layers}"
        models = Models.load(demonstration_folder(0), drops, arguments.prompts)
        kinds[name] = from_models(models, models.texts(arguments.length, SamplingParams(seed=arguments.seed)))
    rows = [measure(name, t, logits, arguments.seed) for name, logits in kinds.items() for t in arguments.temperatures]
    print(json.dumps({"sizes": SIZES, "seed": arguments.seed, "rows": rows}))


if __name__ == "__main__":
    main()
