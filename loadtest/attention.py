"""What attention costs whose bits depend on a row's own path alone, beside a library's over the same slot.

    python -m loadtest.attention

A random tree after a context, in one slot: the target's own kernel, which walks each row's path, against torch's
`scaled_dot_product_attention` under the tree's mask, by turns on the same threads. The best of each in several turns;
ends with one JSON line, whose `ratio` is own / torch's. Heads are as many as an 8B's, 32 of 128 with keys and values
for 8 of them, unless --heads says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from torch.nn.functional import scaled_dot_product_attention

from bough.model.batch.batch import Batch, Segment
from bough.model.cpu.attention_cpu import attend_in_slots
from bough.model.cpu.threads import compute_with
from bough.model.kv.session_kv import KVShape, KVSlot
from loadtest.draft_step import CPU, frontier, processor, timed


def best_seconds(num_nodes: int, context: int, heads: tuple[int, int, int], turns: int) -> dict[str, float]:
    """Of one layer's attention in bfloat16, keys and values of the tree's nodes put into the slot included."""
    num_heads, num_kv_heads, head_dim = heads
    tree = frontier(num_nodes, seed=num_nodes)
    slot = KVSlot(KVShape(1, num_kv_heads, head_dim, torch.bfloat16), context + num_nodes, CPU)
    slot.keys.normal_()
    slot.values.normal_()
    (chunk,) = Batch([Segment.tree(slot, context, tree)], None, CPU).chunks
    queries = torch.randn(num_nodes, num_heads, head_dim, dtype=torch.bfloat16)
    keys, values = torch.randn(2, num_nodes, num_kv_heads, head_dim, dtype=torch.bfloat16)
    mask = torch.ones(num_nodes, context + num_nodes, dtype=torch.bool)
    mask[:, context:] = torch.from_numpy(tree.ancestor_mask())

    def own() -> torch.Tensor:
        return attend_in_slots(chunk, 0, queries, keys, values, head_dim**-0.5, 0, 0.0, None)

    def library() -> torch.Tensor:
        slot.keys[0, context:], slot.values[0, context:] = keys, values
        query, key, value = (numbers.transpose(0, 1)[None] for numbers in (queries, slot.keys[0], slot.values[0]))
        every = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return every[0].transpose(0, 1)

    torch.testing.assert_close(own(), library(), atol=2e-2, rtol=2e-2)
    pairs = [(timed(own), timed(library)) for _ in range(turns)]
    return {"own": min(own for own, _ in pairs), "torch": min(library for _, library in pairs)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], help="of queries, of keys, and their size")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    compute_with(arguments.threads)
    results = []
    for context in arguments.contexts:
        for num_nodes in arguments.nodes:
            seconds = best_seconds(num_nodes, context, tuple(arguments.heads), arguments.turns)
            row = {"context": context, "nodes": num_nodes}
            row |= {f"{name}_ms": round(1e3 * each, 3) for name, each in seconds.items()}
            results.append({**row, "ratio": round(seconds["own"] / seconds["torch"], 2)})
            print(results[-1], flush=True)
    settings = {"heads": arguments.heads, "threads": arguments.threads, "processor": processor()}
    print(json.dumps({**settings, "attention": results}))


if __name__ == "__main__":
    main()
