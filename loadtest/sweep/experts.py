"""Compares reading only the experts that a sweep's rows choose with reading whole layers ahead.

    python -m loadtest.sweep.experts --device-memory 1GB

A random mixture of experts (Qwen3's build, saved to a temporary folder) whose layers do not fit in the memory given.
Two targets take turns on the same trees: one reads what is chosen, the other all (`--experts`). Every tree is of random
tokens in a session of its own, so that no two sweeps have a text in common: real ones choose less differently, and find
more in memory. Sizes come one after another, each after a few turns that are not counted. Ends with one JSON line:
medians of seconds and of bytes read, by tokens of a sweep, `ratio` of the seconds, and whether all answers were equal.
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bough.config.flag_parser import FlagParser
from bough.config.processes import TargetConfig, parse
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_tokenizer, save_weights
from target_worker.worker import TargetWorker

MODES = "chosen", "all"
IN_A_ROW = 3
NUM_TOKENS = 256  # the tokenizer's byte tokens


class Swept(NamedTuple):
    """One sweep."""

    seconds: float
    link_bytes: int
    bonus_token: int


def save_mixture(folder: Path, layers: int, experts: int, chosen: int, seed: int) -> None:
    """Write a mixture of experts with random bfloat16 weights; an expert has 3 MB."""
    config = Qwen3MoeConfig(
        vocab_size=262,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,  # type: ignore[call-arg]  # it is among the fields, but transformers' types do not say so
        moe_intermediate_size=512,
        num_experts=experts,
        num_experts_per_tok=chosen,
        max_position_embeddings=1024,
        bos_token_id=260,
        eos_token_id=261,
        initializer_range=0.05,  # makes the router's choices uneven
    )
    torch.manual_seed(seed)
    save_weights(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)
    save_tokenizer(folder)


def random_tree(num_nodes: int, rng: np.random.Generator) -> Tree:
    """A tree of random tokens."""
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    return Tree.of(rng.integers(0, NUM_TOKENS, num_nodes).tolist(), parents, [0.0] * num_nodes)


def sweep(worker: TargetWorker, tree: Tree) -> Swept:
    """Verify a tree in a new session."""
    context = Context.of("bench", [int(tree.tokens[0])], held=0, prompt_length=1)
    call = VerifyCall(context, 0, 0, tree, SamplingParams(temperature=0.0), max_length=512)
    result = worker.verify(call).result()
    worker.release("bench").result()
    return Swept(result.timings.total_ns / 1e9, result.timings.link_bytes, result.verdict.bonus_token)


def measure(
    workers: dict[str, TargetWorker], num_tokens: int, warm_up: int, turns: int, seed: int
) -> dict[str, list[Swept]]:
    """Measure sweeps of one size in turns of IN_A_ROW; the first of a turn is not counted."""
    rng = np.random.default_rng([seed, num_tokens])
    swept: dict[str, list[Swept]] = {mode: [] for mode in workers}
    for turn in range(warm_up + turns):
        trees = [random_tree(num_tokens, rng) for _ in range(IN_A_ROW)]
        for mode, worker in workers.items():
            figures = [sweep(worker, tree) for tree in trees]
            if turn >= warm_up:
                swept[mode] += figures[1:]
    return swept


def row(swept: dict[str, list[Swept]]) -> dict[str, object]:
    """A row of the JSON line."""
    seconds = {mode: statistics.median(s.seconds for s in figures) for mode, figures in swept.items()}
    gigabytes = {mode: statistics.median(s.link_bytes for s in figures) / 1e9 for mode, figures in swept.items()}
    pairs = zip(*(swept[mode] for mode in MODES), strict=True)
    return {
        "seconds": {mode: round(value, 4) for mode, value in seconds.items()},
        "gigabytes": {mode: round(value, 4) for mode, value in gigabytes.items()},
        "ratio": round(seconds["all"] / seconds["chosen"], 3),
        "equal": all(chosen.bonus_token == whole.bonus_token for chosen, whole in pairs),
    }


def start(folder: Path, mode: str, device_memory: str) -> TargetWorker:
    """Start a target with this way of reading experts."""
    flags = f"--model {folder} --experts {mode} --device-memory {device_memory} --kv-memory 50MB --max-context 512"
    flags += " --max-nodes 256 --metrics-port -1 --device cpu"
    return TargetWorker(parse(TargetConfig, "bench", flags.split(), {}), f"bench-{mode}")


def run(
    folder: Path, device_memory: str, sizes: Sequence[int], warm_up: int, turns: int, seed: int
) -> dict[str, object]:
    """Measure all sizes, and print results on the way."""
    by_tokens: dict[str, object] = {}
    with (
        closing(start(folder, MODES[0], device_memory)) as chosen,
        closing(start(folder, MODES[1], device_memory)) as all_,
    ):
        workers = dict(zip(MODES, (chosen, all_), strict=True))
        for worker in workers.values():
            print("; ".join(worker.info().notes[:2]))
        print(f"{'tokens':>6} {'chosen':>18} {'all':>18} {'ratio':>6}")
        for num_tokens in sizes:
            made = row(measure(workers, num_tokens, warm_up, turns, seed))
            seconds, gigabytes = made["seconds"], made["gigabytes"]
            assert isinstance(seconds, dict)
            assert isinstance(gigabytes, dict)
            cells = (f"{seconds[mode]:7.3f} s {gigabytes[mode]:5.2f} GB" for mode in MODES)
            print(f"{num_tokens:>6} {' '.join(f'{cell:>18}' for cell in cells)} {made['ratio']:>6}", flush=True)
            by_tokens[str(num_tokens)] = made
    return by_tokens


def main() -> None:
    """Measure and print one JSON line."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--device-memory", default="1GB", help="of each target, KV and all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="of a sweep")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64, help="of a layer")
    parser.add_argument("--chosen", type=int, default=8, help="by each row")
    parser.add_argument("--warm-up", type=int, default=4, help="turns that do not count")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bough-experts-") as folder:
        save_mixture(Path(folder), arguments.layers, arguments.experts, arguments.chosen, arguments.seed)
        by_tokens = run(
            Path(folder), arguments.device_memory, arguments.tokens, arguments.warm_up, arguments.turns, arguments.seed
        )
    print(json.dumps({"by_tokens": by_tokens} | vars(arguments)))


if __name__ == "__main__":
    main()
