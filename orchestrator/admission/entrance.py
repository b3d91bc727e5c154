"""Which calls an orchestrator takes, decided by their number and size before any of them is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bough.errors import InvalidRequest
from bough.rpc.drain import Drainer
from bough.rpc.status_map import MAX_MESSAGE_BYTES
from orchestrator.admission.admission import Admission

SPARE_CALLS = 32  # of Generate, beyond those that run and wait: some are ending, or are about to be refused by name
MAX_OTHER_CALLS = 256
MAX_BYTES = 64 * MAX_MESSAGE_BYTES  # of the messages of all calls together
BYTES_PER_TOKEN = 32  # of a prompt, for each token of the context: several times what any language takes
SMALL_BYTES = 256 * 1024  # that a message may always have
ALWAYS_ANSWERED = frozenset({"Check", "Watch"})  # health, of which a balancer asks


class Entrance(Drainer):
    """Bounds what is decoded and held for callers who wait, so that no number of them fills the memory."""

    def __init__(self, admission: Admission, largest_context: Callable[[], int]) -> None:
        """`largest_context` returns the tokens of the longest session that any target takes; 0 if none is known."""
        super().__init__()
        self._admission = admission
        self._largest_context = largest_context
        self._num_generating = 0
        self._num_others = 0
        self._num_bytes = 0

    @contextmanager
    def entering(self, method: str, num_bytes: int) -> Iterator[None]:
        """Counts a call from before its message is decoded to its end.

        Raises:
            InvalidRequest: the message is larger than any prompt that fits a context.
            Exhausted: there are too many calls, or too many bytes of them; with a delay.
        """
        if method in ALWAYS_ANSWERED:
            yield
            return
        is_generating = method == "Generate"
        self._require_room(is_generating, num_bytes)
        self._num_generating += is_generating
        self._num_others += not is_generating
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_generating -= is_generating
            self._num_others -= not is_generating
            self._num_bytes -= num_bytes

    def _require_room(self, is_generating: bool, num_bytes: int) -> None:
        admission, context = self._admission, self._largest_context()
        most_bytes = max(SMALL_BYTES, context * BYTES_PER_TOKEN)
        if context and num_bytes > most_bytes:
            raise InvalidRequest(
                f"message: value had {num_bytes} bytes; must have at most {most_bytes}, for the longest context is of "
                f"{context} tokens"
            )
        if is_generating and self._num_generating >= admission.max_running + admission.max_waiting + SPARE_CALLS:
            raise admission.exhausted(f"{self._num_generating} requests run and wait, more than may")
        if not is_generating and self._num_others >= MAX_OTHER_CALLS:
            raise admission.exhausted(f"{self._num_others} calls are being answered, as many as may")
        if self._num_bytes + num_bytes > MAX_BYTES:
            raise admission.exhausted(f"the messages of all calls have {self._num_bytes} bytes, about as many as may")
