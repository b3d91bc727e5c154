"""Measures the regret of self-sized trees against the best fixed size in hindsight.

    python -m loadtest.regret
    python -m loadtest.regret --only simulated --regime resident
    python -m loadtest.regret --only real --prompts 4 --tokens 32

Simulated: real sizer, growers, batching and estimators in simulated time (`loadtest.regret.regimes`), the same figures
every time. Real: the demonstration pair on this machine (`loadtest.regret.real`), which should be otherwise idle.
Conversations: seconds to the first token with and without a session name, with simulated workers as processes
(`loadtest.regret.conversations`).
Ends with one JSON line. Ratios divide the seconds of the best fixed size by those of self-sized trees for equal tokens:
above 1 self-sized trees are faster. The best size, plain decoding included, is chosen on half of the repeats.

off_penalty         if plain decoding is best: 1 - its seconds / self-sized seconds, in the worst such regime
token_error         expected / real tokens - 1, over all rounds that read no prompt
round_time_error    the same for seconds. Both use `--more-repeats` or `--more-prompts` further texts, because chance
                    alone makes 7 % over 60 rounds of 10 tokens
plan_seconds        processor seconds that the sizer takes for a simulated round

Errors are listed by regime in `simulated` and in the `details` of `real`; the top level has the one farthest from 0.
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
    parser.add_argument("--only", choices=("simulated", "real", "conversations"), help="run only this kind")
    two_or_more = checked(number(int, 2))  # the best size is chosen on one half and scored on the other
    known = [*(each.name for each in regimes()), *(each.name for each in real.REGIMES), conversations.NAME]
    only_this = "only this one; may be repeated"
    parser.add_argument("--regime", action="append", default=[], choices=known, metavar="NAME", help=only_this)
    parser.add_argument("--repeats", type=two_or_more, default=8, help="simulated: texts of each regime")
    parser.add_argument("--more-repeats", type=int, default=24, help="simulated: more texts, for prediction errors")
    parser.add_argument("--simulated-tokens", type=int, default=128, help="tokens of each text")
    parser.add_argument(
        "--prompts",
        type=two_or_more,
        default=4,
        help="real: texts of each regime, or groups of one text per session",
    )
    parser.add_argument("--tokens", type=int, default=32, help="real: tokens of each text")
    parser.add_argument("--plain-tokens", type=int, default=12, help="real: tokens of each text by plain decoding")
    parser.add_argument(
        "--more-prompts", type=int, default=9, help="real: further prompts of the sizer alone, if there are enough"
    )
    parser.add_argument("--seed", type=int, default=0, help="real: number of the first prompt")
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
