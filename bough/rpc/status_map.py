"""Maps errors to gRPC statuses and back; the only place that knows which error is which status.

gRPC has one status for all failed TLS connections, with its TLS library's text. Here it is translated into what a
client can change.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from bough import errors
from bough.errors import BoughError, Exhausted, FieldError, InvalidRequest, PrefixMissing, StaleEpoch
from bough.rpc.services import ServicerContext
from bough.runtime.log_lines import bounded

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

STATUS_OF: dict[type[BoughError], grpc.StatusCode] = {
    errors.ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidTree: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidCurve: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyRunning: grpc.StatusCode.ABORTED,
    errors.PrefixMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PairingError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.Preempted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.AcceleratorFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.AcceleratorLost: grpc.StatusCode.UNAVAILABLE,
    errors.RingLost: grpc.StatusCode.UNAVAILABLE,
    errors.StreamError: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
}
ERROR_NAMES = {kind.__name__: kind for kind in STATUS_OF}
ERROR_KEY, LENGTH_KEY, HASH_KEY = "bough-error", "bough-held-length", "bough-held-hash"  # trailing metadata
EPOCH_KEY = "bough-epoch"
FIELD_KEY, GOT_KEY = "bough-field-bin", "bough-got-bin"  # parts of the text, in UTF-8
MAX_PART_BYTES = 512  # longer parts are only in the text
DETAILS_KEY = "grpc-status-details-bin"  # a google.rpc.Status, which any gRPC client can read
ABORT_SECONDS = 1.0  # longest wait to send a status to a peer that does not read
AUTHORITY = "--tls-ca (BOUGH_TLS_CA)"
MEANINGS = (  # meanings of words in gRPC's details; the first match counts
    ("certificate has expired", "its certificate must be valid now"),
    ("CERTIFICATE_VERIFY_FAILED", f"its certificate must be of the authority in {AUTHORITY}"),
    ("Hostname Verification", "its certificate must have the name in the address"),
    (
        "WRONG_VERSION_NUMBER",
        f"it does not speak TLS: the address must have no grpcs://, and {AUTHORITY} must not be given",
    ),
    ("http1.x server", "it speaks HTTP: the address must be that of the gRPC API, such as 127.0.0.1:7411"),
)
CONNECTION_REFUSED, REFUSED = "Connection refused", "nothing listens there"
CONNECTING = "failed to connect"
CLOSED = ("Socket closed", "Connection reset", "recvmsg")  # after the connection was established
CLOSED_MEANING = (
    f"if it speaks TLS, the address must be grpcs://HOST:PORT, or {AUTHORITY} must be given; if it requires a "
    "certificate, also --tls-cert and --tls-key"
)


def to_error(exc: grpc.aio.AioRpcError | grpc.Call, address: str) -> BoughError:
    """The error that a peer reported, or the one for no answer."""
    metadata = dict(tuple(exc.trailing_metadata() or ()))  # pairs: it iterates over them, unlike a mapping
    details = exc.details() or exc.code().name
    kind = ERROR_NAMES.get(str(metadata.get(ERROR_KEY)))
    if kind is PrefixMissing:
        return PrefixMissing(details, _natural(metadata.get(LENGTH_KEY)), _natural(metadata.get(HASH_KEY)))
    if kind is StaleEpoch:
        return StaleEpoch(details, _natural(metadata.get(EPOCH_KEY)))
    if kind is Exhausted:
        return Exhausted(details, _retry_seconds(metadata.get(DETAILS_KEY)))
    if kind is not None and issubclass(kind, FieldError):
        return _of_field(kind, details, _text(metadata.get(FIELD_KEY)), _text(metadata.get(GOT_KEY)))
    if kind is not None:
        return kind(details)
    if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        silence = REFUSED if CONNECTION_REFUSED in details else f"{exc.code().name}: {explained(details)}"
        return errors.NoAnswer(f"{address} does not answer: {silence}", was_connected=CONNECTING not in details)
    if exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:  # gRPC's own message
        return InvalidRequest("message", f"must have at most {MAX_MESSAGE_BYTES} bytes, got: {details}")
    if exc.code() is grpc.StatusCode.UNAUTHENTICATED:  # from a proxy
        return errors.Unauthenticated(f"{address}: {details}")
    return BoughError(f"{address}: {exc.code().name}: {details}")


def _of_field(kind: type[FieldError], details: str, field: str, got: str) -> FieldError:
    """The error with this text; a part that is missing in the metadata stays in the problem."""
    whole = details.removeprefix(f"{field}: ") if field else details
    problem = whole.removesuffix(f", got {got}")
    return kind(field, problem, None if problem == whole else got)


def _natural(value: object) -> int:
    """A number in metadata; 0 if invalid."""
    is_number = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20
    return int(str(value)) if is_number else 0


def _text(value: object) -> str:
    """A text in binary metadata; empty if there is none."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _retry_seconds(details: object) -> float | None:
    """The retry delay in a google.rpc.Status; None if there is none or it cannot be decoded."""
    if not isinstance(details, bytes):
        return None
    info = error_details_pb2.RetryInfo()
    with suppress(DecodeError):
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None


def _retry_details(code: grpc.StatusCode, text: str, retry_seconds: float) -> bytes:
    """A google.rpc.Status with a retry delay."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(retry_seconds * 1e9))
    status = status_pb2.Status(code=code.value[0], message=text)
    status.details.add().Pack(info)
    return bytes(status.SerializeToString())


async def abort(context: ServicerContext, exc: Exception, timeout_seconds: float | None = ABORT_SECONDS) -> None:
    """End a call with the status of an error; without a timeout this waits until it was sent or the peer has gone."""
    code = next((STATUS_OF[kind] for kind in type(exc).__mro__ if kind in STATUS_OF), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        logger.error("an unexpected error ended a call", exc_info=exc)
    free_frames(exc)
    text = bounded(str(exc)) or type(exc).__name__
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KEY, type(exc).__name__)]
    if isinstance(exc, PrefixMissing):
        metadata += [(LENGTH_KEY, str(exc.held_length)), (HASH_KEY, str(exc.held_hash))]
    if isinstance(exc, FieldError):
        parts = [(FIELD_KEY, exc.field.encode(errors="replace")), (GOT_KEY, (exc.got or "").encode(errors="replace"))]
        metadata += [(key, part) for key, part in parts if 0 < len(part) <= MAX_PART_BYTES]
    if isinstance(exc, StaleEpoch):
        metadata.append((EPOCH_KEY, str(exc.newest)))
    if isinstance(exc, Exhausted) and exc.retry_seconds is not None:
        metadata.append((DETAILS_KEY, _retry_details(code, text, exc.retry_seconds)))
    with suppress(TimeoutError, grpc.aio.InternalError):  # do not wait for a peer that does not read or has gone
        async with asyncio.timeout(timeout_seconds):
            await context.abort(code, text, tuple(metadata))


def free_frames(exc: BaseException | None) -> None:
    """Free the local variables of an error's frames, such as a decoded message, while its status is sent."""
    while exc is not None:
        exc.__traceback__ = None
        exc = exc.__cause__ or exc.__context__


def explained(details: str) -> str:
    """gRPC's details of a failed call, with an explanation if they are about TLS."""
    meanings = [text for words, text in MEANINGS if words in details]
    if CONNECTING in details and any(words in details for words in CLOSED):
        meanings.append(CLOSED_MEANING)
    return f"{meanings[0]}; got: {details}" if meanings else details
