"""/openapi.json, from the routes and the structs that read requests and write responses."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from everserve import __version__
from everserve.gateway.errors import ErrorResponse
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import Exchange

_REFERENCE = "#/components/schemas/{name}"
_REQUEST_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]{1,128}$"}


@dataclass(frozen=True, kw_only=True)
class Route:
    """One path and method: who answers, and what is said about it."""

    method: str
    path: str
    handler: Callable[[Gateway, Exchange], Awaitable[None]]
    request: type[msgspec.Struct] | None = None
    response: Any = None  # the type of a 200's JSON; a text is the media type of a body that is not JSON
    stream: type[msgspec.Struct] | None = None  # one event, where the client may ask for a stream
    is_open: bool = False  # no API key needed
    needs_worker: bool = True  # 503 while no worker is ready


def document(routes: Sequence[Route], has_api_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 description of these routes."""
    types = [t for r in routes for t in (r.request, r.response, r.stream) if t is not None and not isinstance(t, str)]
    schemas, components = msgspec.json.schema_components([*types, ErrorResponse], ref_template=_REFERENCE)
    schema_of = {repr(t): schema for t, schema in zip([*types, ErrorResponse], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, has_api_keys)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Everserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_api_keys:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return result


def _operation(route: Route, schema_of: dict[str, Any], has_api_keys: bool) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [{"name": "X-Request-Id", "in": "header", "schema": _REQUEST_ID_SCHEMA}]
    if "{model}" in route.path:
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": schema})
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{route.path.strip('/').translate(_TO_NAME)}",
        "parameters": parameters,
        "responses": _responses(route, schema_of, has_api_keys),
    }
    if route.request is not None:
        content = {"application/json": {"schema": schema_of[repr(route.request)]}}
        operation["requestBody"] = {"required": True, "content": content}
    if has_api_keys and not route.is_open:
        operation["security"] = [{"key": []}]
    return operation


_TO_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _responses(route: Route, schema_of: dict[str, Any], has_api_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": schema_of[repr(route.response)]}
    if route.stream is not None:
        # Each event is `data: ` and this JSON; `data: [DONE]` ends the stream.
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "itemSchema": schema_of[repr(route.stream)],
        }
    request_id = {"X-Request-Id": {"schema": _REQUEST_ID_SCHEMA}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content, "headers": request_id}}
    for status in _error_statuses(route, has_api_keys):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema_of[repr(ErrorResponse)]}},
            "headers": request_id,
        }
    return responses


def _error_statuses(route: Route, has_api_keys: bool) -> list[int]:
    statuses = [400]
    if has_api_keys and not route.is_open:
        statuses.append(401)
    if route.request is not None or "{" in route.path:
        statuses.append(404)
    if route.request is not None:
        statuses.append(413)
    if route.stream is not None:
        statuses.append(500)
    if route.needs_worker:
        statuses.append(503)
    return statuses
