"""Limits the number and size of calls before their messages are decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bough.errors import BoughError, ContextExceeded
from bough.rpc.drain import Drainer
from bough.rpc.status_map import MAX_MESSAGE_BYTES
from orchestrator.admission.admission import Admission
from orchestrator.admission.size_limits import TOO_LONG

SPARE_CALLS = 32  # Generate calls beyond the running and waiting ones: some are ending or about to be refused
MAX_TOKENIZING = 64  # tokenizing calls, which run one after another; their own limit, as long texts would delay all
MAX_OTHER_CALLS = 256
MAX_BYTES = 64 * MAX_MESSAGE_BYTES  # of all messages together
BYTES_PER_TOKEN = 32  # of a prompt, per token of the context: several times what any language needs
SMALL_BYTES = 256 * 1024  # limit of a message for any context
GENERATE, TOKENIZE, OTHERS = "Generate", "Tokenize", ""  # kinds of calls: methods, and all others together
ALWAYS_ANSWERED = frozenset({"Check", "Watch"})  # health checks of load balancers


class CallLimiter(Drainer):
    """Limits the messages decoded for waiting callers: no number of callers can exhaust memory."""

    def __init__(
        self, admission: Admission, largest_context: Callable[[], int], failed: Counter[str] | None = None
    ) -> None:
        """`largest_context` returns the longest context in tokens of any target; 0 if none is known.

        `failed` counts refused calls by the class name of their error.
        """
        super().__init__()
        self._admission = admission
        self._largest_context = largest_context
        self.spare_calls = SPARE_CALLS
        self._failed: Counter[str] = Counter() if failed is None else failed
        self._calls: Counter[str] = Counter()  # by method, or OTHERS
        self._num_bytes = 0

    @contextmanager
    def entering(self, method: str, num_bytes: int) -> Iterator[None]:
        """Count a call while it is decoded and served.

        Raises:
            ContextExceeded: the message is larger than any prompt that fits a context.
            Exhausted: there are too many calls, or too many bytes of calls; has a retry delay.
        """
        if method in ALWAYS_ANSWERED:
            yield
            return
        kind = method if method in (GENERATE, TOKENIZE) else OTHERS
        try:
            self._require_room(kind, num_bytes)
        except BoughError as exc:
            self._failed[type(exc).__name__] += 1
            raise
        self._calls[kind] += 1
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._calls[kind] -= 1
            self._num_bytes -= num_bytes

    def _require_room(self, kind: str, num_bytes: int) -> None:
        admission, context = self._admission, self._largest_context()
        most_bytes = max(SMALL_BYTES, context * BYTES_PER_TOKEN)
        if context and num_bytes > most_bytes:
            raise ContextExceeded(
                "message", f"must have at most {most_bytes} bytes", f"{num_bytes}, so the {TOO_LONG} {context} tokens"
            )
        most_generating = admission.max_running + admission.max_waiting + self.spare_calls
        most = {GENERATE: most_generating, TOKENIZE: MAX_TOKENIZING}.get(kind, MAX_OTHER_CALLS)
        if (num_calls := self._calls[kind]) >= most:
            what = "requests run and wait, which is above" if kind == GENERATE else "calls are being answered, which is"
            raise admission.exhausted(f"{num_calls} {what} the limit")
        if self._num_bytes + num_bytes > MAX_BYTES:
            raise admission.exhausted(f"the messages of all calls have {self._num_bytes} bytes, about the limit")
