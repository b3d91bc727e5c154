"""The HTTP routes: OpenAI's API, endpoints for operators, and the static page at /ui."""

from __future__ import annotations

import difflib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bough import __version__
from bough.errors import InvalidRequest, NotFound, Unavailable
from bough.protocol.generation import Event, ModelInfo, Prompt, TextPrompt
from bough.registry.records import WorkerRecord
from orchestrator.admission.call_limiter import GENERATE, TOKENIZE
from orchestrator.http_api import chat, completions
from orchestrator.http_api.answers.answer import Head, Spell, TokenBytes
from orchestrator.http_api.body import BodyReader
from orchestrator.http_api.exchange import Exchange, scored_first
from orchestrator.http_api.fields.errors import ApiError, Json, api_error, invalid
from orchestrator.http_api.fields.generation import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerationFields,
    RequestFields,
    TokenizeFields,
)
from orchestrator.http_api.fields.options import (
    RequestedOutput,
    RequestLimits,
    choices,
    constraint_names,
    template_kwargs,
)
from orchestrator.http_api.fields.tools import chat_tools, tools_of
from orchestrator.http_api.guard import Guard, HostGuard, RequestIds, tenant_of
from orchestrator.http_api.openapi import document
from orchestrator.http_api.responses import fields as response_fields
from orchestrator.http_api.responses.answer import ResponseAnswer, repeated
from orchestrator.http_api.responses.fields import NOT_KEPT, ResponseFields
from orchestrator.serving.requests import Requests
from orchestrator.serving.tenants import Callers

SESSION_HEADER = "x-session-id"
HEALTH, METRICS, DISCOVERY, OPENAPI = "/health", "/metrics", "/service-discovery", "/openapi.json"
MAX_COMPARED = 128  # characters of an unknown path
ROOT = "/"
PAGE = Path(__file__).parent / "page"
PAGE_FILES: Mapping[str, tuple[str, str]] = {  # by path: file, media type
    "/ui": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/dom.js": ("dom.js", "text/javascript"),
    "/ui/figures.js": ("figures.js", "text/javascript"),
    "/ui/tree.js": ("tree.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_HEADERS = {
    # Only these files may run or be shown.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
Endpoint = Callable[[Request, ExitStack], Awaitable[ASGIApp]]


def http_app(
    callers: Callers,
    figures: CollectorRegistry,
    *,
    has_open_figures: bool = False,
    has_page: bool = False,
    own_name: str | None = None,
) -> Starlette:
    """The ASGI application for these callers' requests; `figures` are served at /metrics, openly or to callers only.

    With `has_page` the page at /ui is served too. With `own_name` requests to other host names are refused.
    """
    requests = callers.requests
    api = _Api(requests, figures, BodyReader(requests.call_limiter))
    routes = [
        Route("/v1/chat/completions", _Answered(api.chat, chat.FIELD_NAMES), methods=["POST"]),
        Route("/v1/responses", _Answered(api.responses, response_fields.FIELD_NAMES), methods=["POST"]),
        Route("/v1/responses/{response_id:path}", _Answered(api.response), methods=["GET", "POST", "DELETE"]),
        Route("/v1/completions", _Answered(api.completions, completions.FIELD_NAMES), methods=["POST"]),
        Route("/v1/models", _Answered(api.models), methods=["GET"]),
        Route("/v1/models/{model:path}", _Answered(api.model), methods=["GET"]),
        Route("/tokenize", _Answered(api.tokenize, completions.FIELD_NAMES), methods=["POST"]),
        Route("/detokenize", _Answered(api.detokenize), methods=["POST"]),
        Route(HEALTH, _Answered(api.health), methods=["GET"]),
        Route(METRICS, _Answered(api.metrics), methods=["GET"]),
        Route(DISCOVERY, _Answered(api.service_discovery), methods=["GET"]),
        Route("/decisions/{name:path}", _Answered(api.decisions), methods=["GET"]),
        Route("/cluster", _Answered(api.cluster), methods=["GET"]),
        Route("/version", _Answered(api.version), methods=["GET"]),
        Route(OPENAPI, _Answered(api.openapi), methods=["GET"]),
        Route(ROOT, partial(_root, has_page=has_page), methods=["GET"]),
    ]
    open_paths = {ROOT, HEALTH, OPENAPI} | ({METRICS, DISCOVERY} if has_open_figures else set())
    if has_page:  # its requests carry the key that the user types there
        routes += [Route(path, _page_file, methods=["GET"]) for path in PAGE_FILES]
        open_paths |= PAGE_FILES.keys()
    layers = [Middleware(RequestIds), Middleware(Guard, callers=callers, open_paths=open_paths)]
    if own_name is not None:
        layers.insert(1, Middleware(HostGuard, own_name=own_name))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused}, middleware=layers)
    app.router.redirect_slashes = False  # posting clients follow redirects with GET, or not at all
    return app


