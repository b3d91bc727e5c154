"""A session with a slot: what it holds, and where in its life it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bough.errors import StaleEpoch
from bough.model.kv.slot import Slot
from bough.protocol.messages import VerifyResult
from bough.protocol.prefix_hash import block_hashes


class SlotState(Enum):
    """The life of a slot: FREE, HELD, IDLE, perhaps HELD again, EVICTING, FREE."""

    FREE = "free"  # has no rows yet, or no longer
    HELD = "held"  # by a session with a call in flight, or whose lease has not run out
    IDLE = "idle"  # nobody counts on it: kept as long as there is room
    EVICTING = "evicting"  # its rows are being given back


_AFTER = {
    SlotState.FREE: {SlotState.HELD},
    SlotState.HELD: {SlotState.IDLE},
    SlotState.IDLE: {SlotState.HELD, SlotState.EVICTING},
    SlotState.EVICTING: {SlotState.FREE},
}


class Text:
    """All of a session's tokens before the root, as a call has them."""

    def __init__(self, tokens: list[int], cache_salt: str = "") -> None:
        self.tokens, self.cache_salt = tokens, cache_salt

    @cached_property
    def hashes(self) -> list[int]:
        """Of its blocks; not computed for calls that lack nothing."""
        return block_hashes(self.tokens, cache_salt=self.cache_salt)

    @cached_property
    def array(self) -> NDArray[np.int32]:
        """(num_tokens,), for comparing with others."""
        return np.asarray(self.tokens, np.int32)


@dataclass(slots=True, eq=False)
class SessionSlot:
    """A session with a slot."""

    session_id: str  # "" once it is released: what it held stays for others to begin from
    slot: Slot
    epoch: int
    cache_salt: str = ""  # of the text that it holds
    state: SlotState = SlotState.FREE
    number: int = 0  # of all sessions that came to this pool, in order
    most_rows: int = 0  # that it may come to in its present request
    last_used: float = 0.0  # seconds on the pool's clock
    leased_until: float = 0.0
    last_round: int = -1
    last_result: VerifyResult | None = None  # the answer to last_round, for a caller who asks again
    is_busy: bool = False  # a call is in flight

    @property
    def age(self) -> tuple[int, int]:
        """What sessions are ordered by, the oldest first: by when their requests began, as epochs are times."""
        return self.epoch, self.number

    @property
    def num_growing(self) -> int:
        """Rows that it may still ask for."""
        return max(0, self.most_rows - self.slot.num_rows)

    def become(self, state: SlotState) -> None:
        """The one place where a state changes."""
        assert state in _AFTER[self.state], f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state

    def require_epoch(self, epoch: int) -> None:
        """Raises StaleEpoch where the session has been placed anew since this epoch."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch: {epoch} of session {self.session_id} is over; {self.epoch} has begun", self.epoch)

    def require_round(self, epoch: int, number: int) -> None:
        """Raises StaleEpoch where the session is further: the call was held up, and would undo what came after it."""
        if epoch == self.epoch and number < self.last_round:
            raise StaleEpoch(
                f"round: {number} of epoch {epoch} of session {self.session_id} is over; {self.last_round} was answered"
            )
