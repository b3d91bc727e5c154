"""Regret of trees that size themselves against the best fixed size in hindsight.

python -m loadtest.regret --simulated
"""

from __future__ import annotations

import argparse
import json

from loadtest.regret import simulated


def main() -> None:
    """Prints progress, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=8, help="texts of each regime, half to choose on, half to score on"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--regime", action="append", default=[], help="only this one; may be repeated")
    arguments = parser.parse_args()
    figures = {"simulated": simulated.run(simulated.Scale(arguments.repeats, arguments.tokens), arguments.regime)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
