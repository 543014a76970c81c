"""What operators ask for and what they are answered: the bodies of `POST /cluster/...`, which stay what they are on
their whole way from HTTP to the process that decides.

    drain     DrainRequest    DrainView          control/decide/operations.py
    scale     ScaleRequest    ScaleView          control/decide/operations.py
    switch    SwitchRequest   SwitchView         control/decide/switching.py
    return    ReturnRequest   DeviceChangeView   control/decide/operations.py
    health    HealthRequest   HealthView         control/decide/health.py
    fault     FaultRequest    DeviceChangeView   control/decide/operations.py, of a device
                              HostChangeView     control/decide/hosts.py, of a host
                              FaultView          control/run/injection.py, of a worker; procs/supervisor.py, else
    upgrade   UpgradeRequest  UpgradeView        procs/supervisor.py, upgrading.py

The gateway decodes and checks a request (gateway/api/operators.py) and sends it in an `Ask`; the orchestrator, or the
supervisor, replies with an `Answered` that has the body of the answer. So a new request needs a pair of structs here, a
route there, and a case where it is decided.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from everserve.config.cluster import MAX_RANKS

_Number = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_NumWorkers = Annotated[int, Meta(ge=0, le=MAX_RANKS)]


class Request(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="operator_asks"
):
    """Base of all requests. The tag is for other processes: the path has said it to HTTP."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all answers."""


class DrainRequest(Request, frozen=True):
    """The worker whose seat gets a new process."""

    rank: _Number


class DrainView(View, frozen=True):
    """`POST /cluster/drain`: the worker that was asked to leave."""

    rank: int
    incarnation: int


class ScaleRequest(Request, frozen=True):
    """How many workers of each role there should be (left out: as many as before), or how many devices."""

    attention: _NumWorkers | None = None
    expert: _NumWorkers | None = None
    devices: _NumWorkers | None = None


class ScaleView(View, frozen=True):
    """`POST /cluster/scale`: the workers that there will be, and the ranks that come and go."""

    attention: int
    expert: int
    devices: int
    added: tuple[int, ...]
    retired: tuple[int, ...]


class SwitchRequest(Request, frozen=True):
    """The worker, and the role that it should have."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    role: Literal["attention", "expert"]


class SwitchView(View, frozen=True):
    """`POST /cluster/switch`: the worker that changes its role."""

    rank: int
    role: str


class HealthRequest(Request, frozen=True):
    """A device and its level, 0 (healthy) to 6 (isolate at once)."""

    device: _Number
    level: Annotated[int, Meta(ge=0, le=6)]
    reason: Annotated[str, Meta(max_length=300)] = ""


class HealthView(View, frozen=True):
    """The level that a device has now, why, and what follows from it."""

    device: int
    level: int
    reason: str
    done: str


class FaultRequest(Request, frozen=True):
    """Which signal to send, and where: to the worker with this rank, or to a process that is not a worker. Or a device
    or a host that is lost, with its workers and everything in its memory; `gone`: until it is returned."""

    rank: _Number | None = None
    process: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    signal: Literal["KILL", "STOP", "CONT", "TERM", "HANG", "FLIP"] | None = None  # the last two: of workers only
    device: _Number | None = None
    host: _Number | None = None
    gone: bool = False


class FaultView(View, frozen=True, kw_only=True):
    """`POST /cluster/fault`: the process that got the signal, a worker or not."""

    rank: int | UnsetType = UNSET
    incarnation: int | UnsetType = UNSET
    process: str | UnsetType = UNSET
    pid: int
    signal: str


class ReturnRequest(Request, frozen=True):
    """A device or a host that was gone."""

    device: _Number | None = None
    host: _Number | None = None


class DeviceChangeView(View, frozen=True):
    """`POST /cluster/fault` with a device, `POST /cluster/return`: the device and the ranks on it."""

    device: int
    ranks: tuple[int, ...]


class HostChangeView(View, frozen=True):
    """The same, with a host."""

    host: int
    ranks: tuple[int, ...]


class UpgradeRequest(Request, frozen=True):
    """The interpreter of the version to go on with, on the server's host; without one, only the question which one is
    used now."""

    python: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class UpgradeView(View, frozen=True, kw_only=True):
    """`POST /cluster/upgrade`: which version goes on, and the interpreter that is used until then; how many gateways
    are of another version still."""

    version: str
    python: str
    gateways_left: int = 0


AnyRequest = DrainRequest | ScaleRequest | SwitchRequest | HealthRequest | FaultRequest | ReturnRequest | UpgradeRequest
