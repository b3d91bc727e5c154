"""Limits of a target. Independent of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from bough.runtime.kv_budget import num_states
from bough.sizing.row_counts import SWEEP_TOKENS

LOGIT_ROWS = 1024  # most rows of a sweep with logits, unless one tree has more: 262 MB of a 70B's
KV_STEP = 256  # few moves of growing slots, and little memory compared with a session's context


class KVRoom(NamedTuple):
    """How much KV memory holds, in every layer alike."""

    num_rows: int  # of all sessions together
    num_states: int  # sessions with recurrent states; 0 if sessions have none


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Limits of a target."""

    rows: int  # of every matrix product
    max_sweep_tokens: int
    max_nodes: int
    max_context: int
    kv_step: int = KV_STEP  # by which a session's slot grows
    kv_sessions: int = 0  # requested sessions; 0 if KV memory is given in bytes
    least_sweep_tokens: int = 0  # a sweep has more only while the link takes longer than computing; 0: never less

    @classmethod
    def of(cls, settings: TargetConfig, max_positions: int, is_given: bool = True) -> TargetLimits:
        """The limits of a target with these settings for a model of `max_positions`, without limits by memory.

        `is_given` says whether --max-sweep-tokens was; by default it follows the link.
        """
        max_sweep_tokens = max(settings.max_sweep_tokens or SWEEP_TOKENS, settings.max_nodes)
        max_context = min(settings.max_context or max_positions, max_positions)
        least = 0 if is_given else max(SWEEP_TOKENS, settings.max_nodes)
        return cls(
            settings.rows, max_sweep_tokens, settings.max_nodes, max_context, KV_STEP, settings.kv_sessions, least
        )

    def sweep_tokens(self, free_rows: float) -> int:
        """The most tokens of a sweep if so many rows are computed while the link takes longer."""
        return int(min(self.max_sweep_tokens, max(self.least_sweep_tokens or self.max_sweep_tokens, free_rows)))

    @property
    def max_logit_rows(self) -> int:
        """Nodes of all trees of a sweep; rows of contexts have no logits."""
        of_sessions = self.kv_sessions * self.max_nodes or self.max_sweep_tokens
        return min(self.max_sweep_tokens, of_sessions, max(self.max_nodes, LOGIT_ROWS))

    @property
    def slot_rows(self) -> int:
        """Rows for the longest session and a tree."""
        return self.max_context + self.max_nodes

    def num_states(self, row_bytes: int, kv_memory: int, state_bytes: int) -> int:
        """Sessions whose states, of `state_bytes` each, fit in addition to rows; 0 if sessions have none.

        If a number of sessions was requested, there is room for the longest context of each.
        """
        if state_bytes and self.kv_sessions:
            return self.kv_sessions
        return num_states(kv_memory, self.slot_rows * row_bytes, state_bytes)

    def num_rows(self, row_bytes: int, kv_memory: int, state_bytes: int = 0) -> int:
        """Rows, of `row_bytes` each, for all sessions and their trees together, without their states.

        Raises:
            ConfigError: a session of the longest context does not fit.
        """
        num_rows = (kv_memory - self.num_states(row_bytes, kv_memory, state_bytes) * state_bytes) // row_bytes
        if num_rows < self.slot_rows:
            raise ConfigError(
                f"--kv-memory: must be at least {self.slot_rows * row_bytes + state_bytes} bytes, for one session of "
                f"{self.slot_rows} tokens, got {kv_memory}; or choose a smaller --max-context or --max-nodes"
            )
        return num_rows

    def room(self, row_bytes: int, kv_memory: int, state_bytes: int = 0) -> KVRoom:
        """The rows and states that fit `kv_memory`. Raises ConfigError as `num_rows` does."""
        sizes = row_bytes, kv_memory, state_bytes
        return KVRoom(self.num_rows(*sizes), self.num_states(*sizes))
