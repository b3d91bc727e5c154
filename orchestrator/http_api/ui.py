"""The static page at /ui, which uses the same API as other clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
FILES: Mapping[str, tuple[str, str]] = {  # by path: file, media type
    "/ui": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    # Only these files may run or be shown; bars get their widths from style attributes.
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page's files, which are read at each request."""
    return [Route(path, _serve, methods=["GET"]) for path in FILES]


async def _serve(request: Request) -> Response:
    name, media_type = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)
