"""Requests as those see them who call: each key's holder is a tenant, to whom nothing of another's is known.

A tenant's names of requests and sessions stand behind its own everywhere inside, in the index and at workers, so that
no two tenants' can be the same, and a name of another's is one that nobody has ever had. Without keys all is one
tenant's.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

from bough.errors import BoughError
from bough.protocol.decision import Decision
from bough.protocol.generation import Event, Finished, GenerateOptions, Prompt, Started
from bough.security.api_keys import ApiKey
from bough.security.keyring import Keyring
from bough.security.worker_key import WorkerKey
from bough.telemetry.spans import NO_TRACER, Tracer
from orchestrator.admission.size_limits import require_name, require_texts
from orchestrator.admission.tenant_usage import Usage
from orchestrator.serving.requests import Requests
from orchestrator.telemetry.request_trace import request_trace

SEPARATOR = "::"  # no tenant's name has a colon


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one key's holder may do, by its own names."""

    requests: Requests
    usage: Usage
    key: ApiKey | None = None  # None where there are no keys
    shares_prefixes: bool = False  # with other tenants
    tracer: Tracer = NO_TRACER

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """As `Requests.generate`, and Exhausted where the key allows no more."""
        require_texts(prompt, options)
        request_id = options.request_id or uuid.uuid4().hex
        session_id = self._inner(options.session_id) if options.session_id else ""
        salt = options.cache_salt if self.shares_prefixes else self._inner(options.cache_salt)
        inner = replace(options, request_id=self._inner(request_id), session_id=session_id, cache_salt=salt)
        counted = nullcontext(_uncounted) if self.key is None else self.usage.request(self.key, options.session_id)
        with self._outer_names(), counted as count, request_trace(self.tracer, inner) as trace:
            async with aclosing(self.requests.generate(prompt, inner, timeout_seconds)) as events:
                async for event in events:
                    count(event)
                    trace.note(event)
                    if isinstance(event, Started):
                        await self._close_surplus()
                    yield self._outer(event, request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request at once. Raises NotFound."""
        with self._outer_names():
            self.requests.abort(self._inner(request_id))

    async def close_session(self, session_id: str) -> None:
        """As `Requests.close_session`."""
        require_name("session_id", session_id)
        with self._outer_names():
            await self.requests.close_session(self._inner(session_id) if session_id else "")
        if self.key is not None:
            self.usage.forget(self.key, session_id)

    def decisions(self, name: str) -> Sequence[Decision]:
        """As `Requests.decisions`; without a name those of the tenant's own request that began last."""
        last = self.requests.last_request(self._prefix)
        with self._outer_names():
            return self.requests.decisions(self._inner(name) if name else last or self._prefix)

    async def _close_surplus(self) -> None:
        """Closes those sessions that the tenant has beyond what its key allows, where the index can be told."""
        if self.key is not None and not self.requests.directory.index_problem:
            for name in self.usage.surplus(self.key):
                with suppress(BoughError):  # it has ended by itself
                    await self.requests.close_session(self._inner(name))

    @property
    def _prefix(self) -> str:
        return "" if self.key is None else f"{self.key.name}{SEPARATOR}"

    def _inner(self, name: str) -> str:
        return self._prefix + name

    def _outer(self, event: Event, request_id: str) -> Event:
        match event:
            case Started():
                return replace(event, request_id=request_id)
            case Finished(warnings=warnings) if warnings and self._prefix:
                return replace(event, warnings=tuple(text.replace(self._prefix, "") for text in warnings))
        return event

    @contextmanager
    def _outer_names(self) -> Iterator[None]:
        """What is refused is refused in the caller's own names."""
        try:
            yield
        except BoughError as exc:
            if self._prefix:
                exc.args = tuple(arg.replace(self._prefix, "") if isinstance(arg, str) else arg for arg in exc.args)
            raise


@dataclass(slots=True)
class Callers:
    """Who may call."""

    requests: Requests
    keyring: Keyring | None = None  # None lets everybody in, as one tenant
    share_prefixes: bool = False  # what is computed of one tenant's prompts serves others too
    worker_key: WorkerKey | None = None  # its holders, who watch over processes, may ask how all is, and nothing else
    tracer: Tracer = NO_TRACER
    _usage: Usage = field(default_factory=Usage)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follows the file of keys, where there is one, for as long as the block runs."""
        async with nullcontext() if self.keyring is None else self.keyring.file.watched():
            yield

    def refresh(self) -> None:
        """Reads the keys again, where there are any. What runs goes on, whoever has begun it."""
        if self.keyring is not None:
            self.keyring.file.refresh(is_forced=True)

    def admit(self, authorization: Iterable[str | bytes]) -> None:
        """Raises Unauthenticated for who is neither a tenant nor one of bough's own processes."""
        shown = list(authorization)
        if self.worker_key is None or not self.worker_key.is_shown(shown):
            self.tenant(shown)

    def tenant(self, authorization: Iterable[str | bytes]) -> Tenant:
        """Who calls, by all values of that header.

        Raises:
            Unauthenticated: nobody who may.
        """
        key = None if self.keyring is None else self.keyring.holder(authorization)
        return Tenant(self.requests, self._usage, key, self.share_prefixes, self.tracer)


def _uncounted(event: Event) -> None:
    """Nobody counts."""
