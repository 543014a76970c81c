"""The application: the routes of all modules, and how errors are answered."""

import functools
import logging

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
    health,
    models,
    openapi,
    operators,
    pages,
    tokenize,
)
from everserve.gateway.api.batches import files
from everserve.gateway.api.batches import routes as batches
from everserve.gateway.api.jobs import Jobs
from everserve.gateway.api.messages import routes as messages
from everserve.gateway.api.pooling import routes as pooling
from everserve.gateway.api.responses import routes as responses
from everserve.gateway.api.views import Views
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.errors import HttpError, from_exception
from everserve.gateway.http.exchange import RequestIds
from everserve.gateway.http.handing_over import FirstOnly
from everserve.gateway.http.origins import AllowedHosts, cross_origin
from everserve.gateway.http.responses import encode

_ROUTERS = (
    *(module.router for module in (completions, chat, models, tokenize, health, operators, pages)),
    *(responses.router, responses.reading, responses.changing, messages.router, pooling.router),
    *(files.router, batches.router),
)

log = logging.getLogger(__name__)


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application around one gateway."""
    app = FastAPI(
        title="Everserve",
        version=__version__,
        openapi_url=None,  # without FastAPI's own pages, which load scripts from the network
        redirect_slashes=False,
        # One flat list, busiest first: include_router would search router by router, 20 to 50 us per request.
        routes=[route for router in _ROUTERS for route in router.routes],
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
    app.state.views = Views(gateway)
    app.state.jobs = Jobs(app, gateway)
    config = gateway.config
    if gateway.number:
        app.add_middleware(FirstOnly, gateway=gateway)
    if config.allowed_origins:
        app.add_middleware(cross_origin, config=config)
    app.add_middleware(AllowedHosts, names=[config.listen_host, config.host, *config.allowed_hosts])
    app.add_middleware(RequestIds, responses=gateway.responses)  # added last, so it is the outermost
    document = functools.cache(lambda: encode(openapi.document(app, gateway.access)))

    async def show_document(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", show_document)
    return app


def _answer(request: Request, error: HttpError) -> Response:
    """The error in the form that clients of this path read."""
    return error.response(request.scope["path"])


async def _on_http_error(request: Request, error: HttpError) -> Response:
    return _answer(request, error)


async def _on_everserve_error(request: Request, error: EverserveError) -> Response:
    return _answer(request, from_exception(error))


async def _on_routing_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    method, path = request.method, request.scope["path"][:200]
    if error.status_code != 405:
        return _answer(request, HttpError(error.status_code, f"Invalid URL ({method} {path})."))
    assert error.headers is not None
    allowed = ", ".join(sorted(error.headers["Allow"].split(", ")))
    message = f"Not allowed to {method} on {path} (allowed: {allowed})."
    return _answer(request, HttpError(405, message, code="method_not_supported", headers={"allow": allowed}))


async def _on_client_gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left before it had sent its request: this is not read


async def _on_bug(request: Request, error: Exception) -> Response:
    """This client gets a 500; other clients are not affected. FastAPI calls this outside of all middleware."""
    log.error("%s %s failed", request.method, request.scope["path"][:200], exc_info=error)
    told = HttpError(500, "Internal server error.", headers={"x-request-id": request.state.request_id})
    return _answer(request, told)
