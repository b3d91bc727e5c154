"""Tenants: the holder of each key sees only its own requests and sessions.

Inside bough, ids of requests and sessions have the tenant and the client's name, in the index and at workers too. So
ids of different tenants never collide, and another tenant's id is unknown. Without keys there is one tenant.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

from bough.errors import BoughError, Exhausted, NotFound, Unauthenticated
from bough.protocol.decision import Decision
from bough.protocol.generation import Event, GenerateOptions, Prompt, Started, Tokens
from bough.protocol.ids import ScopedId
from bough.security.keys import ApiKey, Keyring, WorkerKey
from bough.telemetry.tracing import NO_TRACER, Tracer
from orchestrator.admission.admission import Hold
from orchestrator.admission.size_limits import require_name, require_texts
from orchestrator.serving.requests import Requests
from orchestrator.telemetry.request_watch import KEY_LIMIT, request_trace

MINUTE_SECONDS = 60.0
MAX_SESSIONS = 10_000  # of a tenant whose key sets none: a tenth of what the index keeps
RETRY_SECONDS = 1.0  # after which one of the tenant's running requests may have ended


Count = Callable[[Event], None]  # is called with each event of a request


@dataclass(slots=True)
class _Session:
    """A named session of a tenant."""

    num_running: int = 0  # requests that wait for a place, or have one
    has_begun: bool = False  # whether one of its requests has begun; if not, the last one drops the session


@dataclass(slots=True)
class _Account:
    """The account of one tenant."""

    num_running: int = 0
    num_owed: float = 0.0  # used tokens, minus the rate limit's tokens for the time since
    settled_at: float = 0.0  # seconds on the clock
    sessions: dict[str, _Session] = field(default_factory=dict)  # by name; last used last

    def settle(self, now: float, per_minute: int) -> None:
        """Deduct the rate limit's tokens for the time since the last update."""
        paid = (now - self.settled_at) * per_minute / MINUTE_SECONDS
        self.num_owed, self.settled_at = max(0.0, self.num_owed - paid), now


@dataclass(slots=True)
class TenantUsage:
    """All tenants' accounts. Requests are accepted while a tenant owes less than a minute's tokens."""

    clock: Callable[[], float] = time.monotonic
    _accounts: dict[str, _Account] = field(default_factory=dict)

    @contextmanager
    def request(self, key: ApiKey, session: str = "", num: int = 1) -> Iterator[Count]:
        """Count `num` requests of one call, in a named session or in none.

        The block gets a function to be called with each event.

        Raises:
            Exhausted: the tenant has reached its limit of requests, sessions or tokens; has a retry delay.
        """
        account = self._account(key)
        self._require_room(key, account, session, num)
        account.num_running += num
        running = account.sessions.pop(session, None) or _Session()
        running.num_running += 1
        if session:
            account.sessions[session] = running

        def observe(event: Event) -> None:
            running.has_begun |= isinstance(event, Started)
            self._observe(account, key, event)

        try:
            yield observe
        finally:
            account.num_running -= num
            running.num_running -= 1
            if not running.num_running and not running.has_begun:
                account.sessions.pop(session, None)

    def surplus(self, key: ApiKey) -> list[str]:
        """The least recently used idle sessions beyond a tenant's limit, to be closed and forgotten."""
        sessions = self._accounts[key.name].sessions
        num_begun = sum(session.has_begun for session in sessions.values())
        idle = [name for name, session in sessions.items() if not session.num_running]
        return idle[: max(0, num_begun - _most_sessions(key))]

    def forget(self, key: ApiKey, name: str) -> None:
        """Remove a session that was closed, once no request runs in it."""
        account = self._accounts.get(key.name)
        if account is None or (session := account.sessions.get(name)) is None:
            return
        session.has_begun = False
        if not session.num_running:
            del account.sessions[name]

    def _require_room(self, key: ApiKey, account: _Account, session: str, num: int) -> None:
        others = (one for name, one in account.sessions.items() if name != session)
        if session and (num_busy := sum(one.num_running > 0 for one in others)) >= _most_sessions(key):
            raise Exhausted(f"sessions: a request runs in each of this key's {num_busy} sessions", RETRY_SECONDS)
        if key.requests and account.num_running + num > key.requests:
            limit = f"and {num} more are above its limit of {key.requests}"
            raise Exhausted(f"requests: {account.num_running} of this key run, {limit}", RETRY_SECONDS)
        if not key.tokens_per_minute:
            return
        account.settle(self.clock(), key.tokens_per_minute)
        beyond = account.num_owed - key.tokens_per_minute
        if beyond >= 0:
            seconds = max(RETRY_SECONDS, beyond * MINUTE_SECONDS / key.tokens_per_minute)
            raise Exhausted(
                f"tokens_per_minute: this key's {key.tokens_per_minute} are used; more in {seconds:.1f} s", seconds
            )

    def _observe(self, account: _Account, key: ApiKey, event: Event) -> None:
        """Count the prompt on Started, and output as it comes."""
        match event:
            case Started():
                used = event.prompt_tokens
            case Tokens():
                used = len(event.token_ids)
            case _:  # the prompt of `PromptLogprobs` has been counted
                return
        self._charge(account, key, used)

    def charge(self, key: ApiKey, num_tokens: int) -> None:
        """Count tokens of a request that was refused."""
        self._charge(self._account(key), key, num_tokens)

    def _charge(self, account: _Account, key: ApiKey, num_tokens: int) -> None:
        if key.tokens_per_minute:
            account.settle(self.clock(), key.tokens_per_minute)
            account.num_owed += num_tokens

    def _account(self, key: ApiKey) -> _Account:
        return self._accounts.setdefault(key.name, _Account(settled_at=self.clock()))


