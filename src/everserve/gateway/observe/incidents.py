"""One thing that happened and all that came of it: facts in, words out.

An incident begins with whatever is heard of first (a signal, a suspicion, a lost stream, the orchestrator's verdict),
collects its consequences, and is closed when what was lost is there again. Its sentence grows on the way:

    attention worker 1 died (SIGKILL) · 4 streams moved to worker 0, 512 tokens of KV from its log · longest pause 31 ms
    · 0 tokens lost · replaced after 0.9 s
"""

import signal
from collections import Counter

import msgspec

from everserve.words import count, plural


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as it stands now, for people."""

    id: int
    unix_s: float  # when it began
    kind: str  # "fault", "move" (planned), "note", "trouble"
    who: str  # "expert worker 3": for where a sentence is too long
    title: str
    parts: list[str]
    is_open: bool  # something is still missing
    ended_unix_s: float | None  # when that was there again
    pause_ms: float | None  # the longest that any client waited across it

    @property
    def sentence(self) -> str:
        return " · ".join([self.title, *self.parts])


class Incident:
    """What all incidents have. `at_s` is the machine's monotonic clock, as in events."""

    kind = "note"

    def __init__(self, id: int, at_s: float, unix_s: float, who: str = "", title: str = "") -> None:
        self.id = id
        self.at_s = self.until_s = at_s  # from the first sign of it to its last effect on streams
        self.unix_s = unix_s
        self.who = who
        self.title = title
        self.facts: list[str] = []
        self.version = 0  # of the timeline when this was last changed
        self.is_open = False
        self.ended_unix_s: float | None = None
        self.pause_s: float | None = None
        self.is_waited_for = False  # a client that waited when it began waits still
        self.num_broken = 0  # streams that could not go on
        self.tally = 0

    def began(self, at_s: float, unix_s: float) -> None:
        """Several processes report it: the earliest time counts."""
        if at_s < self.at_s:
            self.at_s, self.unix_s = at_s, unix_s

    def affect(self, at_s: float) -> None:
        """Streams felt it at this moment."""
        self.until_s = max(at_s, self.until_s)

    def close(self, unix_s: float) -> None:
        self.is_open, self.ended_unix_s = False, unix_s

    def words(self) -> tuple[str, list[str]]:
        """Title and parts."""
        return self.title, list(self.facts)

    def entry(self) -> Entry:
        title, parts = self.words()
        return Entry(
            id=self.id,
            unix_s=round(self.unix_s, 3),
            kind="trouble" if self.num_broken else self.kind,
            who=self.who,
            title=title,
            parts=parts,
            is_open=self.is_open,
            ended_unix_s=self.ended_unix_s,
            pause_ms=round(1e3 * self.pause_s, 1) if self.pause_s is not None else None,
        )

    def cost(self) -> list[str]:
        """What clients noticed."""
        if self.num_broken:
            return [f"{count(self.num_broken, 'stream')} broke"]
        if self.is_waited_for:
            return [f"streams wait since {span(self.pause_s)}"] if self.pause_s is not None else []
        if self.pause_s is not None:
            return [f"longest pause {span(self.pause_s)}", "0 tokens lost"]
        return [] if self.is_open else ["no stream was running"]


