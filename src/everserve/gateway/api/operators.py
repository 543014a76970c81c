"""`POST /cluster/...`: what operators ask for, while streams run. Requests and answers: wire/operators.py.

The orchestrator decides; the supervisor sends signals to processes that are not workers.
"""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of, question_id
from everserve.gateway.api.openapi import describe
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import read_json
from everserve.gateway.questions import Unanswered
from everserve.gateway.supervisor import processes_of
from everserve.tables.ids import Rank
from everserve.wire.messages import Answered
from everserve.wire.operators import (
    DeviceChangeView,
    DrainRequest,
    DrainView,
    FaultRequest,
    FaultView,
    HealthRequest,
    HealthView,
    ReturnRequest,
    ScaleRequest,
    ScaleView,
    SwitchRequest,
    SwitchView,
    UpgradeRequest,
    UpgradeView,
)

_UPGRADE_S = 120.0  # the other version imports all that it is made of, to see that it can

router = APIRouter(dependencies=[NEEDS_ADMIN])

_drain = msgspec.json.Decoder(DrainRequest)
_scale = msgspec.json.Decoder(ScaleRequest)
_switch = msgspec.json.Decoder(SwitchRequest)
_health = msgspec.json.Decoder(HealthRequest)
_fault = msgspec.json.Decoder(FaultRequest)
_upgrade = msgspec.json.Decoder(UpgradeRequest)
_return = msgspec.json.Decoder(ReturnRequest)


@router.post(
    "/cluster/drain", openapi_extra=describe(DrainView, status=202, request=DrainRequest, errors=(403, 409, 503))
)
async def drain(http_request: Request) -> Response:
    """A worker gives its streams to other workers, leaves, and is replaced. Answers when the worker has been asked to
    leave; `/cluster` shows when it is gone."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _drain)
    gateway.check_rank(Rank(asked.rank))
    return _answer(
        await gateway.orchestrator.ask(asked, question_id(http_request)),
        "The worker was not drained",
        "rank",
        status=202,
    )


@router.post("/cluster/scale", openapi_extra=describe(ScaleView, request=ScaleRequest, errors=(403, 409, 503)))
async def scale(http_request: Request) -> Response:
    """More or fewer workers. Answers when the new goal is accepted; `/cluster` shows how workers come and leave."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _scale)
    has_numbers = asked.attention is not None or asked.expert is not None
    if has_numbers == (asked.devices is not None):
        raise RequestError("Give 'attention' and 'expert' (or one of them), or 'devices'.", "devices")
    return _answer(await gateway.orchestrator.ask(asked, question_id(http_request)), "Not scaled")


@router.post("/cluster/switch", openapi_extra=describe(SwitchView, request=SwitchRequest, errors=(403, 409, 503)))
async def switch(http_request: Request) -> Response:
    """Another role for a worker. Answers when it is decided; `/cluster` shows how the worker leaves and comes back in
    its new role."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _switch)
    return _answer(await gateway.orchestrator.ask(asked, question_id(http_request)), "Not switched")


@router.post("/cluster/health", openapi_extra=describe(HealthView, request=HealthRequest, errors=(403, 409, 503)))
async def say_health(http_request: Request) -> Response:
    """An operator, or a node agent, says how healthy a device is. Answers when it is decided what follows; `/cluster`
    shows how workers leave and come back."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _health)
    return _answer(await gateway.orchestrator.ask(asked, question_id(http_request)), "Nothing was done", "device")


@router.post("/cluster/return", openapi_extra=describe(DeviceChangeView, request=ReturnRequest, errors=(409, 503)))
async def return_device(http_request: Request) -> Response:
    """A device is there again: answers when workers are about to start on it. Or a host, which may join again."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _return)
    if (asked.device is None) == (asked.host is None):
        raise RequestError("Give a 'device' or a 'host'.", "device")
    param = "device" if asked.device is not None else "host"
    return _answer(await gateway.orchestrator.ask(asked, question_id(http_request)), "Nothing was done", param)


@router.post("/cluster/upgrade", openapi_extra=describe(UpgradeView, request=UpgradeRequest, errors=(403, 409, 503)))
async def upgrade(http_request: Request) -> Response:
    """Go on with another installed version. Answers when that is known to fit, and takes over; gateways follow, and
    workers stay what they are until they are replaced (`/cluster/drain`)."""
    gateway, asked = gateway_of(http_request), await read_json(http_request, _upgrade)
    if gateway.supervisor is None:
        raise Unanswered("There is no supervisor that could be upgraded.")
    return _answer(await gateway.supervisor.ask(asked, question_id(http_request), _UPGRADE_S), "Not upgraded", "python")


@router.post("/cluster/fault", openapi_extra=describe(FaultView, request=FaultRequest, errors=(403, 409, 503)))
async def inject_fault(http_request: Request) -> Response:
    """An operator's signal to a process, or the loss of a device or a host, to see that clients do not notice. Answers
    when the signal has been sent, or the device or host is lost."""
    gateway = gateway_of(http_request)
    if not gateway.config.enable_chaos:
        raise HttpError(403, "Fault injection is off: start the server with --enable-chaos to allow it.")
    fault = await read_json(http_request, _fault)
    _check(fault, gateway.config.gateways)
    if fault.device is not None or fault.host is not None:
        param = "device" if fault.device is not None else "host"
        return _answer(await gateway.orchestrator.ask(fault, question_id(http_request)), "Nothing was done", param)
    if fault.rank is not None:
        gateway.check_rank(Rank(fault.rank))
        return _answer(
            await gateway.orchestrator.ask(fault, question_id(http_request)), "The signal was not sent", "rank"
        )
    if gateway.supervisor is None:
        raise Unanswered("There is no supervisor that could send signals.")
    return _answer(await gateway.supervisor.ask(fault, question_id(http_request)), "The signal was not sent", "process")


def _check(fault: FaultRequest, num_gateways: int) -> None:
    """Raise unless it says one thing."""
    if [fault.rank, fault.process, fault.device, fault.host].count(None) != 3:
        message = "Give one of 'rank' (a worker), 'process' (any other), 'device' and 'host' (with all their workers)."
        raise RequestError(message, "rank")
    is_place = fault.device is not None or fault.host is not None
    if (fault.signal is not None) == is_place or (fault.gone and not is_place):
        raise RequestError("A process gets a 'signal'; a 'device' or 'host' has none, and may be 'gone'.", "signal")
    if fault.process is not None and fault.signal in ("HANG", "FLIP"):
        raise RequestError("Only a worker can be told to hang, or to compute wrong.", "signal")
    processes = processes_of(num_gateways)
    if fault.process is not None and fault.process not in processes:
        known = ", ".join(processes)
        message = f"There is no process '{fault.process}' that could get signals, only {known} (and workers)."
        raise HttpError(404, message, param="process")


def _answer(answered: Answered, refused: str, param: str | None = None, status: int = 200) -> Response:
    """`refused`: how a refusal begins; `param`: the field that it is about."""
    if answered.refused:
        raise HttpError(409, f"{refused}: {answered.refused.rstrip('.')}.", param=param)
    return Response(answered.view, status, media_type="application/json")
