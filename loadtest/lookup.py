"""What guesses from a session's own text are worth: tokens per round of lookup alone, a draft alone, and both merged.

    python -m loadtest.lookup --num 4 --max-tokens 64

Draft and target run in this process, on the unexpanded demonstration model and its substitute. The target writes each
text once; because no tree changes the text (DESIGN.md, rule 2), every way of guessing is then held against that text,
round by round as a session would. Tokens per round do not depend on the machine. Besides bough's own prompts there are
some that ask for copying. "lookup 16" is 16 nodes looked up, "both 16" the same merged into the draft's tree, "both 0"
the draft alone, "lookup 0" plain decoding. Greedy unless --temperature says otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.protocol.messages import Context, GrowCall, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.merge import merged
from bough.trees.suffix_automaton import GuessKind, Limits
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, TreePlan
from draft_worker.worker import DraftWorker
from loadtest.prompts import load_prompts
from orchestrator.rounds.prompt_lookup import Acceptance, Lookup, assumed_probability
from target_worker.worker import TargetWorker

Grow = Callable[[list[int]], Tree]  # from the tokens of a session

COPYING = (
    "Repeat this list three times, word for word: apples, pears, 12 eggs, oat milk, rye bread, olive oil, salt.",
    "Correct the spelling, change nothing else: The lighthous keeper climed the stairs every evening, lit the lamp, "
    "wrote the hour into his book, and climed down again, for thirty years, without a single holiday.",
    "Rename the variable x to total and give me the whole function:\n\ndef mean(values):\n    x = 0.0\n"
    "    for value in values:\n        x += value\n    if not values:\n        return x\n    return x / len(values)\n",
    "Quote every sentence that speaks of water: The river rises in the hills above the town. In spring the river "
    "floods the lower meadows. The mayor has asked for a dam. In summer the meadows are dry.",
)


class Text(NamedTuple):
    """A prompt, and what the target said to it."""

    prompt: list[int]
    tokens: list[int]  # of the prompt and the output


class Tally(NamedTuple):
    """Sums over rounds."""

    tokens: int = 0
    rounds: int = 0

    def add(self, other: Tally) -> Tally:
        """Field by field."""
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def tokens_per_round(self) -> float:
        return round(self.tokens / self.rounds, 3)


class Recorded(Acceptance):
    """Keeps what every kind of guess was estimated at, and what came of it."""

    def __init__(self) -> None:
        super().__init__(assumed_probability)
        self.outcomes: dict[GuessKind, list[bool]] = defaultdict(list)

    def observe(self, kind: GuessKind, was_right: bool) -> None:
        """A guess whose parent was accepted has been verified."""
        super().observe(kind, was_right)
        self.outcomes[kind].append(was_right)

    def rates(self) -> list[dict[str, str | int]]:
        """Trials and hits, by that of which `assumed_probability` is made."""
        groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
        for kind, outcomes in self.outcomes.items():
            groups[kind.draft.name.lower(), min(kind.match_length.bit_length() - 1, 4), min(kind.rank, 1)] += outcomes
        return [
            {"draft": draft, "match_length": 2**length, "rank": rank, "tried": len(group), "right": sum(group)}
            for (draft, length, rank), group in sorted(groups.items())
        ]


class Bench:
    """Both models, in this process."""

    def __init__(self, params: SamplingParams, size: BestFirst, max_tokens: int) -> None:
        ensure_demonstration(0)
        folder = str(demonstration_folder(0))
        self.target = TargetWorker(
            parse(TargetConfig, "bench", ["--model", folder, "--max-context", "1024"], {}), "bench"
        )
        flags = ["--model", folder, "--drop-layers", SUBSTITUTE_DROPS]
        self.draft = DraftWorker(parse(DraftConfig, "bench", flags, {}), "bench")
        self.params, self.size, self.max_tokens = params, size, max_tokens

    def write(self, prompt: list[int], grow: Grow) -> Text:
        """The target's text of `max_tokens` tokens."""
        tokens, num_rounds, held = list(prompt), 0, 0
        while len(tokens) - len(prompt) < self.max_tokens:
            tree = grow(tokens)
            context = Context.of("bench", tokens, held, len(prompt))
            result = self.target.verify(VerifyCall(context, 1, num_rounds, tree, self.params)).result()
            tokens, num_rounds, held = [*tokens, *result.verdict.tokens_of(tree)], num_rounds + 1, result.held_length
        self.target.release("bench").result()
        return Text(prompt, tokens[: len(prompt) + self.max_tokens])

    @contextmanager
    def drafter(self, prompt_length: int) -> Iterator[Grow]:
        """Grows the draft's trees for one session; where it has grown one before, that one is given again."""
        trees: dict[int, Tree] = {}
        held = 0

        def grow(tokens: list[int]) -> Tree:
            nonlocal held
            if len(tokens) not in trees:
                context = Context.of("bench", tokens, held, prompt_length)
                call = GrowCall(context, tokens[-1], self.params, len(trees), TreePlan(self.size))
                grown = self.draft.grow(call).result()
                trees[len(tokens)], held = grown.tree, grown.held_length
            return trees[len(tokens)]

        yield grow
        self.draft.release("bench").result()

    def replay(self, text: Text, shared: Acceptance, max_nodes: int, grow: Grow) -> Tally:
        """Holds guesses against a text: lookup of so many nodes, merged into what `grow` gives."""
        lookup, tally, length = Lookup(shared), Tally(), len(text.prompt)
        while length < len(text.tokens):
            tokens, rest = text.tokens[:length], text.tokens[length:]
            drafted = grow(tokens)
            guesses = lookup.grow(tokens, drafted, Limits(max_nodes, len(rest)))
            tree = merged(drafted, guesses.tree, self.size.budget)
            chosen = rest[: len(tree.along(rest)) + 1]
            lookup.observe(guesses, chosen)
            tally, length = tally.add(Tally(len(chosen), 1)), length + len(chosen)
        return tally

    def close(self) -> None:
        """Ends both workers."""
        self.draft.close()
        self.target.close()