def _most_sessions(key: ApiKey) -> int:
    return key.sessions or MAX_SESSIONS


@dataclass(frozen=True, slots=True)
class Tenant:
    """Operations of one key's holder, with ids as the holder knows them."""

    requests: Requests
    usage: TenantUsage
    key: ApiKey | None = None  # None if there are no keys
    shares_prefixes: bool = False  # with other tenants
    tracer: Tracer = NO_TRACER

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """Yield the events of a request. Raises what `Requests.generate` does, and Exhausted at the key's limits."""
        with self.together([(prompt, options)], timeout_seconds) as (stream,):
            async with aclosing(stream) as events:
                async for event in events:
                    yield event

    @contextmanager
    def together(
        self, wanted: Sequence[tuple[Prompt, GenerateOptions]], timeout_seconds: float | None = None
    ) -> Iterator[list[AsyncGenerator[Event]]]:
        """The events of each request of one call. Either all are admitted or none.

        Requests with the same prompt object are choices: their options differ only in ids and seeds. Raises Exhausted
        or Unavailable if there is no room; each stream raises what `generate` does.
        """
        for prompt, options in {id(prompt): (prompt, options) for prompt, options in wanted}.values():
            require_texts(prompt, options)
        with self._counted(wanted[0][1].session_id, len(wanted)) as count, self._held(len(wanted)) as holds:
            yield [
                self._generated(prompt, options, count, hold, timeout_seconds)
                for (prompt, options), hold in zip(wanted, holds, strict=True)
            ]

    @contextmanager
    def decoding(self, num_tokens: int) -> Iterator[None]:
        """Count a large message as a request while it is decoded; a refused one is charged this number of tokens.

        Raises Exhausted at the key's limits.
        """
        with self._counted("", 1):
            try:
                yield
            except Exception:
                if self.key is not None:
                    self.usage.charge(self.key, num_tokens)
                raise

    @property
    def name(self) -> str:
        """The key holder's name; empty if there are no keys."""
        return "" if self.key is None else self.key.name

    @property
    def most_at_once(self) -> int:
        """The most requests of one call that can ever be admitted together."""
        admission = self.requests.admission
        most = admission.max_running + admission.max_waiting
        return min(most, self.key.requests) if self.key is not None and self.key.requests else most

    async def _generated(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        count: Count,
        hold: Hold | None,
        timeout_seconds: float | None,
    ) -> AsyncGenerator[Event]:
        salt = options.cache_salt if self.shares_prefixes else str(self._id(options.cache_salt))
        options = replace(options, request_id=options.request_id or uuid.uuid4().hex, cache_salt=salt)
        with request_trace(self.tracer, options, self._id(options.request_id), self._id(options.session_id)):
            generated = self.requests.generate(prompt, options, timeout_seconds, hold, self.name)
            async with aclosing(generated) as events:
                async for event in events:
                    count(event)
                    if isinstance(event, Started):
                        await self._close_surplus()
                    yield event

    @contextmanager
    def _counted(self, session_id: str, num: int) -> Iterator[Count]:
        if self.key is None:
            yield lambda _: None
            return
        with ExitStack() as entered:
            try:
                count = entered.enter_context(self.usage.request(self.key, session_id, num))
            except Exhausted:
                self.requests.totals.failed[KEY_LIMIT] += 1
                raise
            yield count

    @contextmanager
    def _held(self, num: int) -> Iterator[Sequence[Hold | None]]:
        """Places or turns for several requests; a single one takes its own after its checks."""
        if num == 1:
            yield (None,)
            return
        with ExitStack() as place:
            try:
                holds = place.enter_context(self.requests.admission.together(num))
            except BoughError as exc:
                self.requests.totals.failed[type(exc).__name__] += 1
                raise
            yield holds

    def abort(self, request_id: str) -> None:
        """End a request at once. Raises NotFound."""
        self.requests.abort(self._id(request_id))

    async def close_session(self, session_id: str) -> None:
        """Forget a session of the tenant's; a running request of it ends. Raises what `Requests.close_session` does."""
        require_name("session_id", session_id)
        await self.requests.close_session(self._id(session_id))
        if self.key is not None:
            self.usage.forget(self.key, session_id)

    def decisions(self, name: str) -> Sequence[Decision]:
        """The last rounds of a session or request of the tenant's; by an empty name of its latest. Raises NotFound."""
        return self.requests.decisions(self._id(name))

    async def _close_surplus(self) -> None:
        """Closes a tenant's sessions beyond its key's limit, while the index is reachable."""
        if self.key is not None and not self.requests.directory.index_problem:
            for name in self.usage.surplus(self.key):
                if name not in self.usage.surplus(self.key):
                    continue  # while another was closed, a request began in it, or somebody else closed it
                with suppress(BoughError):  # the index or a worker does not answer: try again
                    with suppress(NotFound):  # it has ended by itself
                        await self.requests.close_session(self._id(name))
                    self.usage.forget(self.key, name)

    def _id(self, name: str) -> ScopedId:
        return ScopedId(name, self.name)


