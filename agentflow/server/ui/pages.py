"""Serves the built files of the page below ``/ui``, from memory.

The files need no key: the page asks for it, and sends it only to this server. The Content-Security-Policy
allows nothing from elsewhere and no inline script, so that text of a model cannot become code.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
# Not from the operating system's table of types, which may differ.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
_HOST = re.compile(r"[A-Za-z0-9.\-\[\]:]+")


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def page_routes() -> list[BaseRoute]:
    """The routes of the page; none if it was not built."""
    if INDEX not in _files():
        return []
    return [
        Route("/ui", _index),
        Route("/ui/", _index),
        Route("/ui/{path:path}", _asset),
    ]


@cache
def _files() -> dict[str, _File]:
    files: dict[str, _File] = {}
    for path in sorted(STATIC.rglob("*")):
        media_type = MEDIA_TYPES.get(path.suffix)
        if path.is_file() and media_type is not None:
            content = path.read_bytes()
            etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
            compressed = gzip.compress(content, mtime=0)
            files[path.relative_to(STATIC).as_posix()] = _File(content, compressed, media_type, etag)
    return files


async def _index(request: Request) -> Response:
    return _answer(request, _files()[INDEX])


async def _asset(request: Request) -> Response:
    file = _files().get(request.path_params["path"])
    if file is None:
        raise HTTPException(404)
    return _answer(request, file)


def _answer(request: Request, file: _File) -> Response:
    headers = {
        "content-security-policy": policy(request.headers.get("host", "")),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
        "vary": "accept-encoding",
        "etag": file.etag,
    }
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in [tag.strip() for tag in known.split(",")]:
        return Response(status_code=304, headers=headers)
    content = file.content
    if _accepts_gzip(request.headers.get("accept-encoding", "")):
        content, headers["content-encoding"] = file.compressed, "gzip"
    headers["content-type"] = file.media_type
    return Response(content, headers=headers)


def _accepts_gzip(accepted: str) -> bool:
    return any(
        name.strip().lower() == "gzip"
        and weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
        for name, _, weight in (part.partition(";") for part in accepted.split(","))
    )


def policy(host: str) -> str:
    """The Content-Security-Policy of the page on a server with this Host header.

    >>> policy("127.0.0.1:8410")
    "default-src 'none'; …; connect-src 'self' ws://127.0.0.1:8410 wss://127.0.0.1:8410; …"
    """
    # In some browsers, 'self' does not include websockets.
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        f"font-src 'self'; connect-src 'self'{sockets}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
