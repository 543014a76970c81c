"""Which failures are survived now, for the log and the gateway."""

import logging

from everserve.config.kvlog import LogConfig
from everserve.control.decide.machine import Machine
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.plan.survival import survivals
from everserve.tables.goal import Capacity

log = logging.getLogger(__name__)

_AFTER_S = 1.0  # a change of the goal is first of all to be carried out


class SurvivalsView:
    """Looks at the goal once in every turn; computes when it has been the same for a moment."""

    def __init__(self, gateway: GatewayEnds, capacity: Capacity, log_config: LogConfig) -> None:
        self._gateway = gateway
        self._capacity = capacity
        self._log_config = log_config
        self._version = -1  # of the goal
        self._since_s = 0.0
        self._is_due = False

    def flush(self, machine: Machine, now_s: float) -> None:
        """The first time at once."""
        goal = machine.goal
        is_first = self._version < 0
        if goal.version != self._version:
            self._version, self._since_s, self._is_due = goal.version, now_s, True
        if not self._is_due or (now_s - self._since_s < _AFTER_S and not is_first):
            return
        self._is_due = False
        found = survivals(goal, self._capacity, self._log_config)
        if is_first:
            for survival in found:
                log.info("survived: %s", survival.sentence)
        self._gateway.tell_survivals(found)
