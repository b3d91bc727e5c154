"""Errors in OpenAI's form; the only place that maps errors to HTTP statuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from bough.errors import (
    AlreadyRunning,
    BoughError,
    ContextExceeded,
    DeadlineExceeded,
    Exhausted,
    FieldError,
    InvalidRequest,
    NotFound,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)
from bough.runtime.log_lines import bounded

logger = logging.getLogger(__name__)

Json = dict[str, object]

MAX_MESSAGE = 2048  # approximate limit of a message in bytes, for any request
MAX_PARAM = 256
INVALID = "invalid_request_error"
CONTEXT_EXCEEDED = "context_length_exceeded"  # agents shorten the conversation and retry
UNAVAILABLE_RETRY_SECONDS = 1.0  # after which a worker or the index may answer again


class ApiError(Exception):
    """A refusal in the form that a client gets."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        """`param` is the invalid field; `retry_seconds` is the delay after which the request may be repeated."""
        self.status, self.message, self.kind, self.code = status, bounded(message, MAX_MESSAGE), kind, code
        super().__init__(self.message)
        self.param = None if param is None else bounded(param, MAX_PARAM)
        self.retry_seconds = retry_seconds

    def body(self) -> Json:
        """The JSON object that OpenAI's clients expect."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response, with the retry delay if there is one."""
        headers = {}
        if self.retry_seconds is not None:
            headers["retry-after"] = str(math.ceil(self.retry_seconds))
            headers["retry-after-ms"] = str(math.ceil(self.retry_seconds * 1000))
        elif self.status == HTTPStatus.CONFLICT:
            headers["x-should-retry"] = "false"  # OpenAI's clients would repeat the request, with the same result
        elif self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def invalid(field: str, value: object, must: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> ApiError:
    """The refusal of a field's value; `must` completes "must ..."."""
    return ApiError(status, f"{field}: must {must}, got {shortened(value)}", param=field)


def shortened(value: object) -> str:
    """A client's value, cut to fit a message."""
    if value is None:
        return "null"
    text = repr(value[:64]) if isinstance(value, str | list) else repr(value)
    is_whole = len(text) <= 64 and not (isinstance(value, str | list) and len(value) > 64)
    return text if is_whole else text[:64] + "..."


def api_error(exc: Exception, names: Mapping[str, str]) -> ApiError:
    """The refusal for an exception. `names` maps names of gRPC fields to those of HTTP."""
    param = None
    if isinstance(exc, FieldError) and exc.field:
        exc = exc.named(param := _http_name(exc.field, names))
    match exc:
        case ApiError():
            return exc
        case InvalidRequest():
            code = CONTEXT_EXCEEDED if isinstance(exc, ContextExceeded) else None
            return ApiError(HTTPStatus.BAD_REQUEST, str(exc), param=param, code=code)
        case Unauthenticated():
            return ApiError(HTTPStatus.UNAUTHORIZED, str(exc), code="invalid_api_key")
        case NotFound():
            code = "model_not_found" if param == "model" else "not_found"
            return ApiError(HTTPStatus.NOT_FOUND, str(exc), param=param, code=code)
        case Exhausted(retry_seconds=seconds):
            code = "rate_limit_exceeded"
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(exc), "rate_limit_error", None, code, seconds)
        case AlreadyRunning():
            return ApiError(HTTPStatus.CONFLICT, str(exc), "conflict_error", param, "already_running")
        case StaleEpoch():
            return ApiError(HTTPStatus.CONFLICT, str(exc), "conflict_error", "session_id", "session_moved")
        case DeadlineExceeded():
            return ApiError(HTTPStatus.GATEWAY_TIMEOUT, str(exc), "server_error", None, "deadline_exceeded")
        case Unavailable():
            code, seconds = "unavailable", UNAVAILABLE_RETRY_SECONDS
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(exc), "server_error", None, code, seconds)
    logger.error("an unexpected error ended a request", exc_info=exc)
    text = str(exc) if isinstance(exc, BoughError) else "an unexpected error; the orchestrator's log has the details"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, text, "server_error", None, "internal_error")


def _http_name(field: str, names: Mapping[str, str]) -> str:
    """A field's name over HTTP: replaces its longest known prefix."""
    beginnings = [name for name in names if field.startswith(name) and field[len(name) : len(name) + 1] in ("", *".[")]
    known = max(beginnings, key=len, default="")
    return names.get(known, "") + field.removeprefix(known)
