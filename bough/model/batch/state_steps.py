"""The order in which a recurrent layer's states advance along the paths of a tree, with few states at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]
COMMITTED = 0  # place of the session's own state


class DeviceSteps(NamedTuple):
    """Steps and windows on a device."""

    rows: torch.Tensor
    table: torch.Tensor  # (num_steps, 5) int32: as `steps`, and whether the state is read, and written, in its place
    windows: torch.Tensor


@dataclass(frozen=True)
class StateSteps:
    """Steps of the recurrence over some of the rows kept, and what the convolution reads for each."""

    rows: torch.Tensor  # (num_rows,) these rows, ascending
    steps: Indices  # (num_rows, 3) number among these; place of the state before it; place of the state after it
    num_places: int
    windows: torch.Tensor  # (num_rows, width + 1) of the last `width` inputs before all rows kept, followed by theirs
    _on: dict[torch.device, DeviceSteps] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> DeviceSteps:
        """What a device needs to take the steps; sent there once for all layers."""
        if device not in self._on:
            parts = self.rows, torch.from_numpy(self._table()), self.windows
            self._on[device] = DeviceSteps(*(part.to(device) for part in parts))
        return self._on[device]

    def _table(self) -> NDArray[np.int32]:
        """Steps with their transfers: the current state is the one after the last step, unless a state is read."""
        _, before, after = self.steps.T
        follows = before[1:] == after[:-1]
        is_read = np.concatenate(([True], ~follows))[: len(before)]
        goes_on = np.concatenate((follows & (after[1:] == after[:-1]), [False]))[: len(before)]  # in the same place
        return np.column_stack((self.steps, is_read, ~goes_on)).astype(np.int32)


def chain_steps(num_rows: int, width: int) -> StateSteps:
    """Consecutive rows, after which the session's own state is the last row's."""
    steps = np.zeros((num_rows, 3), np.int64)
    steps[:, 0] = np.arange(num_rows)
    rows = torch.arange(num_rows)
    return StateSteps(rows, steps, 1, rows[:, None] + torch.arange(width + 1))


def tree_steps(paths: NDArray[np.int32], depths: NDArray[np.int32], width: int) -> StateSteps:
    """The nodes on the paths of a piece of a tree, which do not change the session's own state.

    `paths` (num_rows, width of the tails) has the nodes on the path of each row, of which there are `depths` below the
    root. Nodes before the piece are computed again.
    """
    nodes = _parents(paths, depths)
    number = {node: place for place, node in enumerate(nodes)}
    parents = {number[node]: number.get(parent, -1) for node, parent in nodes.items()}
    windows = np.empty((len(nodes), width + 1), np.int64)
    for node, place in number.items():
        windows[place, :-1] = windows[parents[place], 1:] if place else np.arange(width)
        windows[place, -1] = width + node
    steps, num_places = _steps(parents)
    rows = torch.tensor([*nodes])
    return StateSteps(rows, np.array(steps, np.int64), num_places, torch.from_numpy(windows))


def _parents(paths: NDArray[np.int32], depths: NDArray[np.int32]) -> dict[int, int]:
    """The parent of each node on the paths of a piece, in the order of nodes; the root's is -1."""
    parents = {0: -1}
    for depth in range(1, paths.shape[1]):
        reach = depths >= depth
        parents |= zip(paths[reach, depth].tolist(), paths[reach, depth - 1].tolist(), strict=True)
    return dict(sorted(parents.items()))


def _steps(parents: dict[int, int]) -> tuple[list[tuple[int, int, int]], int]:
    """Steps in depth-first order. A node's largest branch comes last and takes over its state; the others copy it.

    So there are at most log2(number of nodes) + 1 states.
    """
    sizes, children = dict.fromkeys(parents, 1), {node: list[int]() for node in parents}
    for node in reversed(parents):
        if node:
            sizes[parents[node]] += sizes[node]
            children[parents[node]].append(node)
    steps, free, num_places, waiting = list[tuple[int, int, int]](), list[int](), 1, [(0, COMMITTED, False)]
    while waiting:
        node, before, takes_over = waiting.pop()
        after = before
        if not takes_over:
            if not free:
                free.append(num_places)
                num_places += 1
            after = free.pop()
        steps.append((node, before, after))
        branches = sorted(children[node], key=sizes.__getitem__, reverse=True)
        waiting += ((child, after, number == 0) for number, child in enumerate(branches))
        if not branches:
            free.append(after)
    return steps, num_places
