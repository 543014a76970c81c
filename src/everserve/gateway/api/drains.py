"""`POST /cluster/drain`: a worker gives its streams to other workers, leaves, and is replaced."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.responses import DrainView
from everserve.tables.ids import Rank

router = APIRouter(dependencies=[NEEDS_ADMIN])


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose seat gets a new process."""

    rank: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


_decoder = msgspec.json.Decoder(DrainRequest)


@router.post(
    "/cluster/drain", openapi_extra=describe(DrainView, status=202, request=DrainRequest, errors=(403, 409, 503))
)
async def drain(http_request: Request) -> Response:
    """Answers when the worker has been asked to leave; `/cluster` shows when it is gone."""
    gateway = gateway_of(http_request)
    rank = Rank((await read_json(http_request, _decoder)).rank)
    gateway.check_rank(rank)
    answer = await gateway.orchestrator.drain(rank)
    if not answer.incarnation:
        raise HttpError(409, f"The worker was not drained: {answer.reason.rstrip('.')}.", param="rank")
    return JsonResponse(DrainView(rank=rank, incarnation=answer.incarnation), 202)