@dataclass(slots=True)
class Callers:
    """Authenticates callers."""

    requests: Requests
    keyring: Keyring | None = None  # None admits everybody, as one tenant
    share_prefixes: bool = False  # tenants may reuse each other's cached prefixes
    worker_key: WorkerKey | None = None  # its holders may only check health
    tracer: Tracer = NO_TRACER
    _usage: TenantUsage = field(default_factory=TenantUsage)

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Watch the file of keys, if there is one, during the block."""
        return nullcontext() if self.keyring is None else self.keyring.file.watched()

    def refresh(self) -> None:
        """Read the keys again, if there are any. Running requests continue."""
        if self.keyring is not None:
            self.keyring.file.refresh(is_forced=True)

    def admit(self, authorization: Iterable[str | bytes]) -> str:
        """The tenant's name; empty for bough's own processes. Raises Unauthenticated for anybody else."""
        shown = list(authorization)
        if self.worker_key is not None and self.worker_key.is_shown(shown):
            return ""
        return self.tenant(shown).name

    def tenant(self, authorization: Iterable[str | bytes]) -> Tenant:
        """The tenant that calls, from all values of the authorization header. Raises Unauthenticated."""
        try:
            key = None if self.keyring is None else self.keyring.holder(authorization)
        except Unauthenticated as exc:
            self.requests.totals.failed[type(exc).__name__] += 1
            raise
        return Tenant(self.requests, self._usage, key, self.share_prefixes, self.tracer)
