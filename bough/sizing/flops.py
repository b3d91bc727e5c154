"""What a pass over a model computes, reads from memory and writes out of few bits. Matrix products only: attention,
norms and drawing come on top.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Of all layers' experts, when each row chooses some, with the same chance and for itself.

    Real rows choose more alike than that.
    """

    token_flops: float  # of those that one row chooses
    weight_bytes: int  # of all
    unpacked_bytes: int  # of all, what is written out when they are multiplied
    num_experts: int  # of a layer
    num_chosen: int  # of these, by each row
    least_rows: int  # that an expert's products cost at least

    def share(self, num_tokens: int) -> float:
        """Of a layer's experts, what so many rows choose together."""
        return 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens

    def flops(self, num_tokens: int) -> float:
        """At least: experts chosen by few rows cost as if by `least_rows`, and what pads more than that is left out."""
        num_experts = self.share(num_tokens) * self.num_experts
        if not num_experts:
            return 0.0
        times = max(1.0, num_tokens * self.num_chosen / num_experts / self.least_rows)
        return self.token_flops / self.num_chosen * num_experts * times * self.least_rows


@dataclass(frozen=True, slots=True)
class Work:
    """Of a whole model; experts that are computed for the rows that choose them are apart from the rest."""

    token_flops: float  # of one row, in all layers and the output head
    weight_bytes: int  # that every chunk of rows reads from the accelerator's memory
    unpacked_bytes: int = 0  # of these, what is first written out from 4 or 8 bits
    experts: ExpertWork | None = None
    is_unpacked_by_chunk: bool = False  # by every chunk of rows, not once in a sweep

    @property
    def flops_per_token(self) -> float:
        """Of one row, with the experts that it chooses."""
        return self.token_flops + (self.experts.token_flops if self.experts else 0.0)

    def flops(self, num_rows: int, num_tokens: int) -> float:
        """Of a chunk of rows of which so many are tokens and the others pad."""
        return num_rows * self.token_flops + (self.experts.flops(num_tokens) if self.experts else 0.0)

    def bytes_read(self, num_tokens: int) -> float:
        """From memory, by a chunk with so many tokens."""
        return self.weight_bytes + (self.experts.share(num_tokens) * self.experts.weight_bytes if self.experts else 0.0)

    def bytes_unpacked(self, num_tokens: int) -> float:
        """By a chunk with so many tokens, beside what a sweep writes out once."""
        experts = self.experts.share(num_tokens) * self.experts.unpacked_bytes if self.experts else 0.0
        return experts + (self.unpacked_bytes if self.is_unpacked_by_chunk else 0)

    @property
    def bytes_unpacked_once(self) -> int:
        """By a sweep, whatever its rows."""
        return 0 if self.is_unpacked_by_chunk else self.unpacked_bytes
