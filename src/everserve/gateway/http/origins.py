"""Browser requests: pages of other origins cannot use this server on behalf of its users.

Host             the name by which a client asks for this server must be one of its own. If a page's name was made
                 to point at this host after the page was loaded (DNS rebinding), requests carry the page's name.
Origin,          what changes the cluster is not done for a page of another origin. Browsers send these headers, pages
Sec-Fetch-Site   cannot change them, and clients that are no browsers do not send them.

That bodies must be declared as JSON (exchange.py) is part of this: a page cannot send JSON to another origin without a
CORS preflight, and this server answers them only to the origins in `--allowed-origins`.
"""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from everserve.config.gateway import GatewayConfig
from everserve.gateway.http.access import is_loopback
from everserve.gateway.http.errors import HttpError

_ANY = "*"
_LOOPBACK_NAME = "localhost"
_OWN_SITES = ("same-origin", "none")  # a page of this server; no page at all


class AllowedHosts:
    """Middleware: 403 for requests to a host that is not this one, by its `Host` header.

    Always allowed are the loopback names, the address that the server listens on, and the one that the connection came
    to, which is of interest if it listens on all of them.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {_LOOPBACK_NAME, *(_host_of(name) for name in names)}
        self._allows_any = _ANY in self._names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if self._allows_any or scope["type"] != "http" else self._check(scope)
        await (self._app if refusal is None else refusal.response(scope["path"]))(scope, receive, send)

    def _check(self, scope: Scope) -> HttpError | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given and scope.get("http_version") != "1.1":
            return None  # browsers always send it, and before HTTP/1.1 other clients need not
        if len(given) != 1:
            return HttpError(400, "The request must have one Host header.", param="Host")
        host = _host_of(given[0].decode("latin-1"))
        address, _ = scope.get("server") or ("", 0)
        if host in self._names or is_loopback(host) or host == address.removeprefix("::ffff:"):
            return None
        message = f"This server is not known as '{host[:200]}': start it with --allowed-hosts to allow this name."
        return HttpError(403, message, param="Host", code="host_not_allowed")


def cross_origin(app: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """Middleware: pages of these origins may send requests, and read the answers."""
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_credentials=config.allow_credentials,
        allow_methods=config.allowed_methods or [_ANY],
        allow_headers=config.allowed_headers or [_ANY],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def check_same_origin(request: Request, allowed: Iterable[str] = ()) -> None:
    """403 if the request comes from a page that is not this server's own, and of no allowed origin either."""
    if not {_ANY, request.headers.get("origin", "")}.isdisjoint(allowed):
        return
    site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
    host = request.headers.get("host", "?").lower()
    is_own = origin is None or origin.lower().partition("://")[2] == host
    if not is_own or site not in _OWN_SITES:
        message = "This changes what the server does or keeps, and pages of other origins may not do that."
        raise HttpError(403, message, param="Origin", code="cross_origin")


def _host_of(text: str) -> str:
    """The name or address without port and brackets: `[::1]:8000` -> `::1`."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return (text if text.count(":") > 1 else text.partition(":")[0]).removesuffix(".")
