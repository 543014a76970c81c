"""The timeouts of the machine."""

from dataclasses import dataclass, field

from everserve.control.decide.slowness import SlowPolicy


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The timeouts, which depend on each other: detect_s < starved_s = 10 detect_s < unserved_s = 200 detect_s (for one
    suspicion a peer on a device takes 20 detect_s), and first_delay_s <= max_delay_s."""

    slow: SlowPolicy = field(default_factory=SlowPolicy)
    detect_s: float  # without a pulse, until the detector reports silence
    hello_s: float = 10.0  # from the fork to its first message; until then a hang cannot be detected
    fence_grace_s: float = 10.0  # how long a lost process may take to exit, before it is killed
    leave_s: float = 30.0  # how long a leaving worker may take to exit, before it is killed
    stable_s: float = 2.0  # an end sooner than this after ready counts as a crash while starting
    first_delay_s: float = 0.25  # after the second such end in a row; doubled with each further end
    max_delay_s: float = 30.0
    scarce_s: float = 1.0  # after a start for which there was no process or descriptor; not doubled
    max_failed_starts: int = 5  # in a row, in one seat, until the instance gives up (if it was never fully ready)
    isolate_s: float = 10.0  # how long the evacuation of a device at health level 5 may take
    heal_after_s: float = 30.0  # away for so long: its experts get other places, for redundancy; inf: never
    plan_after_s: float = 0.2  # after a loss: places for redundancy and balance are planned; for what has none, at once
    plan_within_s: float = 1.0  # the same, while experts have no place
    fill_again_s: float = 2.0  # after a fill that failed
    num_at_once: int = 32  # seats: a larger instance that starts gathers what its workers say ...
    gather_s: float = 0.25  # ... and publishes at most so often, until all are ready
    max_fills: int = 8  # in one message to a worker: routes follow when all of them are done
    blocked_s: float = 60.0  # how long a silent process may wait for a disk (state D), before it is lost
    max_unserved: int = 3  # reports by one peer within unserved_s: a worker with a pulse is lost after so many

    def __post_init__(self) -> None:
        assert self.detect_s > 0 and 0 < self.first_delay_s <= self.max_delay_s, self

    @property
    def starved_s(self) -> float:
        """How long a process that is not stopped may be silent: it may only be starved of CPU time."""
        return 10 * self.detect_s

    @property
    def unserved_s(self) -> float:
        """How long a report that a worker did not serve a peer counts. A worker that never serves is asked again as
        soon as it is trusted again, and collects reports quickly; one that fails only now and then stays."""
        return 200 * self.detect_s

    def delay_s(self, num_crashes: int) -> float:
        """How long the seat waits after this many early ends in a row: 0, 0, 0.25, 0.5, 1, ... seconds."""
        if num_crashes < 2:
            return 0.0
        doublings = min(num_crashes - 2, 60)
        return min(self.first_delay_s * float(2**doublings), self.max_delay_s)
