"""`POST /cluster/fault`: an operator's signal to a process, or the loss of a device, to see that clients do not notice.
`POST /cluster/return`: the device is there again."""

import signal
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.depends import NEEDS_ADMIN, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonResponse, read_json
from everserve.gateway.http.responses import DeviceChangeView, FaultView
from everserve.gateway.questions import Unanswered
from everserve.gateway.supervisor import PROCESSES
from everserve.tables.ids import Rank
from everserve.wire.messages import DeviceAnswered

router = APIRouter(dependencies=[NEEDS_ADMIN])

_Number = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which signal to send, and where: to the worker with this rank, or to a process that is not a worker. Or a device
    that is lost, with its workers and everything in its memory; `gone`: until it is returned."""

    rank: _Number | None = None
    process: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    signal: Literal["KILL", "STOP", "CONT", "TERM", "HANG"] | None = None  # HANG: of a worker's main thread only
    device: _Number | None = None
    gone: bool = False


class ReturnRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that was gone."""

    device: _Number


_decoder = msgspec.json.Decoder(FaultRequest)
_return_decoder = msgspec.json.Decoder(ReturnRequest)


@router.post("/cluster/fault", openapi_extra=describe(FaultView, request=FaultRequest, errors=(403, 409, 503)))
async def inject_fault(http_request: Request) -> Response:
    """Answers when the signal has been sent, or the device is lost."""
    gateway = gateway_of(http_request)
    if not gateway.config.enable_chaos:
        raise HttpError(403, "Fault injection is off: start the server with --enable-chaos to allow it.")
    fault = await read_json(http_request, _decoder)
    if [fault.rank, fault.process, fault.device].count(None) != 2:
        message = "Give one of 'rank' (a worker), 'process' (any other process) and 'device' (with all its workers)."
        raise RequestError(message, "rank")
    if (fault.signal is None) == (fault.device is None) or (fault.gone and fault.device is None):
        raise RequestError("A process gets a 'signal'; a 'device' has none, and may be 'gone'.", "signal")
    if fault.device is not None:
        answer = await gateway.orchestrator.lose_device(fault.device, fault.gone)
        return JsonResponse(_check_device(fault.device, answer))
    assert fault.signal is not None
    if fault.process is not None and fault.signal == "HANG":
        raise RequestError("Only a worker can be told to hang.", "signal")
    if fault.process is not None:
        return JsonResponse(await _signal_process(gateway, fault.process, fault.signal))
    return JsonResponse(await _signal_worker(gateway, Rank(fault.rank or 0), fault.signal))


@router.post("/cluster/return", openapi_extra=describe(DeviceChangeView, request=ReturnRequest, errors=(409, 503)))
async def return_device(http_request: Request) -> Response:
    """Answers when workers are about to start on the device."""
    device = (await read_json(http_request, _return_decoder)).device
    return JsonResponse(_check_device(device, await gateway_of(http_request).orchestrator.return_device(device)))


def _check_device(device: int, answer: DeviceAnswered) -> DeviceChangeView:
    if answer.reason:
        raise HttpError(409, f"Nothing was done: {answer.reason.rstrip('.')}.", param="device")
    return DeviceChangeView(device=device, ranks=list(answer.ranks))


async def _signal_worker(gateway: Gateway, rank: Rank, name: str) -> FaultView:
    gateway.check_rank(rank)
    answer = await gateway.orchestrator.inject(rank, None if name == "HANG" else signal.Signals[f"SIG{name}"])
    pid = _check_pid(answer.pid, answer.reason, "rank")
    return FaultView(rank=rank, incarnation=answer.incarnation, pid=pid, signal=name)


async def _signal_process(gateway: Gateway, process: str, name: str) -> FaultView:
    if process not in PROCESSES:
        message = f"There is no process '{process}' that could get signals, only {', '.join(PROCESSES)} (and workers)."
        raise HttpError(404, message, param="process")
    if gateway.supervisor is None:
        raise Unanswered("There is no supervisor that could send signals.")
    answer = await gateway.supervisor.signal(process, signal.Signals[f"SIG{name}"])
    return FaultView(process=process, pid=_check_pid(answer.pid, answer.reason, "process"), signal=name)


def _check_pid(pid: int | None, reason: str, param: str) -> int:
    if pid is None:
        raise HttpError(409, f"The signal was not sent: {reason.rstrip('.')}.", param=param)
    return pid
