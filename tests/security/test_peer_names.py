"""A caller whose certificate has another name gets nothing done, even one that takes no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from bough.security.auth_interceptor import PeerNames


class Gone:
    """The context of a call whose caller shows a name, and has gone or does not read: no status reaches it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [self._name.encode()]}

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError("the caller has gone")


@pytest.mark.parametrize(("name", "is_done"), [("process", True), ("other", False)])
async def test_a_call_that_cannot_be_refused_is_not_executed(name: str, is_done: bool) -> None:
    """What an interceptor returned from after an abort that came to nothing was the call itself."""
    done: list[Any] = []

    async def answer(request: Any, _: Any) -> None:
        done.append(request)

    async def stream(request: Any, _: Any) -> Any:
        done.append(request)
        yield request

    async def whichever(details: Any) -> Any:
        return details.handler

    for handler in (grpc.unary_unary_rpc_method_handler(answer), grpc.unary_stream_rpc_method_handler(stream)):
        details = SimpleNamespace(method="/bough.v1.Target/Verify", handler=handler)
        guarded = await PeerNames(frozenset(["process"])).intercept_service(whichever, details)
        if guarded.unary_unary:
            await guarded.unary_unary("request", Gone(name))
        else:
            _ = [reply async for reply in guarded.unary_stream("request", Gone(name))]
    assert len(done) == (2 if is_done else 0)
