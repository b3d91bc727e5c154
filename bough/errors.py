"""All exceptions of bough, as one tree.

    BoughError
    ├── FieldError           carries its parts: the field, what it must be, and what it was
    │   ├── InvalidRequest   the caller's fault
    │   │   ├── ContextExceeded  the prompt leaves no room for output, whatever is done
    │   │   ├── InvalidTree  names the node
    │   │   └── InvalidCurve names the entry of a cost curve
    │   ├── NotFound         no such session or request
    │   ├── AlreadyRunning   a request with the same id or in the same session runs; wait for its end
    │   └── InvalidSetting, InvalidModel  below
    ├── Unauthenticated      the caller has no valid key
    ├── PrefixMissing        the worker has not cached the caller's prefix; carries what it has cached
    ├── StaleEpoch           the session has been claimed by a newer epoch
    ├── Exhausted            no capacity now; the same call may succeed later, and may say when
    │   ├── Preempted        a session's KV was taken for older sessions
    │   └── AcceleratorFull  a sweep found no memory on its device
    ├── DeadlineExceeded     the caller's deadline has passed, or it has stopped reading
    ├── Unavailable          a worker or the index does not answer
    │   ├── NoAnswer         a call ended without a reply: connection lost, or timeout
    │   ├── RingLost         a member of a target's ring of stages, or a link between two, has failed
    │   ├── AcceleratorLost  a worker's device only returns errors; its process ends
    │   └── StreamError      weights could not be read
    ├── ConfigError          an invalid setting, found at start
    │   ├── InvalidSetting   names the flag or variable
    │   └── CheckpointError  an invalid model folder, found at start
    │       └── InvalidModel what was given is no model, or one that cannot be fetched
    └── PairingError         two incompatible workers

`bough.rpc.status_map` alone maps them to gRPC statuses.
"""

from __future__ import annotations

from typing import Self


class BoughError(Exception):
    """The base of all errors; their texts are meant for users."""


class FieldError(BoughError):
    """An error about one field; its text is "field: problem, got ..."."""

    def __init__(self, field: str, problem: object, got: object = None) -> None:
        super().__init__(field, str(problem), None if got is None else str(got))

    @property
    def field(self) -> str:
        """Its name as the caller knows it; empty if unknown."""
        return str(self.args[0])

    @property
    def problem(self) -> str:
        """What the field must be, or what is wrong with it."""
        return str(self.args[1])

    @property
    def got(self) -> str | None:
        """What the field was; None if that does not help."""
        got: str | None = self.args[2]
        return got

    def __str__(self) -> str:
        prefix = f"{self.field}: " if self.field else ""
        return prefix + self.problem + ("" if self.got is None else f", got {self.got}")

    def named(self, field: str) -> Self:
        """The same error of the field by another name."""
        return type(self)(field, self.problem, self.got)


class InvalidRequest(FieldError):
    """A field of a request is invalid."""


class ContextExceeded(InvalidRequest):
    """A prompt does not fit the model's context."""


class InvalidTree(InvalidRequest):
    """A tree violates an invariant."""


class InvalidCurve(InvalidRequest):
    """A cost curve violates an invariant."""


class Unauthenticated(BoughError):
    """The caller has no valid key; the text does not say which part is wrong."""


class NotFound(FieldError):
    """A session or request does not exist here."""


class AlreadyRunning(FieldError):
    """A request with the same id, or another one of the session, has not ended yet."""


class PrefixMissing(BoughError):
    """A worker has cached less of a session than the caller believed, or other tokens."""

    def __init__(self, message: str, held_length: int = 0, held_hash: int = 0) -> None:
        super().__init__(message)
        self.held_length = held_length
        self.held_hash = held_hash


class StaleEpoch(BoughError):
    """A call of an older epoch of a session; carries the worker's epoch if a worker raised it."""

    def __init__(self, message: str, newest: int = 0) -> None:
        super().__init__(message)
        self.newest = newest


class Exhausted(BoughError):
    """There is no capacity now; `retry_seconds` is the time after which to retry, if known."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Preempted(Exhausted):
    """A session's KV was taken for older sessions; its tokens are computed again, anywhere, once there is room."""


class AcceleratorFull(Exhausted):
    """An accelerator has no memory left for a call."""


class DeadlineExceeded(BoughError):
    """The caller's deadline has passed."""


class Unavailable(BoughError):
    """A required process does not answer."""


class NoAnswer(Unavailable):
    """A call ended without its peer's reply; if it `was_connected`, the peer may have failed because of the call."""

    def __init__(self, message: str, was_connected: bool = False) -> None:
        super().__init__(message)
        self.was_connected = was_connected


class AcceleratorLost(Unavailable):
    """An accelerator is lost to this process."""


class RingLost(Unavailable):
    """An epoch of a target's ring is over; the text names the member that failed, and how."""


class StreamError(Unavailable):
    """Weights could not be read from disk."""


class ConfigError(BoughError):
    """A setting is unknown, malformed or contradictory."""


class InvalidSetting(FieldError, ConfigError):
    """A flag or variable cannot be read, or contradicts another."""


class CheckpointError(ConfigError):
    """A model folder is missing, incomplete or inconsistent."""


class InvalidModel(FieldError, CheckpointError):
    """A model that does not exist, or cannot be fetched; the field is `model`, or the flag that gave it."""


class PairingError(BoughError):
    """Two workers are incompatible."""
