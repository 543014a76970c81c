"""`/` and `/dashboard/...`: the dashboard's files, from the package, read once.

They hold no data and need no key; what they ask for does. The page may load and call this server only.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

from fastapi import APIRouter, Request
from starlette.responses import Response

from everserve.gateway.http.errors import HttpError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_SOURCES = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'")
_POLICY = "; ".join(
    (*_SOURCES, "img-src 'self'", "font-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
)

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    media_type: str
    tag: str


def read_files() -> dict[str, _File]:
    """All files that a browser may ask for, by their path below `/dashboard/`."""
    root = resources.files("everserve.gateway") / "dashboard"
    found = {}
    for prefix, folder in (("", root), ("vendor/", root / "vendor")):
        for file in folder.iterdir():
            media_type = _TYPES.get(PurePosixPath(file.name).suffix)
            if media_type is not None:
                data = file.read_bytes()
                found[prefix + file.name] = _File(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return found


_files = read_files()


@router.get("/")
async def index(request: Request) -> Response:
    return _respond(request, "index.html")


@router.get("/dashboard/{path:path}")
async def file(request: Request) -> Response:
    return _respond(request, request.path_params["path"])


def _respond(request: Request, path: str) -> Response:
    found = _files.get(path)
    if found is None:
        raise HttpError(404, f"There is no file {path[:200]}.")
    headers = {
        "cache-control": "no-cache",  # ask each time; the tag says whether it has changed
        "etag": found.tag,
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)
