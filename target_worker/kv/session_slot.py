"""A KV slot with its session: what it holds, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bough.errors import StaleEpoch
from bough.grammar.allowed_tokens import AllowedTokens
from bough.model.kv.slot import Slot
from bough.protocol.messages import VerifyResult
from bough.protocol.prefix_hash import block_hashes


class SlotState(Enum):
    """States of a slot: FREE, HELD, IDLE, possibly HELD again, FREE."""

    FREE = "free"  # has no rows
    HELD = "held"  # its session has a call in flight or a current lease
    IDLE = "idle"  # without a lease: kept while there is room


_AFTER = {
    SlotState.FREE: {SlotState.HELD},
    SlotState.HELD: {SlotState.IDLE},
    SlotState.IDLE: {SlotState.HELD, SlotState.FREE},
}


class Text:
    """All of a session's tokens before the root, as sent by a call."""

    def __init__(self, tokens: list[int], cache_salt: str = "") -> None:
        self.tokens, self.cache_salt = tokens, cache_salt

    @cached_property
    def hashes(self) -> list[int]:
        """Hashes of the blocks of tokens; computed lazily, as calls without missing tokens need none."""
        return block_hashes(self.tokens, cache_salt=self.cache_salt)

    @cached_property
    def array(self) -> NDArray[np.int32]:
        """(num_tokens,), for comparison with other texts."""
        return np.asarray(self.tokens, np.int32)


@dataclass(slots=True, eq=False)
class SessionSlot:
    """A KV slot with the session that has it."""

    session_id: str  # "" once released: other sessions may still copy its prefix
    slot: Slot
    epoch: int
    cache_salt: str = ""  # of the cached text
    state: SlotState = SlotState.FREE
    number: int = 0  # order in which sessions came to this pool
    most_rows: int = 0  # limit of rows in the present request
    last_used: float = 0.0  # seconds on the pool's clock
    leased_until: float = 0.0
    last_round: int = -1
    last_result: VerifyResult | None = None  # the answer to last_round, repeated if the caller asks again
    is_busy: bool = False  # whether a call is in flight
    allowed: AllowedTokens | None = None  # along the output, if its tokens are constrained

    @property
    def age(self) -> tuple[int, int]:
        """Sort key from the oldest to the youngest session: epochs are times at which requests began."""
        return self.epoch, self.number

    @property
    def num_growing(self) -> int:
        """Rows that the session may still ask for."""
        return max(0, self.most_rows - self.slot.num_rows)

    def become(self, state: SlotState) -> None:
        """Change the state; the only place that does."""
        assert state in _AFTER[self.state], f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state

    def require_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch if the session has a newer epoch."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch: must be at least {self.epoch}, the session's, got {epoch}", self.epoch)

    def require_round(self, epoch: int, number: int) -> None:
        """Raise StaleEpoch if a later round was answered: the call was delayed, and would undo newer tokens."""
        if epoch == self.epoch and number < self.last_round:
            raise StaleEpoch(f"round: must be at least {self.last_round}, the last one answered, got {number}")
