"""/v1/responses"""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everserve.errors import RequestError
from everserve.gateway.api.answers import respond
from everserve.gateway.api.converted import renamed
from everserve.gateway.api.depends import (
    NEEDS_KEY,
    NEEDS_LIMITS,
    NEEDS_ORIGIN,
    gateway_of,
    identity_of,
    store_of,
)
from everserve.gateway.api.openapi import describe, query_parameters
from everserve.gateway.api.preparing import prepare_chat
from everserve.gateway.api.responses.background import ENDED, BackgroundResponses, EventsOfRun
from everserve.gateway.api.responses.items import as_items, messages_of
from everserve.gateway.api.responses.renderer import ResponsesRenderer
from everserve.gateway.api.responses.request import NAMES, UNSUPPORTED, ResponsesRequest, as_chat
from everserve.gateway.api.responses.view import (
    DeletedView,
    ItemsView,
    ResponseEvent,
    ResponseView,
    new_view,
)
from everserve.gateway.api.responses.writer import snapshot
from everserve.gateway.api.unattended import unattended
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.query import query_choice, query_flag, query_number
from everserve.gateway.http.requests import INT64_MAX, ChatRequest
from everserve.gateway.store import responses
from everserve.gateway.store.responses import ATTENDED, BACKGROUND, StoredResponse
from everserve.gateway.text.prompts import Prompt
from everserve.gateway.text.sampling import sampling_params

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
reading = APIRouter(dependencies=[NEEDS_KEY])
changing = APIRouter(dependencies=[NEEDS_KEY, NEEDS_ORIGIN])
_decoder = msgspec.json.Decoder(ResponsesRequest)


def runs_of(request: Request) -> BackgroundResponses:
    runs: BackgroundResponses = request.app.state.jobs.responses
    return runs


@router.post(
    "/v1/responses",
    openapi_extra=describe(ResponseView, request=ResponsesRequest, stream=ResponseEvent, resumes=False),
)
async def create(http_request: Request) -> Response:
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _decoder, UNSUPPORTED)
    model = gateway.check_model(request.model)
    own = unattended(http_request)
    is_run = own is not None and own.response_id is not None  # the store knows it already
    if own is not None and request.background and not is_run:
        raise RequestError("A line of a batch runs in the background as it is: leave 'background' out.", "background")
    id = own.response_id if own is not None and own.response_id is not None else f"resp_{http_request.state.unique}"
    created = own.created if own is not None else http_request.state.created_s
    items = as_items(request.input, id)
    before = await _items_before(http_request, request.previous_response_id)
    chat = as_chat(request, messages_of([*before, *items]))
    gateway.check_room(1, http_request.state.owner)
    try:
        prompt = await prepare_chat(gateway, chat)
        sampling_params(chat, len(prompt.ids), gateway.limits(), gateway.defaults)  # raises what it would raise later
    except RequestError as error:
        raise renamed(error, NAMES) from error
    http_request.state.has_own_id = False  # a response has an id of its own, and by that a client comes back for it
    view = new_view(id, created, model, request, "queued" if request.background else "in_progress")
    if not request.is_stored or is_run:
        renderer = ResponsesRenderer(view, request.wants_logprobs, gateway.tokenizer)
        return respond(http_request, chat, renderer, id, [prompt])
    stored = StoredResponse(
        id=id,
        owner=identity_of(http_request),
        created=created,
        expires=store_of(http_request).expires(created),
        previous=request.previous_response_id,
        runs=BACKGROUND if request.background else ATTENDED,
        request=_run_again(request, chat, gateway.seeds.for_request(chat)),
        input=msgspec.json.encode(items),
        view=snapshot(view),
    )
    if request.background:
        runs_of(http_request).check_room(stored.owner)
    if "recorded" not in http_request.scope["state"]:  # otherwise an earlier gateway has added it
        await store_of(http_request).database.run(lambda db: responses.add(db, stored))
    if request.background:
        runs_of(http_request).start(stored)
        return _events(http_request, stored, -1) if request.stream else JsonResponse(view)
    return _attended(http_request, view, request.wants_logprobs, chat, prompt)


def _run_again(request: ResponsesRequest, chat: ChatRequest, seed: int) -> bytes:
    """A request that gives the same response as this one, whenever it is made. From here on this one has its seed."""
    chat.seed = seed
    return msgspec.json.encode(msgspec.structs.replace(request, seed=seed, stream=True))


class _Attended(Response):
    """The answer to a client that waits for its response. If the client leaves, nothing more is computed."""

    def __init__(self, answer: Response, on_left: Callable[[], None]) -> None:
        super().__init__()
        self._answer = answer
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._on_left()


