"""/openapi.json, from the routes and the structs that read requests and write responses.

`describe` stands at each route and says what only that route knows; `document` adds what follows from the route table:
the path, the guards, the request id. FastAPI's own generator knows pydantic, not msgspec.
"""

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

from everserve.gateway.api.depends import NEEDS_ADMIN, NEEDS_HEALTH, NEEDS_KEY, NEEDS_LIMITS, NEEDS_ORIGIN
from everserve.gateway.http.access import Access
from everserve.gateway.http.errors import ErrorResponse
from everserve.wire import operators

_REFERENCE = "#/components/schemas/{name}"
_REQUEST_ID = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]{1,128}$"}
_EVENT_ID = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The last event that arrived of the stream with this X-Request-Id: the rest of it is the answer.",
    "schema": _EVENT_ID,
}
_TO_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def describe(
    response: Any,
    *,
    status: int = 200,
    request: type[msgspec.Struct] | None = None,
    stream: type[msgspec.Struct] | None = None,
    resumes: bool = True,
    error: type[msgspec.Struct] = ErrorResponse,
    errors: tuple[int, ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
    form: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A route's `openapi_extra`, with the schemas that it refers to under "components".

    `response` is the type of the JSON of a success, or the media type of a body that is not JSON; `stream` is the type
    of one event, where the client may ask for a stream (to which it may come back, if it `resumes`); `errors` are
    statuses that no other route has; `parameters` those of the query; `error` is the body of
    errors; `form` the schema of a body that is a form.
    """
    components: dict[str, Any] = {}

    def schema(kind: Any) -> dict[str, Any]:
        (found,), parts = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
        if issubclass(kind, operators.Request):  # its tag is not for HTTP
            del parts[kind.__name__]["properties"][kind.__struct_config__.tag_field]
            parts[kind.__name__]["required"].remove(kind.__struct_config__.tag_field)
        components.update(parts)
        return found

    if isinstance(response, str):
        content: dict[str, Any] = {response: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schema(response)}}
    statuses = [400, *errors]
    if stream is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(schema(stream))}
        statuses += [409, 500] if resumes else [500]
    success = {"description": HTTPStatus(status).phrase, "content": content}
    extra: dict[str, Any] = {"components": components, "responses": {str(status): success}}
    if stream is not None and resumes:
        extra["parameters"] = [_LAST_EVENT_ID]
    extra["parameters"] = [*extra.get("parameters", ()), *parameters]
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema(request)}}}
        statuses += [404, 413]
    if form is not None:
        extra["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
        statuses += [413]
    schema(error)
    extra["error"] = error.__name__
    extra["responses"].update(_errors(statuses, error.__name__))
    return extra


def query_parameters(**schemas: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """What may stand in the query of a path."""
    return tuple({"name": name, "in": "query", "schema": schema} for name, schema in schemas.items())


def _event_schema(chunk: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event: its data is the JSON of a chunk, or `[DONE]` at the end of the stream. It has an id if the
    client has given the request one."""
    data = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk},
        {"type": "string", "const": "[DONE]"},
    ]
    properties = {"data": {"anyOf": data}, "id": _EVENT_ID}
    return {"type": "object", "required": ["data"], "properties": properties}


def document(app: FastAPI, access: Access) -> dict[str, Any]:
    """The OpenAPI 3.2 description of the application's routes."""
    paths: dict[str, dict[str, Any]] = {}
    components: dict[str, Any] = {"schemas": {}}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            assert route.openapi_extra is not None, f"{route.path} needs a description"
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation = _operation(route, method.lower(), access)
                paths.setdefault(route.path_format, {})[method.lower()] = operation
            for name, schema in route.openapi_extra["components"].items():
                known = components["schemas"].setdefault(name, schema)
                assert known == schema, f"two structs are called {name}"
    components["schemas"].update(msgspec.json.schema_components([ErrorResponse], ref_template=_REFERENCE)[1])
    if access.has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": app.title, "version": app.version}
    return {"openapi": "3.2.0", "info": info, "paths": paths, "components": components}


def _operation(route: APIRoute, method: str, access: Access) -> dict[str, Any]:
    assert route.openapi_extra is not None
    is_guarded = access.needs_key and NEEDS_KEY in route.dependencies
    is_guarded |= access.has_keys and NEEDS_ADMIN in route.dependencies
    parameters: list[dict[str, Any]] = [{"name": "X-Request-Id", "in": "header", "schema": _REQUEST_ID}]
    parameters += route.openapi_extra.get("parameters", [])
    errors = []
    for name in route.param_convertors:
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
        errors = [404]
    if is_guarded:
        errors.append(401)
    if NEEDS_ORIGIN in route.dependencies:
        errors.append(403)
    if NEEDS_LIMITS in route.dependencies or NEEDS_HEALTH in route.dependencies:
        errors.append(503)
    responses = {**route.openapi_extra["responses"], **_errors(errors, route.openapi_extra["error"])}
    operation: dict[str, Any] = {
        "operationId": f"{method}_{route.path_format.strip('/').translate(_TO_NAME)}",
        "parameters": parameters,
        "responses": {
            status: {**response, "headers": {"X-Request-Id": {"schema": _REQUEST_ID}}}
            for status, response in sorted(responses.items())
        },
    }
    if "requestBody" in route.openapi_extra:
        operation["requestBody"] = route.openapi_extra["requestBody"]
    if is_guarded:
        operation["security"] = [{"key": []}]
    return operation


def _errors(statuses: list[int], error: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=error)}}}
    return {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}
