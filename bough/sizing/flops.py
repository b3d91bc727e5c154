"""Floating-point operations, memory traffic and unpacked bytes of a model's matrix products.

Attention, norms and sampling are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Work of all layers' experts if rows choose experts uniformly and independently; real choices overlap more."""

    token_flops: float  # of the experts that one row chooses
    weight_bytes: int  # of all experts
    unpacked_bytes: int  # of all experts, when unpacked from few bits
    num_experts: int  # in a layer
    num_chosen: int  # experts chosen by each row
    least_rows: int  # fewest rows that an expert's products cost

    def share(self, num_tokens: int) -> float:
        """The expected share of a layer's experts that `num_tokens` rows choose together."""
        return 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens

    def flops(self, num_tokens: int) -> float:
        """A lower bound: experts chosen by few rows cost `least_rows` rows, and further padding is not counted."""
        num_experts = self.share(num_tokens) * self.num_experts
        if not num_experts:
            return 0.0
        times = max(1.0, num_tokens * self.num_chosen / num_experts / self.least_rows)
        return self.token_flops / self.num_chosen * num_experts * times * self.least_rows


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a whole model; experts that only some rows choose are counted separately."""

    token_flops: float  # of one row, in all layers and the output head
    weight_bytes: int  # read from the accelerator's memory by each chunk of rows
    unpacked_bytes: int = 0  # of weights that are unpacked from 4 or 8 bits
    experts: ExpertWork | None = None
    is_unpacked_by_chunk: bool = False  # by every chunk of rows, not once in a sweep

    @property
    def flops_per_token(self) -> float:
        """Operations of one row, its chosen experts included."""
        return self.token_flops + (self.experts.token_flops if self.experts else 0.0)

    def flops(self, num_rows: int, num_tokens: int) -> float:
        """Operations of a chunk of `num_rows` rows, of which `num_tokens` are tokens and the rest padding."""
        return num_rows * self.token_flops + (self.experts.flops(num_tokens) if self.experts else 0.0)

    def bytes_read(self, num_tokens: int) -> float:
        """Bytes that a chunk with `num_tokens` tokens reads from memory."""
        return self.weight_bytes + (self.experts.share(num_tokens) * self.experts.weight_bytes if self.experts else 0.0)

    @property
    def bytes_unpacked_by_chunk(self) -> int:
        """Bytes unpacked for every chunk of rows."""
        return self.unpacked_bytes if self.is_unpacked_by_chunk else 0

    def bytes_unpacked_once(self, num_tokens: int) -> float:
        """Bytes unpacked once for a sweep: the experts that its tokens choose, and what chunks do not unpack."""
        experts = self.experts.share(num_tokens) * self.experts.unpacked_bytes if self.experts else 0.0
        return experts + self.unpacked_bytes - self.bytes_unpacked_by_chunk