def _attended(
    http_request: Request, view: ResponseView, wants_logprobs: bool, chat: ChatRequest, prompt: Prompt
) -> Response:
    gateway, store, runs = gateway_of(http_request), store_of(http_request), runs_of(http_request)
    runs.attended.add(view.id)

    def on_end(body: bytes) -> None:
        if view.id in runs.attended:
            runs.attended.remove(view.id)
            store.database.post(lambda db: responses.end(db, view.id, body))

    def on_left() -> None:
        if view.id in runs.attended:
            view.status = "cancelled"
            on_end(snapshot(view))

    renderer = ResponsesRenderer(view, wants_logprobs, gateway.tokenizer, on_end)
    return _Attended(respond(http_request, chat, renderer, view.id, [prompt]), on_left)


async def _items_before(http_request: Request, previous: str | None) -> list[dict[str, Any]]:
    """What was given and answered before this response."""
    if previous is None:
        return []
    owner, name = identity_of(http_request), "previous_response_id"
    chain = await store_of(http_request).database.run(lambda db: responses.chain(db, owner, previous))
    if not chain:
        raise HttpError(404, f"Previous response with id '{previous[:200]}' not found.", param=name)
    items: list[dict[str, Any]] = []
    for given, body in chain:
        view = msgspec.json.decode(body)
        if view["status"] not in ENDED:
            raise RequestError(f"The response '{view['id']}' has not ended yet.", name)
        items += [*msgspec.json.decode(given), *view["output"]]
    return items


_ID = "/v1/responses/{response_id}"
_QUERY = query_parameters(stream={"type": "boolean"}, starting_after={"type": "integer", "minimum": 0})


@reading.get(_ID, openapi_extra=describe(ResponseView, stream=ResponseEvent, resumes=False, parameters=_QUERY))
async def retrieve(http_request: Request) -> Response:
    """A stored response; of one that was run in the background also its events, behind one of them."""
    query = http_request.query_params
    stored = await _find(http_request)
    wants_stream = query_flag(query, "stream")
    after = query_number(query, "starting_after", -1, 0, INT64_MAX)
    if wants_stream:
        if stored.runs != BACKGROUND and stored.events is None:
            raise RequestError("This response was not run in the background: it has no events to read again.", "stream")
        return _events(http_request, stored, after)
    if after >= 0:
        raise RequestError("'starting_after' can only be given together with 'stream': true.", "starting_after")
    return Response(_now(http_request, stored), media_type="application/json")


@changing.delete(_ID, openapi_extra=describe(DeletedView))
async def delete(http_request: Request) -> Response:
    """It is not there any more; if it runs, it is not run any more."""
    stored = await _find(http_request)
    await store_of(http_request).database.run(lambda db: responses.delete(db, stored.owner, stored.id))
    runs_of(http_request).cancel(stored.id)
    return JsonResponse(DeletedView(id=stored.id, object="response"))


@changing.post(_ID + "/cancel", openapi_extra=describe(ResponseView))
async def cancel(http_request: Request) -> Response:
    """A response in the background is not run any more. One that has ended stays as it is."""
    stored = await _find(http_request)
    view = msgspec.json.decode(_now(http_request, stored), type=ResponseView)
    if not view.background:
        raise RequestError("Only a response that runs in the background can be cancelled.")
    if stored.runs:
        view.status = "cancelled"
        body = snapshot(view)
        await store_of(http_request).database.run(lambda db: responses.end(db, stored.id, body))
        runs_of(http_request).cancel(stored.id)
        stored = await _find(http_request)
    return Response(stored.view, media_type="application/json")


_PAGE = query_parameters(
    limit={"type": "integer", "minimum": 1, "maximum": 100}, order={"type": "string", "enum": ["asc", "desc"]}
)


@reading.get(_ID + "/input_items", openapi_extra=describe(ItemsView, parameters=_PAGE))
async def input_items(http_request: Request) -> Response:
    """What a stored response was given, newest first."""
    query = http_request.query_params
    stored = await _find(http_request)
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input)
    if query_choice(query, "order", ("desc", "asc")) == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [n for n, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError("There is no item with this id in the response.", "after")
        items = items[places[0] + 1 :]
    limit = query_number(query, "limit", 20, 1, 100)
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return JsonResponse(ItemsView(data=page, first_id=first, last_id=last, has_more=len(items) > limit))


async def _find(http_request: Request) -> StoredResponse:
    id, owner = http_request.path_params["response_id"], identity_of(http_request)
    stored = await store_of(http_request).database.run(lambda db: responses.find(db, owner, id))
    if stored is None:
        raise HttpError(404, f"Response with id '{id[:200]}' not found.", param="response_id")
    return stored


def _now(http_request: Request, stored: StoredResponse) -> bytes:
    """The response as clients see it now."""
    run = runs_of(http_request).find(stored.id)
    if not stored.runs or run is None or not run.has_begun:
        return stored.view
    view = msgspec.json.decode(stored.view, type=ResponseView)
    view.status = "in_progress"
    return snapshot(view)


def _events(http_request: Request, stored: StoredResponse, after: int) -> Response:
    return EventsOfRun(runs_of(http_request), store_of(http_request), stored, after)
