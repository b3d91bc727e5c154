"""Names every answer, and what is logged and traced of its request."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.telemetry.call_context import TRACEPARENT, set_caller_traceparent
from bough.telemetry.log_context import LogContext, set_log_context

REQUEST_ID = b"x-request-id"
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Adds `x-request-id` to every answer, the client's own if valid, and notes it and the client's trace for logs."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        given = dict(scope.get("headers", ())).get(REQUEST_ID, b"")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex.encode()
        set_log_context(LogContext(http_request_id=name.decode()))
        set_caller_traceparent(Headers(scope=scope).getlist(TRACEPARENT))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, name)]
            await send(message)

        await self.app(scope, receive, send_named)
