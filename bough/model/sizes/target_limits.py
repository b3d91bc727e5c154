"""What a target allows at once. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from bough.config.processes import TargetConfig
from bough.errors import ConfigError

KV_STEP = 256  # enough that slots seldom move to grow, and little beside the context of a session


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What a target allows at once."""

    rows: int  # of every matrix product
    max_sweep_tokens: int
    max_nodes: int
    max_context: int
    kv_step: int = KV_STEP  # tokens of a session that room is taken for at a time

    @classmethod
    def of(cls, settings: TargetConfig, max_positions: int) -> TargetLimits:
        """As a target with these settings keeps them for a model with so many positions."""
        max_sweep_tokens = max(settings.max_sweep_tokens, settings.max_nodes)
        max_context = min(settings.max_context, max_positions)
        return cls(settings.rows, max_sweep_tokens, settings.max_nodes, max_context)

    @property
    def slot_rows(self) -> int:
        """Tokens of the longest session, and beyond them a tree."""
        return self.max_context + self.max_nodes

    def num_rows(self, row_bytes: int, kv_memory: int) -> int:
        """Tokens whose keys and values, of `row_bytes` each, fit: of all sessions and their trees together.

        Raises:
            ConfigError: not one session of the longest context fits.
        """
        num_rows = kv_memory // row_bytes
        if num_rows < self.slot_rows:
            raise ConfigError(
                f"--kv-memory: must be at least {self.slot_rows * row_bytes} bytes, for one session of "
                f"{self.slot_rows} tokens, got {kv_memory}; or choose a smaller --max-context or --max-nodes"
            )
        return num_rows