def nothing(tokens: list[int]) -> Tree:
    """What no draft grows."""
    return Tree.root(tokens[-1])


def compare(bench: Bench, prompts: Iterable[list[int]], sizes: list[int]) -> tuple[dict[str, Tally], Recorded]:
    """Tokens and rounds by way of guessing, summed over prompts; and what became of guesses of the largest size."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    shared = {(way, size): Recorded() for way in ("lookup", "both") for size in (0, *sizes)}
    for prompt in prompts:
        with bench.drafter(len(prompt)) as grow:
            text = bench.write(prompt, grow)
            for (way, size), recorded in shared.items():
                tally = bench.replay(text, recorded, size, nothing if way == "lookup" else grow)
                tallies[f"{way} {size}"] = tallies[f"{way} {size}"].add(tally)
    recorded = Recorded()
    for way in ("lookup", "both"):
        for kind, outcomes in shared[way, max(sizes)].outcomes.items():
            recorded.outcomes[kind] += outcomes
    return dict(tallies), recorded


def main() -> None:
    """Prints a table and one JSON line."""
    arguments = _arguments()
    defaults = parse(OrchestratorConfig, "bench", [], {})
    params = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    bench = Bench(params, BestFirst(defaults.budget, defaults.width, defaults.depth), arguments.max_tokens)
    tokenizer = Tokenizer(bench.target.tokenizer)
    report: dict[str, object] = {}
    for name, texts in (("ordinary", load_prompts()[: arguments.num]), ("copying", COPYING)):
        prompts = [tokenizer.encode_chat([("user", text)]) for text in texts]
        tallies, recorded = compare(bench, prompts, arguments.sizes)
        for way, tally in tallies.items():
            print(f"{name:>10} {way:>10} {tally.tokens_per_round:7} tokens/round", flush=True)
        report[name] = {way: tally.tokens_per_round for way, tally in tallies.items()}
        report[f"{name}_rates"] = recorded.rates()
    bench.close()
    settings = {"temperature": arguments.temperature, "seed": arguments.seed, "max_tokens": arguments.max_tokens}
    print(json.dumps({**settings, "prompts": arguments.num, "copying_prompts": len(COPYING), **report}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 63], help="most nodes that are looked up")
    parser.add_argument("--num", type=int, default=8, help="ordinary prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
