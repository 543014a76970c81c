"""What happens in the demo: four texts, three deaths, and what clients saw of them."""

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from everserve.client import Connection, Stream, complete, together
from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve.words import count

PROMPTS = (
    "It was a cold evening in November when",
    "Prince Andrew looked up at the sky and",
    "ROMEO:\n",
    "Holmes rose from his chair and went to the window.",
)
NUM_TOKENS = 1000  # of each text, unless another number is asked for
_AT_ONCE_S, _WITHIN_S = 0.1, 1.0  # a text has gone on; a gap that begins later than this is not the kill's
_LOOK_EVERY_S = 0.005

Event = dict[str, Any]


@dataclass
class PlannedKill:
    """One planned death: when all texts have this many tokens, this process gets SIGKILL."""

    after_tokens: int
    who: str  # "expert worker 2"
    target: dict[str, Any]  # as /cluster/fault wants it
    at_s: float | None = None  # when it was asked for; None: it has not happened yet
    sent_s: float | None = None  # when we knew that the signal was sent
    pid: int = 0
    num_tokens: list[int] = field(default_factory=list)  # of each text then
    num_chars: list[int] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)  # the texts that were written then

    @property
    def has_happened(self) -> bool:
        return self.at_s is not None

    def gap_s(self) -> float | None:
        """The longest that any client waited for a token then, or within a second; None while a client may still wait.

        The second is for what comes with a death: a process starts, and needs the cores that texts are written with.
        """
        if self.at_s is None or self.sent_s is None or not all(map(self._went_on, self.streams)):
            return None
        return max(_largest_gap(stream.arrivals_s, self.at_s, self.sent_s + _WITHIN_S) for stream in self.streams)

    def is_settled(self) -> bool:
        """Whether the gap will not change any more."""
        if self.sent_s is None:
            return False
        until_s = self.sent_s + _WITHIN_S
        return all(stream.arrivals_s[-1] > until_s or stream.finish_reason is not None for stream in self.streams)

    def _went_on(self, stream: Stream) -> bool:
        assert self.sent_s is not None
        return stream.arrivals_s[-1] > self.sent_s + _AT_ONCE_S or stream.finish_reason is not None


def _largest_gap(arrivals_s: list[float], begin_s: float, end_s: float) -> float:
    """The largest gap of those that were not over at `begin_s` and had begun by `end_s`."""
    first = max(1, bisect_right(arrivals_s, begin_s))
    last = bisect_right(arrivals_s, end_s)
    return max((b - a for a, b in pairwise(arrivals_s[first - 1 : last + 1])), default=0.0)


class DemoRun:
    """The texts, as their clients see them, and the kills on the way."""

    def __init__(self, server: LocalServer, kills: list[PlannedKill], num_tokens: int = NUM_TOKENS) -> None:
        self.server = server
        self.kills = kills
        self.num_tokens = num_tokens
        self.streams = [Stream() for _ in PROMPTS]
        self.began_s = time.perf_counter()

    @property
    def errors(self) -> list[str]:
        return [stream.error for stream in self.streams if stream.error]

    async def play(self, look: Callable[[], None]) -> None:
        """Write all texts; kill on the way. `look` is called a few hundred times a second.

        Where this process waits for a core longer than the server does, texts may end before the last kill. It is done
        while they are written once more.
        """
        due = list(self.kills)
        while True:
            work = asyncio.create_task(together(self._write(i) for i in range(len(PROMPTS))))
            while not work.done():
                await asyncio.wait([work], timeout=_LOOK_EVERY_S)
                is_late = work.done()
                if due and not is_late and min(len(s.token_ids) for s in self.streams) >= due[0].after_tokens:
                    await self._kill(due.pop(0))
                look()
            await work
            if not due or self.errors:
                return
            self.streams = [Stream() for _ in PROMPTS]

    async def _write(self, index: int) -> None:
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": index}
        server = self.server
        await complete(server.url, server.model, PROMPTS[index], self.num_tokens, self.streams[index], **sampling)

    async def _kill(self, kill: PlannedKill) -> None:
        """Kills over a connection of the leanest kind: texts grow meanwhile."""
        kill.streams = self.streams
        kill.num_tokens = [len(stream.token_ids) for stream in self.streams]
        kill.num_chars = [len(stream.text) for stream in self.streams]
        kill.at_s = time.perf_counter()
        body = {**kill.target, "signal": "KILL"}
        connection = await Connection.open(self.server.url, "POST", "/cluster/fault", body)
        status, answer = await connection.read_head(), json.loads(await connection.read_body())
        connection.close()
        if status != 200:
            raise EverserveError(f"the signal to {kill.who} was not sent: {answer}")
        kill.pid, kill.sent_s = answer["pid"], time.perf_counter()


