"""Reads and parses request bodies, within a memory limit shared by all requests."""

from __future__ import annotations

import asyncio
import codecs
from collections import Counter
from contextlib import ExitStack, nullcontext
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from bough.config.json_fields import first_refusal
from bough.errors import ContextExceeded, Exhausted
from bough.rpc.status_map import MAX_MESSAGE_BYTES
from bough.runtime.connections import connection_limit
from orchestrator.admission.call_limiter import BYTES_PER_TOKEN, GENERATE, CallLimiter
from orchestrator.http_api.fields.errors import ApiError, api_error, invalid, shortened
from orchestrator.http_api.guard import tenant_of
from orchestrator.serving.tenants import Tenant

MAX_BODY_BYTES = MAX_MESSAGE_BYTES  # as much as over gRPC
MAX_ALL_BYTES = 16 * MAX_BODY_BYTES  # limit of all bodies together that are arriving or being parsed
LARGE_BYTES = 32 * 1024  # larger bodies are parsed in a thread, so as not to block the event loop
MAX_ENTRIES = 65_536  # objects, arrays and strings of one body, which take up to 100 ms to parse
MAX_VALUES = 1 << 20  # values of all kinds; nearly all of them are then numbers
READ_SECONDS = 60.0  # limit for a body to arrive
NUM_SHARES = 2  # of several tenants, each may use this share of the bytes and connections for arriving bodies
RETRY_SECONDS = 1.0

Body = TypeVar("Body", bound=BaseModel)


class BodyReader:
    """Reads bodies within the shared memory limit."""

    def __init__(self, call_limiter: CallLimiter) -> None:
        self._call_limiter = call_limiter
        self._num_bytes: Counter[str] = Counter()  # bytes of bodies that are read or parsed, by tenant
        self._arriving: Counter[str] = Counter()  # bodies that are read, by tenant
        self._parsing = asyncio.Lock()  # one large body at a time, as parsing takes CPU time from the streams

    async def read(self, request: Request, kind: type[Body], entered: ExitStack, method: str) -> Body:
        """Read the fields of a request, which counts as a call of `method` until `entered` is closed.

        Raises ApiError for a body that is too large, not JSON, or has an invalid field. Raises Exhausted for too many
        bodies, or a large one of a key at its limits; a refused large one is charged tokens of the key.
        """
        _require_json(request)
        _require_size(_announced_bytes(request))
        tenant, chunks = tenant_of(request), list[bytes]()
        try:
            await self._receive(request, tenant, chunks)
            body = b"".join(chunks)
            self._enter(entered, method, len(body))
            if len(body) <= LARGE_BYTES:
                return parse(kind, body)
            is_counted = method == GENERATE
            with tenant.decoding(len(body) // BYTES_PER_TOKEN) if is_counted else nullcontext():
                async with self._parsing:
                    return await asyncio.to_thread(_parse_large, kind, body)
        finally:
            self._num_bytes[tenant.name] -= sum(map(len, chunks))

    def _enter(self, entered: ExitStack, method: str, num_bytes: int) -> None:
        try:
            entered.enter_context(self._call_limiter.entering(method, num_bytes))
        except ContextExceeded as exc:
            raise api_error(exc, {"message": "body"}) from exc

    async def _receive(self, request: Request, tenant: Tenant, chunks: list[bytes]) -> None:
        """Append the body to `chunks` as it arrives, and count its bytes."""
        self._arriving[tenant.name] += 1
        try:
            self._require_room(tenant)
            async with asyncio.timeout(READ_SECONDS):
                num_bytes = 0
                async for chunk in request.stream():
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    self._num_bytes[tenant.name] += len(chunk)
                    _require_size(num_bytes)
                    self._require_room(tenant)
        except TimeoutError as exc:
            message = f"body: must arrive within {READ_SECONDS:g} s, but is incomplete"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message) from exc
        except ClientDisconnect as exc:
            raise ApiError(HTTPStatus.BAD_REQUEST, "body: it ended half-way") from exc
        finally:
            self._arriving[tenant.name] -= 1

    def _require_room(self, tenant: Tenant) -> None:
        """Raise Exhausted if too many bytes, or bodies of this tenant, are arriving: slow ones would block others."""
        if self._num_bytes.total() > MAX_ALL_BYTES:
            message = f"body: {MAX_ALL_BYTES} bytes of other requests are being read; one of them must end first"
            raise Exhausted(message, RETRY_SECONDS)
        most = connection_limit(num_descriptors=2 * NUM_SHARES)
        is_beyond = self._arriving[tenant.name] > most or self._num_bytes[tenant.name] > MAX_ALL_BYTES // NUM_SHARES
        if tenant.name and is_beyond:
            share = f"{most} bodies of this key, of {MAX_ALL_BYTES // NUM_SHARES} bytes in all"
            raise Exhausted(f"body: {share}, may arrive at once; one of them must end first", RETRY_SECONDS)


def _require_json(request: Request) -> None:
    """Refuse compressed bodies, and content types that other sites' pages could make a browser send."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise invalid("content-encoding", encoding, "be left out", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid("content-type", kind, "be application/json", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


def _announced_bytes(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdecimal() else 0


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        message = f"body: must have at most {MAX_BODY_BYTES} bytes, got {num_bytes} or more"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


def _parse_large(kind: type[Body], body: bytes) -> Body:
    require_entries(body)
    return parse(kind, body)


def require_entries(body: bytes) -> None:
    """Refuse a JSON text of too many values before parsing it: a million of them would stall all streams."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # without escapes a quotation mark begins or ends a string
    num_entries = plain.count(b'"') // 2
    num_values = 0
    if num_entries <= MAX_ENTRIES:
        outside = b" ".join(plain.split(b'"')[::2])
        num_entries += outside.count(b"[") + outside.count(b"{")
        num_values = outside.count(b",")
    if num_entries > MAX_ENTRIES or num_values > MAX_VALUES:
        most = f"{MAX_ENTRIES} objects, arrays and strings, and {MAX_VALUES} values in all"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: must have at most {most}", code="body_too_large")


def parse(kind: type[Body], body: bytes) -> Body:
    """Parse a JSON text. Raises ApiError naming the first invalid field."""
    try:
        return kind.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as exc:
        refused = first_refusal(exc, shortened)
        if refused.field:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(refused), param=refused.field) from exc
        message = f"body: must be a JSON object, got {refused.problem if refused.got is None else refused.got}"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_json") from exc
