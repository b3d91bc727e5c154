"""A client's state of a stream, to resume it after a break, and the backoff between attempts."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
import uuid
from dataclasses import replace

from bough.errors import BoughError, Exhausted, NoAnswer, Unavailable
from bough.protocol import generation as g

logger = logging.getLogger(__name__)

MOST_LOST = 2  # connections that a request may lose in a row without news, as it may be what ends the servers
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0


class ResumableStream:
    """Merges the calls of one request into one stream of events without repetitions."""

    def __init__(self, options: g.GenerateOptions) -> None:
        """Chooses a request id and a seed if not given, as all calls must use the same."""
        seed = secrets.randbits(64) if options.seed is None else options.seed
        self._options = replace(options, request_id=options.request_id or uuid.uuid4().hex, seed=seed)
        self._token_ids = list(options.resume.token_ids) if options.resume else []
        self._num_before = options.resume.num_tokens if options.resume else 0
        self._num_seen = self._num_before
        self._is_started = False
        self._is_broken = False
        self._num_calls = 0
        self._num_prompt = self._num_prompt_seen = 0  # tokens with log-probabilities, of this call and of all
        self._seams: list[str] = []

    def next_options(self) -> g.GenerateOptions:
        """Options of the next call: the original ones first, later with the progress to resume from."""
        self._num_calls += 1
        if self._num_calls == 1:
            return self._options
        knows_all = len(self._token_ids) == self._num_seen
        return replace(self._options, resume=g.Resume(self._num_seen, tuple(self._token_ids) if knows_all else ()))

    def take(self, event: g.Event) -> g.Event | None:
        """The event for the caller; None for a repeated Started."""
        match event:
            case g.Started():
                self._is_broken, self._num_prompt = False, 0
                is_first, self._is_started = not self._is_started, True
                return event if is_first else None
            case g.PromptLogprobs():
                return self._new_of_prompt(event)
            case g.Tokens():
                self._token_ids += event.token_ids
                self._num_seen += len(event.token_ids)
                return event
            case g.Finished():
                return replace(event, warnings=(*self._seams, *event.warnings))

    def _new_of_prompt(self, event: g.PromptLogprobs) -> g.PromptLogprobs | None:
        """The part of `event` that no earlier call has reported; None if there is none."""
        num_known = min(max(0, self._num_prompt_seen - self._num_prompt), len(event.token_ids))
        self._num_prompt += len(event.token_ids)
        self._num_prompt_seen = max(self._num_prompt_seen, self._num_prompt)
        num_new = len(event.token_ids) - num_known
        if not num_new:
            return None
        logprobs = event.logprobs[max(0, len(event.logprobs) - num_new) :]
        return g.PromptLogprobs(event.token_ids[num_known:], logprobs)

    def broke(self, exc: BoughError) -> None:
        """Record that a call has failed; the first failure after each start adds a warning to Finished."""
        if self._is_started and not self._is_broken:
            num_tokens = self._num_seen - self._num_before
            self._seams.append(f"the stream broke after {num_tokens} tokens and was resumed: {exc}")
            self._is_broken = True


class RetryWindow:
    """Exponential backoff between attempts, limited in time since the first failure without progress."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Reset after progress."""
        self._num_lost = 0  # connections
        self._failed_at: float | None = None  # time of the first failure since progress, on the monotonic clock
        self._cause: Unavailable | Exhausted | None = None  # that failure; later ones are often its consequences
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def wait(self, exc: Unavailable | Exhausted, most_seconds: float, *, is_known: bool = True) -> None:
        """Sleep before the next attempt, for the time in the error if it has one.

        The first failure since progress is logged, if a server `is_known` to have been there.

        Raises the first failure since progress if the sleep would end more than `most_seconds` after it, and NoAnswer
        if MOST_LOST connections were lost since.
        """
        self._num_lost += isinstance(exc, NoAnswer) and exc.was_connected
        if self._num_lost >= MOST_LOST:
            raise NoAnswer(
                f"{exc}; the request is not sent again, as its connection was lost {self._num_lost} times in a row "
                "without a new token",
                was_connected=True,
            ) from exc
        is_first = self._failed_at is None
        self._failed_at = self._failed_at or time.monotonic()
        self._cause = self._cause or exc
        requested = getattr(exc, "retry_seconds", None)
        # Jitter, so that clients disconnected at once do not all return at once.
        seconds = requested if requested is not None else self._pause_seconds * random.uniform(0.5, 1.0)
        if time.monotonic() + seconds > self._failed_at + most_seconds:
            raise self._cause
        if is_first and is_known:
            what = "no capacity" if isinstance(exc, Exhausted) else "connection lost"
            logger.warning("%s, trying again for at most %g s: %s", what, most_seconds, exc)
        await asyncio.sleep(seconds)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