@dataclass(frozen=True)
class KillOutcome:
    """What became of one kill."""

    kill: PlannedKill
    noticed_ms: float
    gap_ms: float
    replaced_s: float
    num_lost: int  # of the tokens after it and before the next one
    num_different: int
    cost: str  # in words


def judge(run: DemoRun, again: DemoRun, events: list[Event]) -> list[KillOutcome]:
    """Each kill, from the typed events and from what clients saw, beside the undisturbed texts."""
    outcomes = []
    for kill, following in zip_longest(run.kills, run.kills[1:]):
        begin = kill.num_tokens
        is_last = following is None or following.streams is not kill.streams  # of these texts
        end = [run.num_tokens] * len(begin) if is_last else following.num_tokens
        pairs = [
            pair
            for ours, theirs, first, last in zip(kill.streams, again.streams, begin, end, strict=True)
            for pair in zip_longest(ours.token_ids[first:last], theirs.token_ids[first:last])
        ]
        signalled_s, noticed_s, replaced_s = _times(kill, events)
        gap_s = kill.gap_s() or 0.0
        went_on = "" if gap_s >= noticed_s - signalled_s else "; texts went on until it was noticed"
        outcomes.append(
            KillOutcome(
                kill=kill,
                noticed_ms=1e3 * (noticed_s - signalled_s),
                gap_ms=1e3 * gap_s,
                replaced_s=replaced_s - signalled_s,
                num_lost=sum(ours is None for ours, _ in pairs),
                num_different=sum(ours is not None and ours != theirs for ours, theirs in pairs),
                cost=_cost(kill, events) + went_on,
            )
        )
    return outcomes


def _times(kill: PlannedKill, events: list[Event]) -> tuple[float, float, float]:
    """When it got the signal, when that was noticed, when its successor was there."""
    assert kill.at_s is not None
    later = [event for event in events if event["at_s"] >= kill.at_s]
    if "process" in kill.target:
        noticed = next(e for e in later if e["event"] == "process_ended" and e["child"] == kill.target["process"])
        replaced = next(e for e in later if e["event"] == "orchestrator_recovered")
        return kill.at_s, noticed["at_s"], replaced["at_s"]
    signalled = next(e for e in events if e["event"] == "fault_injected" and e["victim_pid"] == kill.pid)
    rank = kill.target["rank"]
    noticed_s = min(at_s for event in later if (at_s := _noticed_s(event, rank)) is not None)
    replaced = next(e for e in later if e["event"] == "worker_became_ready" and e["rank"] == rank)
    return signalled["at_s"], max(noticed_s, signalled["at_s"]), replaced["at_s"]


def _noticed_s(event: Event, rank: int) -> float | None:
    """When this event's author noticed the loss of the worker: an attention worker, the gateway, or the orchestrator,
    which decides. The first of them is what streams depend on."""
    match event:
        case {"event": "suspected" | "fault_detected", "rank": about} | {"event": "rows_replayed", "suspect": about}:
            return float(event["at_s"]) if about == rank else None
        case {"event": "request_resumed", "from_rank": about}:
            return float(event["at_s"] - event["stalled_s"]) if about == rank else None
    return None


def _cost(kill: PlannedKill, events: list[Event]) -> str:
    """What had to be done twice, or not."""
    rank = kill.target.get("rank")
    if rank is None:
        return "streams do not need it while nothing changes"
    restored = [e for e in events if e["event"] == "stream_restored" and e["from_rank"] == rank]
    if restored:
        num_restored, num_again = (sum(e[name] for e in restored) for name in ("num_restored", "num_recomputed"))
        return (
            f"{count(len(restored), 'text')} moved: {num_restored} tokens' KV from its log, {num_again} computed again"
        )
    num_rows = sum(e["num_rows"] for e in events if e["event"] == "rows_replayed" and e["suspect"] == rank)
    return f"{count(num_rows, 'row')} sent again, to shadows" if num_rows else "nothing was under way there"
