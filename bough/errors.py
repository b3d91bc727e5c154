"""What can go wrong, as one tree of exceptions.

    BoughError
    ├── InvalidRequest       the caller's fault: names the field, the value and what would do
    │   ├── InvalidTree      names the node
    │   └── InvalidCurve     names the entry of a curve of costs
    ├── Unauthenticated      a caller without a key that is known here
    ├── NotFound             no such session or request
    ├── PrefixMissing        the worker does not hold what the caller stands on; carries what it does hold
    ├── StaleEpoch           the session has been placed anew since
    ├── Exhausted            no room now; the same call may succeed later, and it may say when
    │   ├── Preempted        a session's KV has given way to older ones
    │   └── AcceleratorFull  a sweep found no memory on its device
    ├── DeadlineExceeded     the caller's time is up, or it has stopped reading what it asked for
    ├── Unavailable          a worker or the index does not answer
    │   ├── NoAnswer         a call has ended without one: the connection is lost, or the time is up
    │   ├── AcceleratorLost  a worker's device answers nothing but errors; its process ends
    │   └── StreamError      weights could not be read
    ├── ConfigError          a setting, found at start
    │   └── CheckpointError  a model folder, found at start
    └── PairingError         two workers that do not fit together

How each travels over gRPC stands in `bough.rpc.server`, and nowhere else.
"""

from __future__ import annotations


class BoughError(Exception):
    """Base of all of them; its text is fit to show to a user."""


class InvalidRequest(BoughError):
    """A field of a request is not usable."""


class InvalidTree(InvalidRequest):
    """A tree breaks one of its rules."""


class InvalidCurve(InvalidRequest):
    """A curve of seconds by rows breaks one of its rules."""


class Unauthenticated(BoughError):
    """A caller without a key that is known here; which part of it is wrong is not told."""


class NotFound(BoughError):
    """A session or request that is not here."""


class PrefixMissing(BoughError):
    """A worker holds less of a session, or something else, than the caller believed."""

    def __init__(self, message: str, held_length: int = 0, held_hash: int = 0) -> None:
        super().__init__(message)
        self.held_length = held_length
        self.held_hash = held_hash


class StaleEpoch(BoughError):
    """A call from before the session was placed anew; carries the epoch that a worker has, where it is a worker's."""

    def __init__(self, message: str, newest: int = 0) -> None:
        super().__init__(message)
        self.newest = newest


class Exhausted(BoughError):
    """Every place is taken. `retry_seconds` is when the same call is worth trying again, where that is known."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Preempted(Exhausted):
    """A session's KV has given way to older sessions: its tokens are computed again once there is room, anywhere."""


class AcceleratorFull(Exhausted):
    """An accelerator has no memory left for what was asked of it at once."""


class DeadlineExceeded(BoughError):
    """The time that a caller had given is over."""


class Unavailable(BoughError):
    """A process that is needed does not answer."""


class NoAnswer(Unavailable):
    """A call has ended without an answer of its peer's own, which may have gone because of it."""


class AcceleratorLost(Unavailable):
    """An accelerator does nothing more for this process."""


class StreamError(Unavailable):
    """Weights could not be read from disk."""


class ConfigError(BoughError):
    """A setting is unknown, malformed or contradictory."""


class CheckpointError(ConfigError):
    """A model folder is missing, incomplete or inconsistent."""


class PairingError(BoughError):
    """A draft and a target that cannot work together."""
