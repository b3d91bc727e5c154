"""Measures the regret of self-sized trees against the best fixed size in hindsight.

    python -m loadtest.regret
    python -m loadtest.regret --only simulated --regime resident
    python -m loadtest.regret --only real --prompts 4 --tokens 32

Simulated: real sizer, growers, batching and estimators in simulated time (`loadtest.regret.regimes`), the same figures
every time. Real: the demonstration pair on this machine (`loadtest.regret.real`), which should have nothing else to do.
Conversations: seconds to the first token with and without a session name, of processes with simulated workers
(`loadtest.regret.conversations`).
Ends with one JSON line. Ratios are seconds for equal tokens of the best fixed size (a grid of size and depth, and off),
chosen on half of the repeats and scored on the other half, over seconds self-sized: above 1 self-sized is faster.

off_penalty         of regimes where plain decoding was best: 1 - its seconds / seconds self-sized, the worst
token_error         of tokens expected of rounds that read no prompt: over all rounds expected / real - 1
round_time_error    of their seconds, likewise; both are of `--more-repeats` or `--more-prompts` texts more than the
                    ratios are, as what 60 rounds come to is a matter of luck: 7 % where a round has 10 tokens
plan_seconds        of a processor that the sizer itself takes for a simulated round

Errors are by regime inside `simulated` and inside the `details` of `real`; beside them, the one farthest from 0.
"""

from __future__ import annotations

import json

from bough.config.flag_parser import FlagParser, checked
from bough.config.parsers import number
from loadtest.regret import conversations, real, simulated
from loadtest.regret.regimes import regimes
from loadtest.regret.scoring import overall


def main() -> None:
    """Print progress, and one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--only", choices=("simulated", "real", "conversations"), help="one of the three")
    two_or_more = checked(number(int, 2))  # the best size is chosen on one half and scored on the other
    known = [*(each.name for each in regimes()), *(each.name for each in real.REGIMES), conversations.NAME]
    only_this = "only this one; may be repeated"
    parser.add_argument("--regime", action="append", default=[], choices=known, metavar="NAME", help=only_this)
    parser.add_argument("--repeats", type=two_or_more, default=8, help="simulated: texts of each regime")
    parser.add_argument("--more-repeats", type=int, default=24, help="of the sizer alone, to judge its predictions by")
    parser.add_argument("--simulated-tokens", type=int, default=128, help="of each of them")
    parser.add_argument(
        "--prompts",
        type=two_or_more,
        default=4,
        help="real: texts of each regime, or groups of as many as it has sessions",
    )
    parser.add_argument("--tokens", type=int, default=32, help="of each of them")
    parser.add_argument("--plain-tokens", type=int, default=12, help="of which plain decoding makes so many")
    parser.add_argument(
        "--more-prompts", type=int, default=9, help="real: likewise, of the sizer alone, if there are so many"
    )
    parser.add_argument("--seed", type=int, default=0, help="real: the first prompt of those that are taken")
    arguments = parser.parse_args()
    figures = {}
    if arguments.only in (None, "conversations") and (found := conversations.run(names=arguments.regime)):
        figures["conversations"] = found
    if arguments.only in (None, "simulated"):
        scale = simulated.Scale(arguments.repeats, arguments.simulated_tokens, arguments.more_repeats)
        figures["simulated"] = simulated.run(scale, arguments.regime)
    if arguments.only in (None, "real"):
        asked = real.Scale(
            arguments.prompts, arguments.tokens, arguments.plain_tokens, arguments.more_prompts, arguments.seed
        )
        figures["real"] = real.run(asked, arguments.regime)
    print(json.dumps({**figures, **overall(figures), "settings": vars(arguments)}))


if __name__ == "__main__":
    main()
