"""`POST /cluster/fault`: an operator's signal to a worker, to see that clients do not notice."""

import asyncio
import signal
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.gateway.depends import NEEDS_KEY, gateway_of
from everserve.gateway.errors import HttpError, unavailable
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import JsonResponse, read_json
from everserve.gateway.openapi import describe
from everserve.gateway.orchestrator import OrchestratorGone
from everserve.gateway.responses import FaultView
from everserve.tables.ids import Incarnation, Rank

router = APIRouter(dependencies=[NEEDS_KEY])
_ANSWER_S = 10.0  # an orchestrator that takes longer is in trouble itself


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which signal to send to the process in which seat."""

    rank: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    signal: Literal["KILL", "STOP", "CONT", "TERM"]


_decoder = msgspec.json.Decoder(FaultRequest)


@router.post("/cluster/fault", openapi_extra=describe(FaultView, request=FaultRequest, errors=(403, 409, 503)))
async def inject_fault(http_request: Request) -> Response:
    """Answers when the signal has been sent."""
    gateway = gateway_of(http_request)
    if not gateway.settings.enable_chaos:
        raise HttpError(403, "Fault injection is off: start the server with --enable-chaos to allow it.")
    fault = await read_json(http_request, _decoder)
    pid, incarnation = await _inject(gateway, Rank(fault.rank), signal.Signals[f"SIG{fault.signal}"])
    return JsonResponse(FaultView(rank=fault.rank, incarnation=incarnation, pid=pid, signal=fault.signal))


async def _inject(gateway: Gateway, rank: Rank, signum: signal.Signals) -> tuple[int, Incarnation]:
    """Have the signal sent; returns who got it."""
    if gateway.cluster.worker(rank) is None:
        raise HttpError(404, f"There is no worker with rank {rank}.", param="rank")
    if gateway.orchestrator is None:
        raise unavailable("The server is not ready: it has no orchestrator yet.")
    try:
        answer = await asyncio.wait_for(gateway.orchestrator.inject(rank, int(signum)), _ANSWER_S)
    except TimeoutError:
        raise unavailable("The orchestrator did not answer.") from None
    except OrchestratorGone as error:
        raise unavailable(str(error)) from error
    if answer.pid is None:
        raise HttpError(409, f"Nobody got the signal: {answer.reason.rstrip('.')}.", param="rank")
    return answer.pid, answer.incarnation
