"""Modules of transformers whose norms, rotations and gates become the backend's, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bough.model.architecture.architecture import build_empty
from bough.model.architecture.moe import has_own_products
from bough.model.backends.reference import ReferenceBackend
from bough.model.running.fused_parts import fuse_parts
from tests.fakes.model.families import of_two_layers


class Noting(ReferenceBackend):
    """torch's formulas; notes which were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def norm(self, *arguments: Any) -> torch.Tensor:
        self.asked.append("norm")
        return super().norm(*arguments)

    def rotate(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("rotate")
        return super().rotate(*arguments)

    def gate(self, *arguments: Any) -> torch.Tensor:
        self.asked.append("gate")
        return super().gate(*arguments)


def fused(module: nn.Module) -> list[str]:
    """Which of the backend's functions it will use is noted in this list."""
    backend = Noting()
    fuse_parts(module, backend)
    return backend.asked


class OtherNorm(nn.Module):
    """Divides by the mean of absolute numbers."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape))
        self.rows: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return self.weight * hidden / hidden.abs().mean(-1, keepdim=True)


class UntriedNorm(nn.Module):
    """Has a weight that is no parameter, of a size that no random rows have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.rand(12)
        self.rows: list[int] = []

    def forward(self, hidden: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        self.rows.append(len(hidden))
        return factor * self.weight * hidden / hidden.abs().mean(-1, keepdim=True)


class Scale(nn.Module):
    """Computes each number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden


class Gated(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], is_sum: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.activation, self.is_sum = activation, is_sum

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.activation(self.gate_proj(hidden)), self.up_proj(hidden)
        result: torch.Tensor = self.down_proj(gate + up if self.is_sum else gate * up)
        return result


class Experts(nn.Module):
    """With a clamped gate."""

    is_transposed = False
    gate_activation: str | None = "not tried"

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gates, ups = both.chunk(2, -1)
        return clamped(gates) * ups


def turned_by_ones(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, Any]:
    return q + 1, k + 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, heads: torch.Tensor, table: torch.Tensor, *, axis: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        if axis != 1:
            return apply_rotary_pos_emb(heads, heads, table, table, axis)  # type: ignore[no-any-return]
        return apply_rotary_pos_emb(heads, heads, table, table)  # type: ignore[no-any-return]


class OtherAttention(Attention):
    def forward(self, heads: torch.Tensor, table: torch.Tensor, *, axis: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return turned_by_ones(heads, heads, table, table)


def turned_alone(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
    return x * cos.unsqueeze(unsqueeze_dim) + sin.unsqueeze(unsqueeze_dim)


class NamingAttention(Attention):
    """Turns queries and keys apart, or with an axis that is named, as Gemma 4 and DeepSeek-V4 do."""

    def forward(self, heads: torch.Tensor, table: torch.Tensor, *, axis: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        alone = turned_alone(heads, table, table, unsqueeze_dim=axis)
        return alone, apply_rotary_pos_emb(heads, heads, table, table, unsqueeze_dim=axis)[0]


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
def test_a_norm_is_found_with_its_epsilon(epsilon: float) -> None:
    module, rows = LlamaRMSNorm(16, eps=epsilon).bfloat16(), (1e-3 * torch.randn(1, 3, 16)).bfloat16()
    wanted = module(rows)
    asked = fused(module)
    assert torch.equal(module(rows), wanted)
    assert asked == ["norm"]


@pytest.mark.parametrize("shape", [(16,), (4, 16)])
def test_a_norm_that_is_not_known_gets_a_fixed_number_of_rows(shape: tuple[int, ...]) -> None:
    module, rows = OtherNorm(*shape), torch.randn(1, 6, 4, 16)
    wanted = module(rows)
    asked = fused(module)
    module.rows.clear()
    assert torch.equal(module(rows), wanted)
    assert not asked
    assert module.rows == [256]


def test_a_norm_that_cannot_be_tried_gets_a_fixed_number_of_rows() -> None:
    module, rows = UntriedNorm(), torch.randn(1, 6, 12)
    wanted = module(rows, factor=2.0)
    fused(module)
    module.rows.clear()
    assert torch.equal(module(rows, factor=2.0), wanted)
    assert module.rows == [256]


@pytest.mark.parametrize("make", [Scale, lambda: nn.LayerNorm(16), lambda: nn.Linear(16, 16), nn.SiLU, nn.Identity])
def test_what_computes_a_row_by_itself_stays(make: Callable[[], nn.Module]) -> None:
    module = make()
    fused(module)
    assert "forward" not in vars(module)


def test_gates_of_experts_are_found_by_their_activation() -> None:
    """gpt-oss has a gate of its own."""
    for name, activation in (("mixtral", "silu"), ("gpt-oss, sinks, alternating windows", None)):
        decoder = build_empty(of_two_layers(name), torch.bfloat16).get_decoder()
        fuse_parts(decoder, ReferenceBackend())
        found = [module.gate_activation for module in decoder.modules() if has_own_products(module)]
        assert found == [activation] * 2


def test_gates_are_found_by_their_activation() -> None:
    rows = torch.randn(1, 3, 8)
    for module, wanted_asked in ((Gated(silu), ["gate"]), (Gated(relu), []), (Gated(silu, is_sum=True), [])):
        wanted = module(rows)
        asked = fused(module)
        assert torch.equal(module(rows), wanted)
        assert asked == wanted_asked


def clamped(numbers: torch.Tensor) -> torch.Tensor:
    return silu(numbers).clamp(max=20.0)


def test_clamped_gates_are_not_taken_for_plain_ones() -> None:
    experts = Experts()
    for module in (experts, mlp := Gated(clamped)):
        fuse_parts(module, ReferenceBackend())
    assert experts.gate_activation is None
    assert "forward" not in vars(mlp)


def test_rotations_are_found_when_they_are_called() -> None:
    heads, table = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 8)
    for module, axis, wanted_asked in (
        (Attention(), 1, ["rotate"]),
        (Attention(), 2, []),
        (OtherAttention(), 1, []),
        (NamingAttention(), 2, []),
    ):
        wanted = module(heads, table, axis=axis)
        asked = fused(module)
        assert all(map(torch.equal, module(heads, table, axis=axis), wanted))
        assert asked == wanted_asked
    assert apply_rotary_pos_emb.__module__.startswith("transformers"), "other models keep the module's own"


def test_a_table_of_another_type_makes_another_formula() -> None:
    """Llama's then returns float32, which the backend does not."""
    heads, table, module = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 3, 8), Attention()
    asked = fused(module)
    assert module(heads, table)[0].dtype == torch.float32
    assert not asked
