"""/v1/batches"""

import sqlite3
import time
import uuid
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.batches.runner import Batches
from everserve.gateway.api.batches.view import ENDPOINTS, BatchList, BatchView
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_ORIGIN, identity_of, store_of
from everserve.gateway.api.openapi import describe, query_parameters
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.query import query_number
from everserve.gateway.http.requests import MetadataKey, MetadataValue
from everserve.gateway.store import batches, files
from everserve.gateway.store.batches import Batch

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_ORIGIN])
PATH = "/v1/batches"
_WINDOW_S = 24 * 3600
MAX_BATCHES = 1000  # of a key, that have not ended


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: None = None  # --state-days


_decoder = msgspec.json.Decoder(BatchRequest)
_UNSUPPORTED = {"output_expires_after": ""}


def runner_of(request: Request) -> Batches:
    runner: Batches = request.app.state.jobs.batches
    return runner


@router.post(PATH, openapi_extra=describe(BatchView, request=BatchRequest))
async def create(http_request: Request) -> Response:
    """Its lines are looked at next, and run when there is room."""
    request = await read_json(http_request, _decoder, _UNSUPPORTED)
    store, owner, created = store_of(http_request), identity_of(http_request), int(time.time())
    id = f"batch_{uuid.uuid4().hex}"
    view = BatchView(
        id=id,
        endpoint=request.endpoint,
        completion_window=request.completion_window,
        input_file_id=request.input_file_id,
        created_at=created,
        expires_at=created + _WINDOW_S,
        metadata=request.metadata,
    )
    batch = Batch(
        id=id,
        owner=owner,
        created=created,
        expires=max(store.expires(created), view.expires_at),
        runs=True,
        input=request.input_file_id,
        output=f"file-{uuid.uuid4().hex}",
        errors=f"file-{uuid.uuid4().hex}",
        view=msgspec.json.encode(view),
    )

    def add(db: sqlite3.Connection) -> None:
        file = files.find(db, owner, batch.input)
        if file is None or file.purpose != "batch":
            message = f"There is no file '{batch.input[:200]}' with the purpose 'batch'."
            raise RequestError(message, "input_file_id")
        if sum(other.owner == owner for other in batches.running(db)) >= MAX_BATCHES:
            raise HttpError(429, f"{MAX_BATCHES} batches have not ended; more may come when some have.")
        batches.add(db, batch)

    await store.database.run(add)
    runner_of(http_request).wake()
    return JsonResponse(view)


@router.get(
    PATH,
    openapi_extra=describe(
        BatchList,
        parameters=query_parameters(limit={"type": "integer", "minimum": 1, "maximum": 100}, after={"type": "string"}),
    ),
)
async def show_all(http_request: Request) -> Response:
    query, owner = http_request.query_params, identity_of(http_request)
    limit, after = query_number(query, "limit", 20, 1, 100), query.get("after")
    found = await store_of(http_request).database.run(lambda db: batches.page(db, owner, after, limit + 1))
    data = [BatchView.of(batch) for batch in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return JsonResponse(BatchList(data=data, first_id=first, last_id=last, has_more=len(found) > limit))


@router.get(PATH + "/{batch_id}", openapi_extra=describe(BatchView))
async def show(http_request: Request) -> Response:
    return JsonResponse(BatchView.of(await _find(http_request)))


@router.post(PATH + "/{batch_id}/cancel", openapi_extra=describe(BatchView, errors=(409,)))
async def cancel(http_request: Request) -> Response:
    """No further line is run. What has answers keeps them."""
    found = await _find(http_request)

    def change(batch: Batch) -> Batch:
        view = BatchView.of(batch)
        if not batch.runs:
            raise HttpError(409, f"Cannot cancel a batch with status '{view.status}'.")
        if view.status != "cancelling":
            view.enter("cancelling", int(time.time()))
        return batch._replace(view=msgspec.json.encode(view))

    changed = await store_of(http_request).database.run(lambda db: batches.change(db, found.id, change))
    runner_of(http_request).wake()
    return JsonResponse(BatchView.of(changed or found))


async def _find(http_request: Request) -> Batch:
    id, owner = http_request.path_params["batch_id"], identity_of(http_request)
    batch = await store_of(http_request).database.run(lambda db: batches.find(db, owner, id))
    if batch is None:
        raise HttpError(404, f"No batch found with id '{id[:200]}'.", param="id")
    return batch
