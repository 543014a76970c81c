"""Observations of GPUs through NVML (`nvidia-ml-py`): Xid and ECC events as they happen, counters and states now and
then. A thread of its own: a driver that hangs delays nothing else.

Everything here may be missing: the package, the library, or single questions that a GPU does not answer.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from everserve.control.watch.health_sources import Post
from everserve.plan.health import EventSeen, Reading, TroubleSeen, XidSeen
from everserve.tables.health import UNTOLD_EVENTS

log = logging.getLogger(__name__)

_READ_EVERY_S = 5.0
_EVENT_WAIT_MS = 1000


class NvmlSource:
    """Watches the GPUs with these UUIDs. `devices_on`: the devices that a GPU is, or that have a share of it."""

    def __init__(self, uuids: Sequence[str], devices_on: Callable[[int], Sequence[int]], post: Post) -> None:
        self._uuids = uuids
        self._devices_on = devices_on
        self._post = post
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        nvml = load()
        if nvml is None:
            return
        found = [self._open(nvml, index, uuid) for index, uuid in enumerate(self._uuids)]
        gpus = [gpu for gpu in found if gpu is not None]
        events = _event_set(nvml, gpus)
        next_s = 0.0
        while not self._is_over.is_set():
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _READ_EVERY_S
                for gpu in gpus:
                    reading = gpu.read()
                    for device in self._devices_on(gpu.index):
                        self._post(replace(reading, device=device))
            if events is None:
                self._is_over.wait(_READ_EVERY_S)
            else:
                self._wait(nvml, events, gpus)

    def _open(self, nvml: Any, index: int, uuid: str) -> "Gpu | None":
        try:
            return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), index)
        except nvml.NVMLError as error:
            self._say(index, f"does not know GPU {uuid} ({error})")
            return None

    def _say(self, gpu: int, text: str) -> None:
        for device in self._devices_on(gpu):
            self._post(TroubleSeen(device=device, text=text))

    def _wait(self, nvml: Any, events: Any, gpus: Sequence["Gpu"]) -> None:
        """One event, or none for a while."""
        try:
            event = nvml.nvmlEventSetWait_v2(events, _EVENT_WAIT_MS)
        except nvml.NVMLError_Timeout:
            return
        except nvml.NVMLError as error:
            for gpu in gpus:  # if one is lost, the next reading says which
                self._say(gpu.index, f"does not report events ({error})")
            self._is_over.wait(_READ_EVERY_S)
            return
        uuid = nvml.nvmlDeviceGetUUID(event.device)
        for device in self._devices_on(self._uuids.index(uuid)) if uuid in self._uuids else ():
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                self._post(XidSeen(device=device, xid=int(event.eventData)))
            else:
                self._post(EventSeen(device=device, kind=int(event.eventType), data=int(event.eventData)))


class Gpu:
    """One GPU as NVML shows it."""

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self.handle = handle
        self.index = index
        self._nvml = nvml
        self._untold: set[str] = set()  # questions that this GPU does not answer

    def read(self) -> Reading:
        nvml, handle = self._nvml, self.handle
        try:
            rows = self._ask("nvmlDeviceGetRemappedRows", handle)
            return Reading(
                device=self.index,
                ecc_corrected=self._ecc(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                ecc_uncorrected=self._ecc(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
                rows_pending=bool(rows[2]) if rows is not None else None,
                rows_failed=bool(rows[3]) if rows is not None else None,
                throttles=self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
                temperature=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
                slowdown_at=self._ask(
                    "nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
                ),
            )
        except nvml.NVMLError_GpuIsLost:
            return Reading(device=self.index, is_lost=True)
        except nvml.NVMLError_ResetRequired:
            return Reading(device=self.index, needs_reset=True)

    def _ecc(self, kind: int) -> int | None:
        total: int | None = self._ask("nvmlDeviceGetTotalEccErrors", self.handle, kind, self._nvml.NVML_VOLATILE_ECC)
        return total

    def _ask(self, name: str, *arguments: object) -> Any:
        """None if it is not supported. Raises if the GPU is lost or must be reset."""
        nvml = self._nvml
        try:
            return getattr(nvml, name)(*arguments)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
            raise
        except nvml.NVMLError as error:
            if name not in self._untold:
                self._untold.add(name)
                log.info("a GPU does not answer %s: %s", name, error)
            return None


def load() -> Any:
    """The initialised module, or None with one line in the log."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.warning("the health of GPUs is not watched: nvidia-ml-py is not installed (pip install 'everserve[nvml]')")
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.warning("the health of GPUs is not watched: %s", error)
        return None
    return nvml


def _event_set(nvml: Any, gpus: Sequence[Gpu]) -> Any:
    """None if no GPU reports events."""
    events = nvml.nvmlEventSetCreate()
    num_watched = 0
    for gpu in gpus:
        try:
            supported = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle)
            nvml.nvmlDeviceRegisterEvents(gpu.handle, supported & ~UNTOLD_EVENTS, events)
            num_watched += 1
        except nvml.NVMLError as error:
            log.warning("Xid events of a GPU are not reported: %s", error)
    return events if num_watched else None
