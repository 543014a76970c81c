"""When the machine looks at the loads of experts, and what it says about it."""

from collections.abc import Mapping

from everserve.control.decide.loads import ExpertLoads
from everserve.plan.balance import MIN_ROWS, BalancePolicy, Verdict
from everserve.plan.dealing import Loads
from everserve.wire.events import BalanceDecided

_SAY_AGAIN_S = 60.0  # a refusal for the same reason


class Balancer:
    """Loads are counted always; places change because of them only with a policy (`--enable-eplb`)."""

    def __init__(self, num_layers: int, num_experts: int, policy: BalancePolicy | None) -> None:
        self.policy = policy
        self.loads = ExpertLoads(num_layers, num_experts)
        self.look_at: float | None = None  # set while there are reports that were not looked at
        self._looked_at: float | None = None
        self._known: dict[int, Loads] = {}  # by layer, as there were last rows enough
        self._said: tuple[str, float] = ("", float("-inf"))

    def add(self, rows: Mapping[int, Mapping[int, int]], now: float) -> None:
        self.loads.add(rows, now)
        if self._looked_at is None:
            self._looked_at = now  # one report of one worker is not enough
        if self.policy is not None and self.look_at is None:
            self.look_at = max(now, self._looked_at + self.policy.every_s)

    def measured(self, num_workers: int) -> dict[int, Loads]:
        """Loads by which work should be even, as they were when there were last rows enough to tell. Where there never
        were, but experts may be moved for their load, an empty one; where they may not, these experts count the
        same."""
        loads = self.loads.by_layer()
        self._known |= {index: load for index, load in loads.items() if sum(load) >= MIN_ROWS * num_workers}
        unknown: dict[int, Loads] = {} if self.policy is None else dict.fromkeys(range(self.loads.num_layers), ())
        return unknown | self._known

    def is_due(self, now: float) -> bool:
        """Whether to decide now. If so, the next time is after more reports."""
        if self.look_at is None or now < self.look_at:
            return False
        self.look_at, self._looked_at = None, now
        return True

    def tell(self, verdict: Verdict, goal: int, now: float) -> tuple[BalanceDecided, ...]:
        """For operators: what was accepted, and now and then why nothing was. `goal`: the version that follows."""
        kind = "" if verdict.placement is not None else verdict.reason.split(":")[0].split(";")[0]
        said, at = self._said
        if kind and kind == said and now - at < _SAY_AGAIN_S:
            return ()
        self._said = kind, now
        return (
            BalanceDecided(
                is_accepted=verdict.placement is not None,
                reason=verdict.reason,
                max_over_mean=verdict.max_over_mean,
                expected=verdict.expected,
                num_moves=verdict.num_moves,
                goal=goal,
            ),
        )
