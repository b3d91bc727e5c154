"""The whole method of bough in plain torch: one process, one text, two resident models.

A small draft model grows a tree of guesses for the next tokens. One pass of the target model computes its logits after
every node of the tree. The target's own choices are followed down the tree for as long as the tree contains them; the
first choice that it does not contain is a correct token too. So each pass yields at least one token, and the text is
the one that the target alone would have written.

    python -m bough.reference "The sky is blue because"

docs/how-it-works.md explains the product as what it adds to this file. The tests compare the two. Read it in order: a
model that reads trees, the choice of a token, growing, verifying, the loop. Sequoia's scheme follows, and last the
command. The papers are Sequoia (arXiv 2402.12374) and SpecExec (arXiv 2406.02532).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.config.flag_parser import FlagParser
from bough.model.write_demonstration import write_demonstration

MAX_NODES = 256  # of a tree
TINY = torch.finfo(torch.float32).tiny

# A model that reads trees


@dataclass(frozen=True)
class Llama:
    """A Llama checkpoint in float32, with some of its layers or all of them."""

    weights: dict[str, Tensor]
    layers: Sequence[int]  # those that are computed; a draft leaves some out
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    epsilon: float

    @classmethod
    def load(cls, folder: Path) -> Llama:
        """Read a folder with config.json and safetensors files."""
        config = json.loads((folder / "config.json").read_text())
        weights = {name: w.float() for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        theta = config["rope_parameters"]["rope_theta"]
        return cls(weights, range(config["num_hidden_layers"]), heads, kv_heads, theta, config["rms_norm_eps"])

    @property
    def head_dim(self) -> int:
        return self.weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // self.num_heads

    def forward(self, tokens: Tensor, positions: Tensor, sees: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Logits (num_tokens, vocab_size) after each of some new tokens.

        `tokens` and `positions` are (num_tokens,). `sees` (num_tokens, num_rows) says which rows of the KV each token
        attends to. `keys` and `values` are (num_layers, num_rows, num_kv_heads, head_dim); their last rows are the new
        tokens' own and are written.
        """
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        frequencies = self.rope_theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None, None] * frequencies  # (num_tokens, 1, head_dim / 2)
        for index, layer in enumerate(self.layers):
            name = f"model.layers.{layer}"
            rows = self._normed(f"{name}.input_layernorm", hidden)
            keys[index, -len(tokens) :] = rotated(self._heads(f"{name}.self_attn.k_proj", rows), angles)
            values[index, -len(tokens) :] = self._heads(f"{name}.self_attn.v_proj", rows)
            attended = scaled_dot_product_attention(
                rotated(self._heads(f"{name}.self_attn.q_proj", rows), angles).transpose(0, 1),
                keys[index].transpose(0, 1),
                values[index].transpose(0, 1),
                attn_mask=sees,
                enable_gqa=True,
            )  # (num_heads, num_tokens, head_dim)
            hidden = hidden + self._linear(f"{name}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))
            rows = self._normed(f"{name}.post_attention_layernorm", hidden)
            gate, up = self._linear(f"{name}.mlp.gate_proj", rows), self._linear(f"{name}.mlp.up_proj", rows)
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", silu(gate) * up)
        return self._linear("lm_head", self._normed("model.norm", hidden))

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return linear(rows, self.weights[f"{name}.weight"])

    def _heads(self, name: str, rows: Tensor) -> Tensor:
        return self._linear(name, rows).view(len(rows), -1, self.head_dim)

    def _normed(self, name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[1:], self.weights[f"{name}.weight"], self.epsilon)


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding of (num_tokens, num_heads, head_dim)."""
    one, two = heads.chunk(2, dim=-1)
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), dim=-1)


class KV:
    """A model's keys and values: one row for each token of the text that it has read, then one for each node of a tree.

    A node of a tree sees the whole text, its own ancestors and itself, so all paths of the tree share one pass.
    """

    def __init__(self, model: Llama, capacity: int) -> None:
        self._model = model
        self._keys = torch.zeros(len(model.layers), capacity, model.num_kv_heads, model.head_dim)
        self._values = torch.zeros_like(self._keys)
        # (node, node): whether the first attends to the second.
        self._sees = torch.zeros(capacity, capacity, dtype=torch.bool)
        self.length = 0  # tokens of the text
        self._num_nodes = 0

    def read(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (num_new, vocab_size) after each new node; `parents` are nodes, or -1 for the end of the text."""
        new = slice(self._num_nodes, self._num_nodes + len(tokens))
        for node, parent in enumerate(parents, new.start):
            self._sees[node] = self._sees[parent] if parent >= 0 else False
            self._sees[node, node] = True
        self._num_nodes, num_rows = new.stop, self.length + new.stop
        sees = torch.cat((torch.ones(len(tokens), self.length, dtype=torch.bool), self._sees[new, : new.stop]), dim=1)
        keys, values = self._keys[:, :num_rows], self._values[:, :num_rows]
        return self._model.forward(torch.tensor(tokens), sees.sum(1) - 1, sees, keys, values)

    def commit(self, path: Sequence[int]) -> None:
        """Add the nodes of a path from the text downwards to the text, and forget all other nodes."""
        rows = self.length + torch.tensor(path, dtype=torch.long)
        for numbers in (self._keys, self._values):
            numbers[:, self.length : self.length + len(path)] = numbers[:, rows]
        self.length, self._num_nodes = self.length + len(path), 0

    def read_text(self, tokens: Sequence[int]) -> Tensor:
        """Read and commit tokens that follow the text; logits (num_tokens, vocab_size) after each."""
        logits = self.read(tokens, range(-1, len(tokens) - 1))
        self.commit(range(len(tokens)))
        return logits


# The choice of a token


def perturbed(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Logits (vocab_size,) whose largest is the token at a position of the text; greedy at temperature 0.

    The argmax of logits plus Gumbel noise times the temperature is a sample of their softmax. The noise is a function
    of seed, position and token, so the token does not depend on any tree. The draft adds the same noise to its own
    logits: it guesses the sample, and not only the distribution.
    """
    if temperature == 0.0:
        return logits.double()
    raw = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(len(logits))
    uniform = torch.from_numpy(((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)  # in (0, 1)
    return logits.double() - temperature * torch.log(-torch.log(uniform))


# Growing a tree and verifying it


@dataclass
class Tree:
    """Guesses after a text, as flat lists in which parents stand before their children.

    Node 0 is the root: the last token of the text, which the target has not read yet.
    """

    tokens: list[int]
    parents: list[int]  # -1 for the root
    scores: list[float]  # the draft's log-probability of the path to each node
    probs: list[Tensor]  # in Sequoia's scheme: the distribution that each node's children were drawn from

    @classmethod
    def root(cls, token: int) -> Tree:
        return cls([token], [-1], [0.0], [])

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """Add a child; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        return len(self.tokens) - 1

    def children(self, node: int) -> dict[int, int]:
        """The children of a node, by their tokens."""
        return {self.tokens[child]: child for child, parent in enumerate(self.parents) if parent == node}

    def depth(self, node: int) -> int:
        return 0 if node == 0 else 1 + self.depth(self.parents[node])

    def best(self, budget: int) -> Tree:
        """The tree of the best nodes. A parent is never worse than its child, so all ancestors are among them."""
        nodes = sorted(sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[:budget])
        parents = [-1, *(nodes.index(self.parents[node]) for node in nodes[1:])]
        return Tree([self.tokens[node] for node in nodes], parents, [self.scores[node] for node in nodes], [])


def grow(
    draft: KV, text: Sequence[int], temperature: float, seed: int, budget: int, width: int = 8, max_depth: int = 8
) -> Tree:
    """Grow the tree of the `budget` likeliest nodes, best first (SpecExec, algorithm 2).

    Each pass of the draft expands the `width` best nodes. With a budget of 1 the tree is the root: plain decoding.
    """
    tree, open_nodes, rows = Tree.root(text[-1]), {0}, {0: -1}  # rows: nodes that the draft has read, by number
    logits, frontier = draft.read_text(text[draft.length :])[-1:], [0]
    for step in range(max_depth):
        for node, row in zip(frontier, logits, strict=True):
            open_nodes.remove(node)
            scores = perturbed(row, temperature, seed, len(text) + tree.depth(node)).log_softmax(0)
            for token in scores.topk(budget).indices.tolist():
                open_nodes.add(tree.add(node, token, tree.scores[node] + float(scores[token])))
        worst = sorted(tree.scores, reverse=True)[:budget][-1]  # no child of this or a worse node would stay
        promising = sorted((node for node in open_nodes if tree.scores[node] > worst), key=lambda n: -tree.scores[n])
        frontier = sorted(promising[:width])
        if not frontier or step == max_depth - 1:
            break
        logits = draft.read([tree.tokens[node] for node in frontier], [rows[tree.parents[node]] for node in frontier])
        rows |= {node: row for row, node in enumerate(frontier, len(rows) - 1)}
    draft.commit([])
    return tree.best(budget)


def verify(tree: Tree, logits: Tensor, position: int, temperature: float, seed: int) -> tuple[list[int], int]:
    """Follow the target's choices down the tree: the accepted path, root included, and the bonus token after it.

    `logits` (num_nodes, vocab_size) are the target's after each node; `position` is the root's in the text.
    """
    path = [0]
    while True:
        token = int(perturbed(logits[path[-1]], temperature, seed, position + len(path)).argmax())
        if token not in tree.children(path[-1]):
            return path, token
        path.append(tree.children(path[-1])[token])


# The loop


class Round(NamedTuple):
    """One pass of the target."""

    tree: Tree
    path: list[int]  # accepted nodes, root included
    tokens: list[int]  # what the text gains: the path's tokens below the root, then the bonus token


@torch.inference_mode()
def generate(
    target: Llama,
    draft: Llama,
    prompt: Sequence[int],
    max_tokens: int,
    grow_tree: Callable[[KV, Sequence[int]], Tree],
    verify_tree: Callable[[Tree, Tensor, int], tuple[list[int], int]],
    stop: int | None = None,
) -> Iterator[Round]:
    """Continue a prompt by `max_tokens` tokens or to the token `stop`."""
    capacity = len(prompt) + max_tokens + MAX_NODES
    text, target_kv, draft_kv = list(prompt), KV(target, capacity), KV(draft, capacity)
    if len(prompt) > 1:
        target_kv.read_text(prompt[:-1])
    while (num_left := len(prompt) + max_tokens - len(text)) > 0 and stop not in text[len(prompt) :]:
        tree = grow_tree(draft_kv, text)
        logits = target_kv.read(tree.tokens, tree.parents)
        path, bonus = verify_tree(tree, logits, target_kv.length)
        target_kv.commit(path)
        new = [*(tree.tokens[node] for node in path[1:]), bonus][:num_left]
        new = new[: new.index(stop) + 1] if stop in new else new
        text += new
        yield Round(tree, path, new)


# Sequoia's scheme: trees of the best fixed shape, sampled from the draft's distribution


def best_shape(acceptance: Sequence[float], budget: int) -> list[int]:
    """Parents (budget,) of the tree whose accepted nodes are most in expectation (Sequoia, section 3.1).

    `acceptance` is the chance that the first, second, ... child is accepted. A dynamic programme divides the nodes
    below a parent between its next child's subtree and all later children.
    """

    @cache
    def split(num_nodes: int, rank: int) -> tuple[float, int]:
        """Accepted nodes expected among so many, and how many of them form the subtree of the child of this rank."""
        if num_nodes == 0 or rank == len(acceptance):
            return 0.0, 0
        return max(
            (acceptance[rank] * (1 + split(size - 1, 0)[0]) + split(num_nodes - size, rank + 1)[0], size)
            for size in range(1, num_nodes + 1)
        )

    parents, num_below = [-1], [budget - 1]
    for parent in range(budget):  # breadth first: nodes are numbered level by level
        num_left = num_below[parent] if parent < len(parents) else 0
        for rank in range(len(acceptance) if num_left else 0):
            if size := split(num_left, rank)[1]:
                parents.append(parent)
                num_below.append(size - 1)
                num_left -= size
    return parents


def grow_sample(
    draft: KV, text: Sequence[int], shape: Sequence[int], temperature: float, random: torch.Generator
) -> Tree:
    """Fill a shape level by level. The children of a node are drawn without replacement."""
    tree, level = Tree.root(text[-1]), range(1)
    logits = draft.read_text(text[draft.length :])[-1:]
    while level:
        for node, row in zip(level, logits, strict=True):
            tree.probs.append((row / temperature).softmax(0))
            if num_children := shape.count(node):
                for token in tree.probs[node].multinomial(num_children, generator=random).tolist():
                    tree.add(node, token)
        level = range(level.stop, len(tree.tokens))
        if level:
            logits = draft.read(tree.tokens[level.start :], [parent - 1 for parent in tree.parents[level.start :]])
    draft.commit([])
    return tree


def verify_sample(
    tree: Tree, logits: Tensor, _position: int, temperature: float, random: torch.Generator
) -> tuple[list[int], int]:
    """Accept or reject the children of each node on the path (Sequoia, algorithm 2); arguments as of `verify`."""
    path = [0]
    while True:
        target_probs, draft_probs = (logits[path[-1]] / temperature).softmax(0), tree.probs[path[-1]]
        child, left = accept(tree.children(path[-1]), target_probs, draft_probs, random)
        if child is None:
            return path, int(left.multinomial(1, generator=random))
        path.append(child)


def accept(
    children: dict[int, int], target_probs: Tensor, draft_probs: Tensor, random: torch.Generator
) -> tuple[int | None, Tensor]:
    """The accepted child, or None; and the distribution (vocab_size,) that the next token is drawn from if it is None.

    The draft's rejected tokens are taken out of both distributions, so that the token has the target's distribution.
    """
    for token, child in children.items():  # in the order in which they were drawn
        if draft_probs[token] == 0:  # only rounding draws it: all that the draft could draw has been rejected
            break
        if torch.rand((), generator=random) < target_probs[token] / draft_probs[token]:
            return child, target_probs
        target_probs = (target_probs - draft_probs).clamp(min=0)
        target_probs = target_probs / target_probs.sum()
        draft_probs = draft_probs.index_fill(0, torch.tensor(token), 0.0)
        draft_probs = draft_probs / draft_probs.sum().clamp(min=TINY)
    return None, target_probs


# The command

# By rank; fitted to Sequoia's cumulated figures in docs/decisions/004-target-scheme-by-default.md.
ACCEPTANCE = (0.660, 0.088, 0.033, 0.033, 0.0095, 0.0095, 0.0095, 0.0095)


def drawing(tree: Tree, path: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Lines that show a tree; accepted nodes have a check mark."""

    def below(node: int, indent: str) -> Iterator[str]:
        children = [*tree.children(node).values()]
        for child in children:
            is_last = child == children[-1]
            yield f"{indent}{'└─' if is_last else '├─'}{decode([tree.tokens[child]])!r}{' ✓' * (child in path)}"
            yield from below(child, indent + ("  " if is_last else "│ "))

    yield repr(decode([tree.tokens[0]]))
    yield from below(0, "")


def main(line: Sequence[str] | None = None) -> None:
    """Continue a prompt with the demonstration's small model, and print the trees."""
    parser = FlagParser("bough.reference", description=main.__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=16, help="of a tree, the root included; 1 decodes plainly")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequoia", action="store_true", help="Sequoia's scheme; the temperature must be above 0")
    options = parser.parse_args(line)
    if options.max_tokens < 1 or not 0 <= options.seed < 2**64:
        parser.error("--max-tokens: must be at least 1, and --seed from 0 to 2**64 - 1")
    if not 1 <= options.nodes <= MAX_NODES:
        parser.error(f"--nodes: must be 1 to {MAX_NODES}, got {options.nodes}")
    if options.temperature < 0 or (options.sequoia and options.temperature == 0):
        parser.error(f"--temperature: must be at least 0, or above 0 with --sequoia, got {options.temperature}")
    folder = demonstration_folder(copies=0)
    write_demonstration(folder, copies=0)  # unless it is there
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(options.prompt).ids
    if not prompt:
        parser.error("prompt: must have at least one token")
    target = Llama.load(folder)
    left_out = {int(layer) for layer in SUBSTITUTE_DROPS.split(",")}
    draft = replace(target, layers=[layer for layer in target.layers if layer not in left_out])
    temperature, seed = options.temperature, options.seed
    grow_tree = partial(grow, temperature=temperature, seed=seed, budget=options.nodes)
    verify_tree = partial(verify, temperature=temperature, seed=seed)
    if options.sequoia:
        random, shape = torch.Generator().manual_seed(seed), best_shape(ACCEPTANCE, options.nodes)
        grow_tree = partial(grow_sample, shape=shape, temperature=temperature, random=random)
        verify_tree = partial(verify_sample, temperature=temperature, random=random)
    tokens: list[int] = []
    rounds = generate(
        target, draft, prompt, options.max_tokens, grow_tree, verify_tree, tokenizer.token_to_id("<|im_end|>")
    )
    for number, (tree, path, new) in enumerate(rounds, 1):
        print(f"pass {number}: {len(tree.tokens)} nodes, {len(new)} tokens")
        print(*drawing(tree, path, tokenizer.decode), "", sep="\n")
        tokens += new
    print(options.prompt + tokenizer.decode(tokens))
    print(f"{len(tokens)} tokens in {number} passes of the target")


if __name__ == "__main__":
    main()