class WorkerIncident(Incident):
    """A worker that is lost, or leaves, or is only suspected."""

    def __init__(self, id: int, at_s: float, unix_s: float, rank: int, incarnation: int | None, role: str) -> None:
        super().__init__(id, at_s, unix_s, f"{role} worker {rank}".strip())
        self.rank = rank
        self.incarnation = incarnation  # None: not known yet
        self.role = role
        self.is_open = True
        self.signal = ""  # what an operator sent, or what killed it
        self.signalled_s: float | None = None
        self.suspected_by: int | None = None
        self.cause = ""  # the orchestrator's verdict: "crash", "hang", "exit", "left"
        self.reason = ""
        self.is_leaving = False
        self.noticed_s: float | None = None
        self.rerouted_s: float | None = None  # the last of its peers to go elsewhere by itself
        self.published_s: float | None = None  # when routes without this worker were published
        self.num_experts = 0  # that had their active place here, per layer
        self.num_rows = 0
        self.moved_to: Counter[int] = Counter()  # streams, by rank
        self.num_restored = self.num_recomputed = 0  # tokens
        self.waiting_for: tuple[int, ...] = ()  # experts without a place
        self.waited_s: float | None = None
        self.backed_off = ""
        self.replaced_s: float | None = None
        self.num_stale = 0

    @property
    def kind(self) -> str:  # type: ignore[override]
        if self.cause in ("crash", "hang", "exit") or self.signal in ("KILL", "STOP"):
            return "fault"
        return "move" if self.is_leaving or self.cause == "left" else "note"

    @property
    def is_decided(self) -> bool:
        """Whether something came of it; a suspicion may be wrong."""
        return bool(self.cause or self.is_leaving or self.moved_to)

    def notice(self, at_s: float) -> None:
        self.noticed_s = at_s if self.noticed_s is None else min(at_s, self.noticed_s)
        self.affect(at_s)  # the last worker to notice is the last to reroute

    def words(self) -> tuple[str, list[str]]:
        parts = [*self._notice(), *self._experts(), *self._streams()]
        if self.is_decided or self.pause_s is not None:
            parts += self.cost()
        if self.replaced_s is not None:
            parts.append(f"replaced after {self.replaced_s:.1f} s")
        elif self.backed_off and self.is_open:
            parts.append(self.backed_off)
        if self.num_stale:
            parts.append(f"{count(self.num_stale, 'late message')} of it dropped")
        return self._title(), parts

    def _title(self) -> str:
        by = f" (SIG{self.signal})" if self.signal else ""
        match self.cause:
            case "crash":
                return f"{self.who} died{by}"
            case "hang":
                return f"{self.who} stopped answering{by}"
            case "exit":
                return f"{self.who} ended by itself: {self.reason}"
            case "left":
                return f"{self.who} left{by}"
        if self.is_leaving:
            return f"{self.who} was asked to leave{by}"
        if self.cause or self.moved_to:
            return f"{self.who} is lost{by}"
        if self.signal:
            return f"SIG{self.signal} sent to {self.who}"
        if not self.reason:
            return f"rows were sent again to others than {self.who}"
        if self.is_open:
            return f"{self.who} is suspected by worker {self.suspected_by}: {self.reason}"
        return f"{self.who} was suspected for a moment: {self.reason}"

    def _notice(self) -> list[str]:
        if self.signalled_s is None or self.noticed_s is None or self.cause not in ("crash", "hang"):
            return []
        noticed_s = max(0.0, self.noticed_s - self.signalled_s)
        # Nothing needs a process at every moment, so it may be noticed later than any stream waited.
        went_on = self.pause_s is not None and self.pause_s < noticed_s and not self.is_waited_for
        return [f"noticed in {span(noticed_s)}" + (", streams went on meanwhile" if went_on else "")]

    def _experts(self) -> list[str]:
        parts = []
        if self.waiting_for and self.waited_s is None:
            parts.append(f"streams wait: {count(len(self.waiting_for), 'expert')} without a place")
        elif self.waited_s is not None:
            parts.append(f"streams waited {span(self.waited_s)} for experts without a place")
        elif self.num_experts and self.cause and (by_s := self.rerouted_s or self.published_s) is not None:
            took = f" in {span(max(0.0, by_s - self.at_s))}" if self.cause != "left" else ""
            parts.append(f"{count(self.num_experts, 'expert')} per layer moved to their shadows{took}")
        if self.num_rows:
            parts.append(f"{count(self.num_rows, 'row')} sent again")
        return parts

    def _streams(self) -> list[str]:
        if not self.moved_to:
            return []
        where = ", ".join(str(rank) for rank in sorted(self.moved_to))
        words = f"{count(self.moved_to.total(), 'stream')} moved to {plural('worker', len(self.moved_to))} {where}"
        if self.num_restored or self.num_recomputed:
            words += f", {count(self.num_restored, 'token')} of KV from its log"
            words += f", {self.num_recomputed:,} computed again" if self.num_recomputed else ""
        return [words]


class ProcessIncident(Incident):
    """A process that is not a worker has ended."""

    kind = "fault"

    def __init__(self, id: int, at_s: float, unix_s: float, name: str, exit_status: int) -> None:
        super().__init__(id, at_s, unix_s, f"the {name}")
        self.name = name
        self.is_open = True
        self.signal = signal_name(exit_status)
        self.title = f"the {name} died (SIG{self.signal})" if self.signal else f"the {name} ended ({exit_status})"

    def words(self) -> tuple[str, list[str]]:
        return self.title, [*self.facts, *self.cost()]


def signal_name(exit_status: int) -> str:
    """The name of the signal that ended a process, if one did."""
    try:
        return signal.Signals(-exit_status).name.removeprefix("SIG") if exit_status < 0 else ""
    except ValueError:
        return ""


def span(seconds: float) -> str:
    """A duration with as many digits as mean something."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
