"""The routes, and one HTTP exchange from request id to response."""

import asyncio
import sys
import traceback
from typing import Any

import msgspec

from everserve.errors import EverserveError
from everserve.gateway import (
    chat,
    cluster,
    completions,
    health,
    models,
    openapi,
    protocol,
    responses,
    tokenize,
)
from everserve.gateway.errors import HttpError, from_exception
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import ClientGone, Exchange, Receive, Scope, Send
from everserve.gateway.openapi import Route

ROUTES = (
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions.complete,
        request=protocol.CompletionRequest,
        response=responses.CompletionResponse,
        stream=responses.CompletionResponse,
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat.chat,
        request=protocol.ChatRequest,
        response=responses.ChatResponse,
        stream=responses.ChatChunk,
    ),
    Route(method="GET", path="/v1/models", handler=models.list_models, response=responses.ModelList),
    Route(method="GET", path="/v1/models/{model}", handler=models.show_model, response=responses.Model),
    Route(
        method="POST",
        path="/tokenize",
        handler=tokenize.tokenize,
        request=protocol.TokenizeRequest,
        response=responses.TokenizeResponse,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=tokenize.detokenize,
        request=protocol.DetokenizeRequest,
        response=responses.DetokenizeResponse,
    ),
    Route(method="GET", path="/tokenizer_info", handler=tokenize.tokenizer_info, response=dict[str, Any]),
    Route(method="GET", path="/health", handler=health.health, response="text/plain", is_open=True),
    Route(method="GET", path="/ping", handler=health.health, response="text/plain", is_open=True),
    Route(method="POST", path="/ping", handler=health.health, response="text/plain", is_open=True),
    Route(
        method="GET",
        path="/version",
        handler=health.version,
        response=responses.Version,
        is_open=True,
        needs_worker=False,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=health.metrics,
        response="text/plain",
        is_open=True,
        needs_worker=False,
    ),
    Route(method="GET", path="/load", handler=health.load, response=responses.ServerLoad, needs_worker=False),
    Route(
        method="GET",
        path="/cluster",
        handler=cluster.show_cluster,
        response=responses.ClusterView,
        needs_worker=False,
    ),
    Route(
        method="GET",
        path="/events",
        handler=cluster.stream_events,
        response="text/event-stream",
        needs_worker=False,
    ),
)


class App:
    """The ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._openapi = msgspec.json.encode(openapi.document(ROUTES, has_api_keys=bool(gateway.settings.api_keys)))
        self._routes: dict[str, dict[str, Route]] = {}
        for route in (*ROUTES, self._openapi_route()):
            self._routes.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to speak nothing else"
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except (ClientGone, asyncio.CancelledError):
            return  # nobody to answer; uvicorn closes what is open
        except HttpError as error:
            await _respond_error(exchange, error)
        except EverserveError as error:
            await _respond_error(exchange, from_exception(error))
        except Exception:  # our own bug: this client gets a 500, the others go on
            traceback.print_exc(file=sys.stderr)
            await _respond_error(exchange, HttpError(500, "Internal server error."))

    async def _answer(self, exchange: Exchange) -> None:
        exchange.take_request_id()
        route = self._find(exchange)
        if not route.is_open:
            self._gateway.check_api_key(exchange.headers.get(b"authorization"))
        if route.needs_worker:
            self._gateway.check_serving()
        await route.handler(self._gateway, exchange)

    def _openapi_route(self) -> Route:
        async def show(gateway: Gateway, exchange: Exchange) -> None:
            await exchange.respond(200, self._openapi)

        return Route(method="GET", path="/openapi.json", handler=show, is_open=True, needs_worker=False)

    def _find(self, exchange: Exchange) -> Route:
        path = exchange.path
        if path.startswith(models.PREFIX) and len(path) > len(models.PREFIX):
            path = "/v1/models/{model}"  # names may contain slashes
        methods = self._routes.get(path)
        if methods is None:
            raise HttpError(404, f"Invalid URL ({exchange.method} {exchange.path[:200]}).")
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise HttpError(
                405,
                f"Not allowed to {exchange.method} on {exchange.path[:200]} (allowed: {allowed}).",
                code="method_not_supported",
                headers=((b"allow", allowed.encode()),),
            )
        return route


async def _respond_error(exchange: Exchange, error: HttpError) -> None:
    """After a response has begun, there is nothing left to say: uvicorn closes the connection."""
    if not exchange.has_started:
        await exchange.respond(error.status, error.body(), headers=error.headers)
