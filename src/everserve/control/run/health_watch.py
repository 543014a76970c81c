"""Observations of devices, from all sources, become diagnoses for the machine (plan/health.py)."""

import time

from everserve.control.decide.machine import Machine
from everserve.control.run.input_queue import InputQueue
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.control.watch.health_sources import HealthInbox, HealthSource
from everserve.control.watch.nvml import NvmlSource
from everserve.plan.health import Judge
from everserve.wire.messages import StartOrchestrator


class HealthWatch:
    """The threads of its sources end with this process."""

    def __init__(self, start: StartOrchestrator, machine: Machine, queue: InputQueue, gateway: GatewayEnds) -> None:
        self.inbox = HealthInbox()
        self._machine = machine
        self._gateway = gateway
        self._queue = queue
        self._judge = Judge(machine.goal.health)
        if start.cluster.health_source:
            HealthSource(start.cluster.health_source, self.inbox).start()
        if start.gpus:
            NvmlSource(start.gpus, self._devices_on, self.inbox.post).start()

    def trust(self, device: int) -> None:
        """An operator says that it is healthy."""
        self._judge.forget(device)

    def read(self) -> None:
        for seen in self.inbox.take():
            for diagnosis in self._judge.note(seen, time.monotonic()):
                self._queue.tell(diagnosis)
        self._gateway.count_health_troubles(self.inbox.num_troubles)

    def _devices_on(self, gpu: int) -> list[int]:
        """The device that a GPU is, or those that have a share of it."""
        return sorted({seat.device for seat in self._machine.goal.seats if seat.gpu == gpu})
