"""`POST /cluster/switch`: another role for a worker, while streams run."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.config.cluster import MAX_RANKS
from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.responses import SwitchView
from everserve.tables.ids import Rank, Role

router = APIRouter(dependencies=[NEEDS_ADMIN])


class SwitchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker, and the role that it should have."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    role: Literal["attention", "expert"]


_decoder = msgspec.json.Decoder(SwitchRequest)


@router.post("/cluster/switch", openapi_extra=describe(SwitchView, request=SwitchRequest, errors=(403, 409, 503)))
async def switch(http_request: Request) -> Response:
    """Answers when it is decided; `/cluster` shows how the worker leaves and comes back in its new role."""
    gateway = gateway_of(http_request)
    asked = await read_json(http_request, _decoder)
    answer = await gateway.orchestrator.switch(Rank(asked.rank), Role(asked.role))
    if answer.refused:
        raise HttpError(409, f"Not switched: {answer.refused.rstrip('.')}.")
    return JsonResponse(SwitchView(rank=asked.rank, role=asked.role))