class _Asked(NamedTuple):
    """The common parts of a parsed request of all paths that generate."""

    head: Head
    wanted: tuple[RequestedOutput, ...]
    spell: Spell | None  # if log-probabilities or the trees of rounds are requested
    streams: Callable[[], AbstractContextManager[list[AsyncGenerator[Event]]]]


@dataclass(frozen=True, slots=True)
class _Api:
    """The endpoints: decode, call, encode."""

    requests: Requests
    figures: CollectorRegistry
    bodies: BodyReader
    born: int = field(default_factory=lambda: int(time.time()))

    async def chat(self, request: Request, entered: ExitStack) -> ASGIApp:
        fields = await self.bodies.read(request, ChatFields, entered, GENERATE)
        tools = chat_tools(fields.tools, fields.tool_choice, allows_several=fields.parallel_tool_calls)
        variables = template_kwargs(fields.chat_template_kwargs, fields.reasoning_effort)
        prompt = chat.chat_prompt(fields.messages, tools, variables)
        asked = self._asked("chatcmpl-", request, fields, (prompt,), chat.chat_limits(fields))
        details = tools, self.requests.texts.tool_format, fields.include_reasoning
        answer = chat.ChatAnswer(asked.head, len(asked.wanted), fields.stream_options, asked.spell, *details)
        return Exchange(asked.streams, answer, chat.FIELD_NAMES | constraint_names(fields))

    async def responses(self, request: Request, entered: ExitStack) -> ASGIApp:
        fields = await self.bodies.read(request, ResponseFields, entered, GENERATE)
        tools = tools_of(fields.tools, "", fields.tool_choice, allows_several=fields.parallel_tool_calls)
        prompt, names = response_fields.conversation(fields, tools)
        asked = self._asked("resp_", request, fields, (prompt,), response_fields.response_limits(fields))
        formats = self.requests.texts.tool_format
        answer = ResponseAnswer(asked.head, repeated(fields, tools), asked.spell, tools, formats)
        return Exchange(asked.streams, answer, names)

    async def response(self, request: Request, entered: ExitStack) -> Response:
        """An earlier response, which is not stored."""
        raise NotFound("response_id", f"{request.path_params['response_id']!r} is not here: {NOT_KEPT}")

    async def completions(self, request: Request, entered: ExitStack) -> ASGIApp:
        fields = await self.bodies.read(request, CompletionFields, entered, GENERATE)
        prompts = tuple(map(completions.text_prompt, fields.prompt))
        limits = completions.completion_limits(fields)
        asked = self._asked("cmpl-", request, fields, prompts, limits)
        echoes = [""] * len(prompts)
        if fields.echo:
            echoes = await completions.echoes(prompts, self.requests.texts, fields.model)
        options, num_choices = fields.stream_options, len(asked.wanted) // len(prompts)
        answer = completions.CompletionAnswer(
            asked.head, echoes, num_choices, options, asked.spell, limits.prompt_logprobs
        )
        names = completions.FIELD_NAMES | constraint_names(fields)
        return Exchange(lambda: completions.with_places(asked.streams(), names, len(prompts)), answer, names)

    async def models(self, request: Request, entered: ExitStack) -> Response:
        cards = [self._card(model) for model in self.requests.models()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request, entered: ExitStack) -> Response:
        name, cards = request.path_params["model"], {one.model_name: self._card(one) for one in self.requests.models()}
        if name not in cards:
            raise NotFound("model", f"must be one of {', '.join(map(repr, sorted(cards)))}", repr(name))
        return JSONResponse(cards[name])

    async def tokenize(self, request: Request, entered: ExitStack) -> Response:
        """The tokens of a text or a conversation, as for a prompt."""
        fields = await self.bodies.read(request, TokenizeFields, entered, TOKENIZE)
        prompt = completions.tokenized_prompt(fields)
        try:
            read = await self.requests.texts.tokens(prompt, fields.model)
        except InvalidRequest as exc:
            names = completions.FIELD_NAMES if isinstance(prompt, TextPrompt) else chat.FIELD_NAMES
            raise api_error(exc, names) from exc
        answer: Json = {"count": len(read.token_ids), "max_model_len": read.max_context, "tokens": read.token_ids}
        if fields.return_token_strs:
            answer["token_strs"] = await run_in_threadpool(read.token_strs)
        return JSONResponse(answer)

    async def detokenize(self, request: Request, entered: ExitStack) -> Response:
        """The text of tokens."""
        fields = await self.bodies.read(request, DetokenizeFields, entered, TOKENIZE)
        return JSONResponse({"prompt": await self.requests.texts.text(fields.tokens, fields.model)})

    async def health(self, request: Request, entered: ExitStack) -> Response:
        """Whether a new request could be served."""
        if self.requests.is_ready:
            return JSONResponse({"status": "ok"})
        raise Unavailable("no request can be served now: this orchestrator has no target worker, or is draining")

    async def metrics(self, request: Request, entered: ExitStack) -> Response:
        """Metrics for Prometheus."""
        return Response(await run_in_threadpool(generate_latest, self.figures), media_type=CONTENT_TYPE_LATEST)

    async def service_discovery(self, request: Request, entered: ExitStack) -> Response:
        """Addresses of all processes' metrics, for Prometheus' http_sd."""
        records = await self.requests.directory.registry.workers()
        return JSONResponse([_discovered(record) for record in records if record.metrics])

    async def decisions(self, request: Request, entered: ExitStack) -> Response:
        """The last rounds of a request or a session, oldest first, with the reasons for their sizes."""
        decisions = tenant_of(request).decisions(request.path_params["name"])
        return JSONResponse([asdict(decision) | {"mode": decision.mode.value} for decision in decisions])

    async def cluster(self, request: Request, entered: ExitStack) -> Response:
        """This orchestrator and its workers."""
        return JSONResponse(asdict(await self.requests.server_info()) | {"loads": asdict(self.requests.loads())})

    async def version(self, request: Request, entered: ExitStack) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request, entered: ExitStack) -> Response:
        return JSONResponse(document())

    def _asked(
        self, kind: str, request: Request, fields: RequestFields, prompts: tuple[Prompt, ...], limits: RequestLimits
    ) -> _Asked:
        """Raises as `choices` does, and ApiError for two session ids."""
        head = Head(f"{kind}{fields.request_id or uuid.uuid4().hex}", int(time.time()), fields.stream)
        tenant = tenant_of(request)
        wanted = choices(fields, prompts, limits, head.answer_id, _session_id(request, fields), tenant.most_at_once)
        has_rounds = fields.stream and isinstance(fields, GenerationFields) and fields.stream_options.include_rounds
        spell = self._spell if limits.logprobs is not None or has_rounds else None
        return _Asked(head, wanted, spell, partial(scored_first, tenant, wanted))

    def _spell(self, model: str) -> TokenBytes:
        return self.requests.texts.tokenizer(model).token_bytes

    def _card(self, model: ModelInfo) -> Json:
        card: Json = {"id": model.model_name, "object": "model", "created": self.born, "owned_by": "bough"}
        return card | {"max_model_len": model.max_context}


