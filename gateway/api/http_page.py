"""Serves the page at / and its files. The files contain no user data, so they need no key; the page itself asks the
user for a key.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFound
from gateway.api.http_about import page_headers

_FILES = Path(__file__).parent / "pages" / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Page:
    """The page and its files, which are read once."""

    def __init__(self) -> None:
        self._files = {path.name: path.read_bytes() for path in _FILES.iterdir() if path.suffix in _TYPES}
        self._headers = page_headers(images=True)

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise NotFound(f"there is no file {name[:100]!r} here")
        headers = {**self._headers, "cache-control": "no-cache"}
        return Response(self._files[name], headers=headers, media_type=_TYPES[Path(name).suffix])
