"""The same faults without recovery in place: the whole instance restarts, and its streams wait for that.

    restart    on the hosts that are there, at every loss, crash and return
    half       the same, but only with all hosts or with half of them, as where the number of workers is fixed

Either needs half of the hosts, for one place of every expert. While it restarts, or has too few hosts, it serves
nothing. A host that is not used may come and go.
"""

from collections.abc import Sequence

from everserve.simulate.account import Account
from everserve.simulate.faults import Fault, What
from everserve.simulate.settings import Settings


def restarting(settings: Settings, faults: Sequence[Fault]) -> Account:
    return _Restarts(settings, faults, falls_to_half=False).account


def falling_to_half(settings: Settings, faults: Sequence[Fault]) -> Account:
    return _Restarts(settings, faults, falls_to_half=True).account


class _Restarts:
    def __init__(self, settings: Settings, faults: Sequence[Fault], *, falls_to_half: bool) -> None:
        self._settings, self._falls_to_half = settings, falls_to_half
        self.account = Account()
        self._there = set(range(settings.num_hosts))
        self._now_s = 0.0
        self._used: frozenset[int] = frozenset(self._there)
        self._serves_at = 0.0  # when the last restart is over
        self._down_since: float | None = None
        for fault in faults:
            self._pass_to(fault.at_s)
            self._note(fault)
        self._pass_to(settings.days * 86_400)

    def _pass_to(self, at_s: float) -> None:
        if self._down_since is not None and self._used and self._serves_at <= at_s:
            self.account.pass_time(self._serves_at - self._now_s, 0.0)
            self.account.pause(self._serves_at - self._down_since, self._settings.num_streams)
            self._now_s, self._down_since = self._serves_at, None
        capacity = 0.0 if self._down_since is not None else len(self._used) / self._settings.num_hosts
        self.account.pass_time(at_s - self._now_s, capacity)
        self._now_s = at_s

    def _note(self, fault: Fault) -> None:
        if fault.what is What.CRASH:
            host = fault.which % self._settings.num_pairs // self._settings.gpus_per_host
            if host in self._used:
                self._restart()
            return
        (self._there.discard if fault.what is What.LOST else self._there.add)(fault.which)
        used = self._choose()
        if used != self._used:
            self._used = used
            self._restart()

    def _choose(self) -> frozenset[int]:
        """Those that are used now stay, as far as they can."""
        num, half = self._settings.num_hosts, -(-self._settings.num_hosts // 2)
        if len(self._there) < half:
            return frozenset()
        if not self._falls_to_half or len(self._there) == num:
            return frozenset(self._there)
        in_order = sorted(self._there, key=lambda host: (host not in self._used, host))
        return frozenset(in_order[:half])

    def _restart(self) -> None:
        settings = self._settings
        if self._down_since is None:
            self._down_since = self._now_s
        self._serves_at = self._now_s + settings.restart_s
        self.account.weights_bytes += bool(self._used) * settings.layers * settings.experts * settings.expert_mb * 2e6
        self.account.kv_bytes += settings.num_streams * settings.kv_mb * 1e6