def _session_id(request: Request, fields: RequestFields) -> str:
    """The session id in the body or the header. Raises ApiError if they differ."""
    of_body, of_header = fields.session_id, request.headers.get(SESSION_HEADER, "")
    if of_body and of_header and of_body != of_header:
        raise invalid("session_id", of_body, f"equal that of the header {SESSION_HEADER}, or be left out")
    return of_body or of_header


def _discovered(record: WorkerRecord) -> dict[str, Any]:
    """A record as a target of Prometheus' http_sd, with TLS if its address says so."""
    scheme, _, address = record.metrics.rpartition("://")
    labels = {"kind": record.kind, "worker_id": record.worker_id}
    return {"targets": [address], "labels": labels | ({"__scheme__": scheme} if scheme else {})}


@dataclass(frozen=True, slots=True)
class _Answered:
    """An endpoint as an ASGI application; turns errors into answers, and closes `entered` at the end."""

    endpoint: Endpoint
    field_names: Mapping[str, str] = field(default_factory=dict)  # of errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as entered:
            try:
                answer = await self.endpoint(Request(scope, receive), entered)
            except Exception as exc:  # every error becomes a status here
                answer = api_error(exc, self.field_names).response()
            await answer(scope, receive, send)


async def _refused(request: Request, exc: Exception) -> Response:
    """Answer for an unknown path or method, in OpenAI's form."""
    assert isinstance(exc, HTTPException)
    status, allowed = HTTPStatus(exc.status_code), (exc.headers or {}).get("Allow")
    path = request.url.path[:MAX_COMPARED]
    hint = f"the method must be {allowed}" if allowed else _nearest(request.app, path)
    message = f"{request.method} {path}: {status.phrase.lower()}; {hint}"
    response = ApiError(status, message, code=status.name.lower()).response()
    response.headers.update(exc.headers or {})
    return response


def _nearest(app: Starlette, path: str) -> str:
    """The path that a client may have meant, or all paths."""
    paths = [re.sub(r":\w+}", "}", route.path) for route in app.routes if isinstance(route, Route)]
    nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.7)
    return f"the nearest path is {nearest[0]}" if nearest else f"the paths are {', '.join(paths)}"


async def _root(request: Request, *, has_page: bool) -> Response:
    """Redirect browsers to the page at /ui, if it is served; answer programs with the main paths."""
    if has_page and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/ui")
    paths = {"models": "/v1/models", "chat": "/v1/chat/completions", "health": "/health"}
    return JSONResponse({"name": "bough"} | paths | ({"ui": "/ui"} if has_page else {}))


async def _page_file(request: Request) -> Response:
    """A file of the page, which uses the same API as other clients; read at each request."""
    name, media_type = PAGE_FILES[request.url.path]
    return Response((PAGE / name).read_bytes(), media_type=media_type, headers=PAGE_HEADERS)
