"""The static page at /ui, which uses the same API as other clients, and the root, which leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

ROOT = "/"
FOLDER = Path(__file__).parent / "page"
FILES: Mapping[str, tuple[str, str]] = {  # by path: file, media type
    "/ui": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/dom.js": ("dom.js", "text/javascript"),
    "/ui/figures.js": ("figures.js", "text/javascript"),
    "/ui/tree.js": ("tree.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    # Only these files may run or be shown.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page's files, which are read at each request."""
    return [Route(path, _serve, methods=["GET"]) for path in FILES]


def root_route(*, has_page: bool) -> Route:
    """The root: browsers are sent to the page, if it is served; programs get the main paths."""

    async def root(request: Request) -> Response:
        if has_page and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/ui")
        paths = {"models": "/v1/models", "chat": "/v1/chat/completions", "health": "/health"}
        return JSONResponse({"name": "bough"} | paths | ({"ui": "/ui"} if has_page else {}))

    return Route(ROOT, root, methods=["GET"])


async def _serve(request: Request) -> Response:
    name, media_type = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)
