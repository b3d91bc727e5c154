"""Single calls with arbitrary headers, and their statuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import httpx
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

from bough.pb import common_pb2, draft_pb2, generation_pb2, target_pb2
from bough.security.keys import HEADER
from tests.fakes.fuzz import ordinary

SECONDS = 30.0
UNANSWERED = "no answer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Headers = Sequence[tuple[str, str]]


class Call(NamedTuple):
    """A method of a service, with a request."""

    method: str
    request: Message


def _calls(file: Any, service: str, **requests: Message) -> list[Call]:
    """All methods of a service, and some that do not exist."""
    described = file.DESCRIPTOR.services_by_name[service]
    calls = [
        Call(f"/{described.full_name}/{method.name}", requests.get(method.name) or method.input_type._concrete_class())
        for method in described.methods
    ]
    return [*calls, Call(f"/{described.full_name}/Other", RELEASE), Call("/other", RELEASE), Call(REFLECTION, _LISTED)]


RELEASE = common_pb2.ReleaseRequest(session_id="s")
_LISTED = reflection_pb2.ServerReflectionRequest(list_services="")
GENERATION = _calls(
    generation_pb2,
    "Generation",
    Generate=ordinary.GENERATE_TEXT,
    Abort=ordinary.ABORT,
    CloseSession=ordinary.CLOSE,
    GetDecisions=ordinary.DECISIONS,
)
TARGET = _calls(target_pb2, "Target", Verify=ordinary.VERIFY, Release=RELEASE)
DRAFT = _calls(draft_pb2, "Draft", Grow=ordinary.GROW, Release=RELEASE)
SERVICES = {"orchestrator": GENERATION, "target": TARGET, "draft": DRAFT}
GET_PATHS = (
    "/v1/models", "/v1/models/x", "/v1/responses/x", "/metrics", "/service-discovery", "/cluster", "/version",
    "/decisions/request", "/decisions/alice::request", "/nothing", "/health/", "//health", "/HEALTH",
    "/health/../v1/models", "/health%2f..%2fv1/models", "/ui/../cluster",
)  # fmt: skip
PATHS: Sequence[tuple[str, str]] = (
    *(("POST", path) for path in ordinary.BODIES),
    *(("GET", path) for path in GET_PATHS),
    ("OPTIONS", "/v1/completions"),
    ("HEAD", "/v1/models"),
    ("DELETE", "/v1/models"),
)


async def grpc_outcome(channel: grpc.aio.Channel, call: Call, headers: Headers = ()) -> str:
    """The status of a call; OK if it had a reply or kept running."""
    ask: Any = channel.unary_stream(call.method)  # a unary request is the same on the wire
    answer = ask(call.request.SerializeToString(), timeout=SECONDS, metadata=tuple(headers))
    try:
        await answer.read()
        answer.cancel()
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return grpc.StatusCode.OK.name


async def http_outcome(
    client: httpx.AsyncClient, method: str, path: str, headers: Headers = (), query: str = ""
) -> str:
    """The status of a request."""
    body = ordinary.BODIES.get(path, ({},))[-1]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    url = client.base_url.copy_with(raw_path=(path + query).encode())  # httpx would read //health as a host
    try:
        response = await client.request(
            method, url, headers=httpx.Headers(raw), json=body if method == "POST" else None
        )
    except httpx.HTTPError as exc:
        return f"{UNANSWERED}: {type(exc).__name__}"
    return str(response.status_code)


def bearer(key: str) -> list[tuple[str, str]]:
    """The authorization header of a key."""
    return [(HEADER, f"Bearer {key}")]
