"""`POST /cluster/health`: an operator, or a node agent, says how healthy a device is."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.responses import HealthView
from everserve.tables.health import Level

router = APIRouter(dependencies=[NEEDS_ADMIN])


class HealthRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device and its level, 0 (healthy) to 6 (isolate at once)."""

    device: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    level: Annotated[int, Meta(ge=0, le=6)]
    reason: Annotated[str, Meta(max_length=300)] = ""


_decoder = msgspec.json.Decoder(HealthRequest)


@router.post("/cluster/health", openapi_extra=describe(HealthView, request=HealthRequest, errors=(403, 409, 503)))
async def say_health(http_request: Request) -> Response:
    """Answers when it is decided what follows; `/cluster` shows how workers leave and come back."""
    asked = await read_json(http_request, _decoder)
    reason = " ".join(asked.reason.split())
    answer = await gateway_of(http_request).orchestrator.say_health(asked.device, Level(asked.level), reason)
    if answer.refused:
        raise HttpError(409, f"Nothing was done: {answer.refused.rstrip('.')}.", param="device")
    return JsonResponse(HealthView(device=asked.device, level=answer.level, reason=answer.reason, done=answer.done))
