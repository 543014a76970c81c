"""How much does a death cost at this token of a stream, for each way of recovery, and is that what a model predicts?

cost_model.py is the model. Its constants are measured first, on the same server: the time of a step, of prompts of two
lengths, of a start. Then workers are killed when all streams have a given number of tokens, and what clients see is
put beside the prediction. Which layer a step is in at that moment is left to chance: it is worth at most one step.

Every stream is compared with the same request undisturbed: a benchmark that loses tokens has failed.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from everserve.client import Stream
from everserve.config.base import Flag
from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import analysis, cost_model, incident, kill, options, processes, report
from everserve_bench.cost_model import LOG, RECOVERIES, REPREFILL, RESTART, Costs
from everserve_bench.instance import Instance, flags_for
from everserve_bench.load import make_asks, send_all
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.subject import Subject
from everserve_bench.tables import Table, text

_POLL_S = 0.0005
_FEWEST_AFTER = 64  # tokens that a stream has to go when its worker is killed: some streams are ahead of others
_COLUMNS = [
    ("recovery", text("recovery")),
    ("token", text("token")),
    ("predicted", text("predicted_ms", ".1f", " ms")),
    ("stall, median", text("median_ms", ".1f", " ms")),
    ("worst", text("worst_ms", ".1f", " ms")),
    ("tokens computed again", text("recomputed", ".0f")),
]


@dataclass(frozen=True)
class Kill:
    """One kill: the longest gap of the streams that it hit."""

    recovery: str
    token: int  # the fewest that a stream had at that moment
    stall_s: float
    recomputed: float  # tokens per stream that moved


class Cost(Scenario, frozen=True, kw_only=True):
    """What a death costs, by the token at which it strikes. Predicted from measured constants, and measured; for a
    restart of everything, computing KV again, and the KV log.

    Exit status 1 if a stream lost a token or got a different one.
    """

    NAME: ClassVar[str] = "cost"

    tokens: Annotated[
        tuple[int, ...], Flag("Kill when streams have so many tokens; repeatable.", name="token", min=1)
    ] = (16, 64, 256, 1024)
    num_prompt: Annotated[int, options.PROMPT] = 128
    num_streams: Annotated[int, options.STREAMS] = 8
    rounds: Annotated[int, Flag("Kills of each kind at each token.", min=1)] = 3
    kv_log: Annotated[str | None, options.KV_LOG] = None
    num_attention: int = 2
    num_expert: int = 2

    @property
    def points(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.tokens)))

    @property
    def max_tokens(self) -> int:
        return max(self.tokens) + max(_FEWEST_AFTER, max(self.tokens) // 4)

    def told(self) -> Result:
        return {**super().told(), "tokens": self.points}

    def flags(self, served: Subject, kv_log: str | None) -> tuple[str, ...]:
        return flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            kv_log=kv_log,
        )

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.num_prompt + self.max_tokens, f"--token {max(self.tokens)}")
        steal = report.Steal()
        bench = _Bench(self, served)
        for kills in bench.measure(progress):
            yield {
                "costs": asdict(bench.costs),
                "points": [asdict(one) for one in kills],
                "num_wrong": bench.num_wrong,
                "stolen": steal.share(),
            }

    @staticmethod
    def is_passed(result: Result) -> bool:
        return not result["num_wrong"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        costs, settings = Costs(**result["costs"]), result["settings"]
        title = f"A death at a token, {settings['num_streams']} streams, prompts of {settings['num_prompt']}"
        rows = [_row(result, recovery, token) for recovery in RECOVERIES for token in settings["tokens"]]
        yield Table(f"{title}: {result['model']}", _COLUMNS, [row for row in rows if row])
        yield (
            f"T_w {costs.start_s:.2f} s, t_dec {1e3 * costs.step_s:.2f} ms, T_det {1e3 * costs.detect_s:.1f} ms,"
            f" T_pre(n) = {1e3 * costs.prefill_s:.1f} ms + {1e6 * costs.prefill_token_s:.0f} us n,"
            f" T_copy(n) = {1e6 * costs.copy_token_s:.1f} us n"
        )
        verdict = "all exact" if not result["num_wrong"] else f"{result['num_wrong']} NOT EXACT"
        yield f"{len(result['points'])} kills, streams: {verdict}"


def _row(result: Result, recovery: str, token: int) -> Result:
    """Kills at this token or later, up to the next one; nothing if there were none."""
    settings = result["settings"]
    found = [p for p in result["points"] if p["recovery"] == recovery and p["token"] >= token]
    found = [p for p in found if not any(token < other <= p["token"] for other in settings["tokens"])]
    if not found:
        return {}
    at = round(statistics.median(p["token"] for p in found))
    stalls = [1e3 * p["stall_s"] for p in found]
    return {
        "recovery": recovery,
        "token": at,
        "predicted_ms": 1e3 * cost_model.stall_s(Costs(**result["costs"]), recovery, settings["num_prompt"], at),
        "median_ms": statistics.median(stalls),
        "worst_ms": max(stalls),
        "recomputed": statistics.median(p["recomputed"] for p in found),
    }


class _Bench:
    def __init__(self, settings: "Cost", served: Subject) -> None:
        self.settings = settings
        self._served = served
        self._asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
        self._expected: list[list[int]] = []
        self._detect_s: list[float] = []
        self.num_wrong = 0
        self.costs: Costs

    def measure(self, progress: Progress) -> Iterator[list[Kill]]:
        """All kills so far, after each."""
        kills: list[Kill] = []
        settings = self.settings
        progress.begin("cost", total=1 + len(RECOVERIES) * settings.rounds * len(settings.points))
        for recovery in (LOG, REPREFILL, RESTART):
            flags = settings.flags(self._served, settings.kv_log if recovery != REPREFILL else "off")
            began_s = time.perf_counter()
            with contextlib.closing(Instance(self._served.model, flags)) as instance:
                if recovery == LOG:
                    self._measure_costs(instance.server, time.perf_counter() - began_s)
                    progress.advance()
                for _ in range(settings.rounds):
                    for token in settings.points:
                        kills.append(self._kill(instance, recovery, token))
                        self._finish_costs(kills)
                        progress.advance()
                        yield kills

    def _measure_costs(self, server: LocalServer, start_s: float) -> None:
        """All constants that an undisturbed server shows."""
        kill.run(processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S))
        self._expected = kill.undisturbed(server, self._asks)
        streams = kill.run(send_all(server, self._asks))
        step_s = statistics.median(statistics.fmean(stream.gaps_s) for stream in streams)
        firsts = []
        for num_prompt in (self.settings.num_prompt, self.settings.num_prompt + max(self.settings.points)):
            asks = make_asks(self.settings.num_streams, num_prompt, 2, self._served.vocab_size)
            found = [max(one.first_token_s for one in kill.run(send_all(server, asks))) for _ in range(3)]
            firsts.append((float(num_prompt), statistics.median(found)))
        at_0, slope = cost_model.line(firsts)
        self.costs = Costs(
            start_s=start_s, step_s=step_s, detect_s=0.0, prefill_s=at_0, prefill_token_s=slope, copy_token_s=0.0
        )

    def _finish_costs(self, kills: list[Kill]) -> None:
        """Detection as events tell it; what remains of the first and last point of the log is copying."""
        detect_s = statistics.median(self._detect_s)
        found: dict[int, list[float]] = {}
        for one in kills:
            if one.recovery == LOG:
                found.setdefault(one.token, []).append(one.stall_s)
        first, last = min(found), max(found)
        slope = 0.0
        if last > first:
            slope = (statistics.median(found[last]) - statistics.median(found[first])) / (last - first)
        costs = asdict(self.costs) | {"detect_s": detect_s, "copy_token_s": max(0.0, slope)}
        self.costs = Costs(**costs)

    def _kill(self, instance: Instance, recovery: str, token: int) -> Kill:
        if recovery == RESTART:
            return self._restart(instance, token)
        return kill.run(self._kill_worker(instance.server, recovery, token))

    async def _kill_worker(self, server: LocalServer, recovery: str, token: int) -> Kill:
        await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
        seat = processes.worker(processes.cluster(server), 0)
        streams, work, reached = await self._reach(server, token)
        killed_s = time.perf_counter()
        os.kill(seat["pid"], signal.SIGKILL)
        await work
        self._judge(streams)
        await processes.wait_whole(server, {0: seat["incarnation"]}, timeout_s=kill.WHOLE_TIMEOUT_S)
        victim = incident.Victim(0, seat["incarnation"], seat["pid"], killed_s)
        told = incident.tell(server.events(), victim, num_prompt=self.settings.num_prompt)
        self._detect_s.append(told.detected_s)
        gaps = [analysis.largest_gap(stream.arrivals_s, killed_s, incident.WITHIN_S) for stream in streams]
        stall_s = max((gap for gap in gaps if gap is not None), default=0.0)
        return Kill(recovery, reached, stall_s, told.tokens_recomputed)

    async def _reach(self, server: LocalServer, token: int) -> tuple[list[Stream], "asyncio.Future[Any]", int]:
        """Streams in progress, each with so many tokens."""
        streams = [Stream() for _ in self._asks]
        sends = (ask.send(server, stream) for ask, stream in zip(self._asks, streams, strict=True))
        work = asyncio.gather(*sends)
        while (reached := min(len(stream.token_ids) for stream in streams)) < token:
            if work.done():
                raise EverserveError(f"the streams ended before token {token}: {streams[0].error}")
            await asyncio.sleep(_POLL_S)
        return streams, work, reached

    def _restart(self, instance: Instance, token: int) -> Kill:
        """Everything is killed and started again, and clients ask again from the prompt."""
        streams, reached = kill.run(self._kill_everything(instance.server, token))
        instance.restart()
        kill.run(processes.wait_whole(instance.server, timeout_s=kill.WHOLE_TIMEOUT_S))
        replays = kill.run(send_all(instance.server, self._asks))
        self._judge(replays)
        gaps = []
        for old, new in zip(streams, replays, strict=True):
            behind_s = analysis.with_replay(old.arrivals_s, new.arrivals_s)[len(old.arrivals_s) :]
            if behind_s:  # the stream had not ended
                gaps.append(behind_s[0] - old.arrivals_s[-1])
        return Kill(RESTART, reached, max(gaps, default=0.0), float(self.settings.num_prompt + reached))

    async def _kill_everything(self, server: LocalServer, token: int) -> tuple[list[Stream], int]:
        await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
        pids = processes.pids(processes.cluster(server))
        streams, work, reached = await self._reach(server, token)
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        await processes.wait_gone(pids, kill.WHOLE_TIMEOUT_S)
        await work
        return streams, reached

    def _judge(self, streams: list[Stream]) -> None:
        verdicts = zip(streams, self._expected, strict=True)
        self.num_wrong += sum(stream.token_ids != tokens for stream, tokens in verdicts)
