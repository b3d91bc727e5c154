"""The student: the target without some layers, whose linear layers take a low-rank correction (LoRA, arXiv 2106.09685).

The target's own weights stay as they are; the corrections and the layers' norms are what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.functional import linear

from bough.distill.teacher import Network


class Corrected(nn.Module):
    """A linear layer whose weight is W + up @ down."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        rank = min(rank, *base.weight.shape)
        down = torch.randn(rank, base.in_features, generator=generator) / base.in_features**0.5
        self.down = nn.Parameter(down.to(base.weight.device))  # (rank, in_features) float32
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))  # float32

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        dtype = self.base.weight.dtype
        low = linear(hidden, self.down.to(dtype))
        result: torch.Tensor = self.base(hidden) + linear(low, self.up.to(dtype))
        return result


class TrainedNorm(nn.Module):
    """A norm with a weight of its own, kept in float32."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.weight = nn.Parameter(base.get_parameter("weight").detach().float())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the norm below it, with the trained weight in the data type of the model."""
        weight = self.weight.to(self.base.get_parameter("weight").dtype)
        result: torch.Tensor = torch.func.functional_call(self.base, {"weight": weight}, hidden)
        return result


def correct(network: Network, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Makes a network a student; what is to be trained, by the names that the adapter has for it."""
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, nn.Parameter] = {}
    for index, layer in list(zip(network.kept, network.layers, strict=True))[num_untouched(network.kept) :]:
        for name, module in list(trainable(layer)):
            replacement = Corrected(module, rank, generator) if is_linear(module) else TrainedNorm(module)
            parent, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, replacement)
            trained = replacement.named_parameters(recurse=False)
            parameters.update({f"layers.{index}.{name}.{key}": parameter for key, parameter in trained})
    return parameters


def num_untouched(kept: Sequence[int]) -> int:
    """Of the layers that are kept, those that stay as they are: all before the one in front of the first gap.

    They give what they give in the target, and no gradient needs to be brought down to them.
    """
    first_gap = next((place for place, layer in enumerate(kept) if place != layer), len(kept))
    return max(0, first_gap - 1)


def num_trained(layer: nn.Module, rank: int) -> int:
    """Numbers that `correct` trains in a layer."""
    count = 0
    for _, module in trainable(layer):
        shape = module.get_parameter("weight").shape
        count += min(rank, *shape) * sum(shape) if is_linear(module) else shape.numel()
    return count


def trainable(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers, and norms: modules with a vector for a weight. Routers, which are more, stay as they are."""
    for name, module in layer.named_modules():
        weight = module._parameters.get("weight")
        if is_linear(module) or (weight is not None and weight.dim() == 1):
            yield name, module


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing else."""
    return type(module) is nn.Linear
