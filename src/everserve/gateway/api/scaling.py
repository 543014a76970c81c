"""`POST /cluster/scale`: more or fewer workers, while streams run."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.config.cluster import MAX_RANKS
from everserve.errors import RequestError
from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.responses import ScaleView

router = APIRouter(dependencies=[NEEDS_ADMIN])

Number = Annotated[int, Meta(ge=0, le=MAX_RANKS)]


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers of each role there should be (left out: as many as before), or how many devices."""

    attention: Number | None = None
    expert: Number | None = None
    devices: Number | None = None


_decoder = msgspec.json.Decoder(ScaleRequest)


@router.post("/cluster/scale", openapi_extra=describe(ScaleView, request=ScaleRequest, errors=(403, 409, 503)))
async def scale(http_request: Request) -> Response:
    """Answers when the new goal is accepted; `/cluster` shows how workers come and leave."""
    gateway = gateway_of(http_request)
    asked = await read_json(http_request, _decoder)
    has_numbers = asked.attention is not None or asked.expert is not None
    if has_numbers == (asked.devices is not None):
        raise RequestError("Give 'attention' and 'expert' (or one of them), or 'devices'.", "devices")
    answer = await gateway.orchestrator.scale(asked.attention, asked.expert, asked.devices)
    if answer.refused:
        raise HttpError(409, f"Not scaled: {answer.refused.rstrip('.')}.")
    view = ScaleView(
        attention=answer.attention,
        expert=answer.expert,
        devices=answer.devices,
        added=[*answer.added],
        retired=[*answer.retired],
    )
    return JsonResponse(view)
