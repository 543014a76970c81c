"""The application: the routes of all modules, and how errors are answered."""

import functools
import sys
import traceback

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from everserve import __version__
from everserve.errors import EverserveError
from everserve.gateway.api import (
    chat,
    completions,
    drains,
    faults,
    health,
    models,
    openapi,
    pages,
    scaling,
    switching,
    tokenize,
)
from everserve.gateway.api.exposition import Metrics
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.errors import HttpError, from_exception
from everserve.gateway.http.exchange import RequestIds
from everserve.gateway.http.origins import AllowedHosts

_MODULES = (completions, chat, models, tokenize, health, faults, drains, scaling, switching, pages)


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application around one gateway."""
    app = FastAPI(
        title="Everserve",
        version=__version__,
        docs_url=None,  # these pages load scripts from the network
        redoc_url=None,
        redirect_slashes=False,
        # One flat list, busiest first: include_router would search router by router, 20 to 50 us per request.
        routes=[route for module in _MODULES for route in module.router.routes],
        exception_handlers={
            HttpError: _on_http_error,
            EverserveError: _on_everserve_error,
            HTTPException: _on_routing_error,
            ClientDisconnect: _on_client_gone,
            Exception: _on_bug,
        },
    )
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")  # as HTTP has it; the server leaves the body out
    app.state.gateway = gateway
    app.state.metrics = Metrics(gateway)
    config = gateway.config
    app.add_middleware(AllowedHosts, names=[config.listen_host, config.host, *config.allowed_hosts])
    app.add_middleware(RequestIds, responses=gateway.responses)  # added last, so it is the outermost
    app.openapi = functools.cache(lambda: openapi.document(app, gateway.access))  # type: ignore[method-assign]
    return app


async def _on_http_error(request: Request, error: HttpError) -> Response:
    return error.response()


async def _on_everserve_error(request: Request, error: EverserveError) -> Response:
    return from_exception(error).response()


async def _on_routing_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    method, path = request.method, request.scope["path"][:200]
    if error.status_code != 405:
        return HttpError(error.status_code, f"Invalid URL ({method} {path}).").response()
    assert error.headers is not None
    allowed = ", ".join(sorted(error.headers["Allow"].split(", ")))
    message = f"Not allowed to {method} on {path} (allowed: {allowed})."
    return HttpError(405, message, code="method_not_supported", headers={"allow": allowed}).response()


async def _on_client_gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left before it had sent its request: this is not read


async def _on_bug(request: Request, error: Exception) -> Response:
    """This client gets a 500; other clients are not affected. FastAPI calls this outside of all middleware."""
    traceback.print_exception(error, file=sys.stderr)
    return HttpError(500, "Internal server error.", headers={"x-request-id": request.state.request_id}).response()
