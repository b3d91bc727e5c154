"""What a client remembers of a stream, so that it can be gone on with where it broke."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from dataclasses import replace

from bough.errors import BoughError, Exhausted, Unavailable
from bough.protocol import generation as g

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0


class ResumableStream:
    """The events of one request over however many calls it takes: each of them once."""

    def __init__(self, options: g.GenerateOptions) -> None:
        """The request gets a name and a seed here: they must be the same in every call."""
        seed = secrets.randbits(64) if options.seed is None else options.seed
        self._options = replace(options, request_id=options.request_id or uuid.uuid4().hex, seed=seed)
        self._token_ids = list(options.resume.token_ids) if options.resume else []
        self._num_before = options.resume.num_tokens if options.resume else 0
        self._num_seen = self._num_before
        self._is_started = False
        self._is_broken = False
        self._num_calls = 0
        self._seams: list[str] = []

    def next_options(self) -> g.GenerateOptions:
        """For the first call as they are, for the others with how far the one before has come."""
        self._num_calls += 1
        if self._num_calls == 1:
            return self._options
        knows_all = len(self._token_ids) == self._num_seen
        return replace(self._options, resume=g.Resume(self._num_seen, tuple(self._token_ids) if knows_all else ()))

    def take(self, event: g.Event) -> g.Event | None:
        """An event as the caller is to see it; None for one that it has seen."""
        match event:
            case g.Started():
                self._is_broken = False
                is_first, self._is_started = not self._is_started, True
                return event if is_first else None
            case g.Tokens():
                self._token_ids += event.token_ids
                self._num_seen += len(event.token_ids)
                return event
            case g.Finished():
                return replace(event, warnings=(*self._seams, *event.warnings))

    def broke(self, exc: BoughError) -> None:
        """A call has ended too early; where it had begun, the last event will tell, once until it has begun again."""
        if self._is_started and not self._is_broken:
            num_tokens = self._num_seen - self._num_before
            self._seams.append(f"the stream broke after {num_tokens} tokens and was resumed: {exc}")
            self._is_broken = True


class Patience:
    """Pauses that grow from one failure to the next, and end when too long after the first nothing has come."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Something has come."""
        self._failed_at: float | None = None  # first, since something came; seconds on the monotonic clock
        self._cause: Unavailable | Exhausted | None = None  # that failure: later ones are often its consequences
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def wait(self, exc: Unavailable | Exhausted, most_seconds: float) -> None:
        """Before the next try; for as long as the error itself says.

        Raises the first failure since something came where that would be more than `most_seconds` after it: how long a
        sweep takes before anything comes is no matter.
        """
        self._failed_at = self._failed_at or time.monotonic()
        self._cause = self._cause or exc
        asked = getattr(exc, "retry_seconds", None)
        # Not all that were cut off at the same moment should come back at the same moment.
        seconds = asked if asked is not None else self._pause_seconds * random.uniform(0.5, 1.0)
        if time.monotonic() + seconds > self._failed_at + most_seconds:
            raise self._cause
        await asyncio.sleep(seconds)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
