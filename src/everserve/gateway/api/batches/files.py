"""/v1/files: the lines of batches, and what batches have written."""

import asyncio
import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everserve.errors import RequestError
from everserve.gateway.api.batches import lines
from everserve.gateway.api.batches.view import DeletedFile, FileList, FileView
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_ORIGIN, identity_of, store_of
from everserve.gateway.api.openapi import describe, query_parameters
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, held_by, read_body
from everserve.gateway.http.multipart import Part, boundary_of, read_form
from everserve.gateway.http.query import query_choice, query_number
from everserve.gateway.store import files
from everserve.gateway.store.files import File
from everserve.gateway.store.store import Store

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_ORIGIN])
PATH = "/v1/files"
_PURPOSES = ("batch", "batch_output")
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


@router.post(PATH, openapi_extra=describe(FileView, form=_FORM))
async def upload(http_request: Request) -> Response:
    boundary = boundary_of(http_request.headers.get("content-type", ""))
    body = await read_body(http_request)
    held_by(http_request).set(2 * len(body))
    store = store_of(http_request)
    form = await asyncio.to_thread(read_form, body, boundary)
    content = form.get("file")
    if content is None or content.filename is None:
        raise RequestError("Missing required parameter: 'file'.", "file")
    purpose = _text(form, "purpose")
    if purpose != "batch":
        raise RequestError("'purpose' must be 'batch': this server keeps files for nothing else.", "purpose")
    created = int(time.time())
    file = File(
        id=f"file-{uuid.uuid4().hex}",
        owner=identity_of(http_request),
        created=created,
        expires=_expires(form, store, created),
        purpose=purpose,
        name=content.filename[:255],
        bytes=len(content.data),
        is_ready=True,
    )
    await store.database.run(lambda db: files.add(db, file, lines.split(content.data)))
    return JsonResponse(FileView.of(file))


def _expires(form: dict[str, Part], store: Store, created: int) -> int:
    seconds = _text(form, "expires_after[seconds]")
    if seconds is None:
        return store.expires(created)
    if _text(form, "expires_after[anchor]") != "created_at":
        raise RequestError("'expires_after[anchor]' must be 'created_at'.", "expires_after[anchor]")
    return created + query_number({"expires_after[seconds]": seconds}, "expires_after[seconds]", 0, 3600, 2592000)


def _text(form: dict[str, Part], name: str) -> str | None:
    part = form.get(name)
    if part is None:
        return None
    try:
        return bytes(part.data[:1024]).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"'{name}' is not text.", name) from error


@router.get(
    PATH,
    openapi_extra=describe(
        FileList,
        parameters=query_parameters(
            limit={"type": "integer", "minimum": 1, "maximum": 10000},
            order={"type": "string", "enum": ["asc", "desc"]},
            purpose={"type": "string"},
            after={"type": "string"},
        ),
    ),
)
async def show_all(http_request: Request) -> Response:
    query, owner = http_request.query_params, identity_of(http_request)
    limit = query_number(query, "limit", 10000, 1, 10000)
    ascends = query_choice(query, "order", ("desc", "asc")) == "asc"
    purpose, after = query.get("purpose"), query.get("after")
    found = await store_of(http_request).database.run(
        lambda db: files.page(db, owner, purpose, after, limit + 1, ascends)
    )
    data = [FileView.of(file) for file in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return JsonResponse(FileList(data=data, first_id=first, last_id=last, has_more=len(found) > limit))


@router.get(PATH + "/{file_id}", openapi_extra=describe(FileView))
async def show(http_request: Request) -> Response:
    return JsonResponse(FileView.of(await _find(http_request)))


@router.delete(PATH + "/{file_id}", openapi_extra=describe(DeletedFile, errors=(409,)))
async def delete(http_request: Request) -> Response:
    file, store = await _find(http_request), store_of(http_request)
    if await store.database.run(lambda db: files.is_read(db, file.id)):
        raise HttpError(409, f"The file '{file.id}' belongs to a batch that has not ended.", param="file_id")
    await store.database.run(lambda db: files.delete(db, file.owner, file.id))
    return JsonResponse(DeletedFile(id=file.id))


@router.get(PATH + "/{file_id}/content", openapi_extra=describe("application/octet-stream"))
async def content(http_request: Request) -> Response:
    file = await _find(http_request)
    return _Content(store_of(http_request), file)


class _Content(Response):
    """Read from the store while it is sent."""

    media_type = "application/octet-stream"

    def __init__(self, store: Store, file: File) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-length": str(file.bytes)})
        self._store = store
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        after = -1
        while pieces := await self._read(after):
            after = pieces[-1][0]
            await send(
                {"type": "http.response.body", "body": b"".join(data for _, data in pieces), "more_body": True}
            )  # fmt: skip
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, after: int) -> list[tuple[int, bytes]]:
        return await self._store.database.run(lambda db: files.read(db, self._file.id, after))


async def _find(http_request: Request) -> File:
    id, owner = http_request.path_params["file_id"], identity_of(http_request)
    file = await store_of(http_request).database.run(lambda db: files.find(db, owner, id))
    if file is None:
        raise HttpError(404, f"No such File object: {id[:200]}", param="id")
    return file
