"""A plot of a tree's shape."""

from __future__ import annotations

from bough.cli.plots.plotting import save_figure
from bough.trees.acceptance import FloatArray
from bough.trees.tree_plan import StaticShape

FAINTEST = 1e-4  # smallest probability with its own colour


def save_shape(shape: StaticShape, values: FloatArray, title: str, flag: str, file: str) -> None:
    """Save a plot of the nodes level by level, coloured by `values`, (num_nodes,) acceptance probabilities.

    Raises:
        ConfigError: the file cannot be written; names `flag`.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # not pyplot, which has global state

    across, depths = places_across(shape), shape.depths()
    heights = [-depth for depth in depths]
    points = list(zip(across, heights, strict=True))
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.add_collection(
        LineCollection(
            [(points[parent], points[node]) for node, parent in enumerate(shape.parents, start=1)],
            colors="lightgrey",
            linewidths=0.8,
            zorder=1,
        )
    )
    dots = axes.scatter(across, heights, c=values.clip(FAINTEST), norm=LogNorm(FAINTEST, 1), s=24, zorder=2)
    figure.colorbar(dots, label="probability of being accepted")
    axes.set(title=title, ylabel="levels below the root", xticks=[])
    axes.set_yticks(range(0, -max(depths) - 1, -1), labels=[str(depth) for depth in range(max(depths) + 1)])
    axes.spines[:].set_visible(False)
    save_figure(figure, flag, file)


def places_across(shape: StaticShape) -> list[float]:
    """(num_nodes,) horizontal positions: leaves at 0, 1, 2, ..., other nodes centred above their children."""
    children: list[list[int]] = [[] for _ in range(shape.budget)]
    for node, parent in enumerate(shape.parents, start=1):
        children[parent].append(node)
    places = [0.0] * shape.budget
    num_leaves, waiting = 0, [0]
    while waiting:
        node = waiting.pop()
        if not children[node]:
            places[node], num_leaves = float(num_leaves), num_leaves + 1
        waiting.extend(reversed(children[node]))
    for node in reversed(range(shape.budget)):
        if children[node]:
            places[node] = (places[children[node][0]] + places[children[node][-1]]) / 2
    return places
