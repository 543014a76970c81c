"""What does a client see when a worker is killed, next to restarting everything?

Streams run side by side on a cluster of the bundled model, or of a large shape on a GPU. After a warm stretch one
worker gets SIGKILL: an expert worker, an attention worker, turn by turn. The baseline, in the same run and under the
same load, is what servers without failover do: everything is killed, everything is started again, and clients ask again
from the prompt. It is a generous one: the restart begins as soon as the last process is dead, without any detection.

Every stream is compared, token by token, with the same request undisturbed: a benchmark that loses tokens has failed.
On a GPU it has also failed if a death took another worker along.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, ClassVar

from everserve.config.base import Flag
from everserve.progress import Progress
from everserve_bench import kill, kill_rounds, options, plot, restart
from everserve_bench.incident import Round
from everserve_bench.instance import Instance, flags_for
from everserve_bench.kill_phases import PHASES
from everserve_bench.kill_rounds import TITLES
from everserve_bench.load import Ask, make_asks
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.subject import Subject
from everserve_bench.tables import Row, Table, medians, text, worst

_SEEN = [
    ("SIGKILL to", text("title")),
    ("gap ms", worst("gap_ms")),
    ("over p99 ms", worst("excess_ms")),
    ("at once ms", worst("gap_at_once_ms")),
    ("no kill ms", worst("normal_largest_ms")),
    ("p50 / p99 ms", medians("normal_p50_ms", "normal_p99_ms")),
    ("lost / different", text("wrong")),
    ("restart", text("longer")),
]
_DONE = [
    ("SIGKILL to", text("title")),
    ("peers noticed ms", worst("suspected_s", scale=1e3)),
    ("noticed ms", worst("detected_s", scale=1e3)),
    ("rows replayed", worst("rows_replayed", 0)),
    ("requests moved", worst("requests_resumed", 0)),
    ("tokens from the log", worst("tokens_restored", 0)),
    ("recomputed per request", worst("tokens_recomputed")),
    ("successor s", worst("ready_s", 2)),
    ("whole s", worst("whole_s", 2)),
    ("others lost", lambda row: str(row["others_lost"]) if "detected_s" in row else ""),
]
_PHASES = [("SIGKILL to", text("title")), *((phase, worst(phase)) for phase in PHASES)]
_LEGEND = (
    "gap: the largest of any stream that spans the kill or begins before full strength, or within 1 s; at once: within "
    "0.1 s; no kill: the same in the second before.\nwhole: every seat is taken and ready again.\nmilliseconds: of the "
    "stream that waited longest. notice: by the gateway, a peer or the orchestrator. give away: the gateway, to other "
    "workers. arrive: until that worker has ended its step and read them. copy: their KV. step: and the way to the "
    "client."
)


class Failover(Scenario, frozen=True, kw_only=True):
    """A worker is killed under running streams. Gaps, tokens lost, time to full strength; beside it, a full restart.

    Exit status 1 if a stream lost a token or got a different one, or if on a GPU a death took another worker along.
    """

    NAME: ClassVar[str] = "failover"
    HAS_PLOT: ClassVar[bool] = True
    plot = staticmethod(plot.write)
    is_passed = staticmethod(kill_rounds.is_passed)

    num_attention: Annotated[int, options.ATTENTION_WORKERS] = 2
    num_expert: Annotated[int, options.ANY_EXPERT_WORKERS] = 2
    num_streams: Annotated[int, options.STREAMS] = 8
    num_prompt: Annotated[int, options.PROMPT] = 32
    max_tokens: Annotated[int, options.TOKENS] = 1500
    spares: Annotated[int | None, options.SPARES] = None
    kv_log: Annotated[str | None, options.KV_LOG] = None
    rounds: Annotated[int, Flag("Kills of each kind, in turn.", min=1)] = 10
    baseline_rounds: Annotated[int, options.BASELINE_ROUNDS] = 2
    warm_s: Annotated[float, options.WARM_S] = 3.0

    def flags(self, served: Subject) -> tuple[str, ...]:
        return flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.num_prompt + self.max_tokens, f"--tokens {self.max_tokens}")
        asks = make_asks(self.num_streams, self.num_prompt, self.max_tokens, served.vocab_size)
        with contextlib.closing(Instance(served.model, self.flags(served))) as instance:
            progress.begin(self.NAME, total=1 + 2 * self.rounds + self.baseline_rounds)
            expected = kill.undisturbed(instance.server, asks)
            progress.advance()
            rounds: list[Round] = []
            for round_ in self._faults(instance, asks, expected):
                progress.advance()
                rounds.append(round_)
                yield {**kill_rounds.summarize(rounds), "rounds": [asdict(one) for one in rounds]}

    def _faults(self, instance: Instance, asks: list[Ask], expected: list[list[int]]) -> Iterator[Round]:
        """Kinds of faults in turn, so that a slow minute of the machine does not hit one of them alone."""
        for i in range(max(self.rounds, self.baseline_rounds)):
            if i < self.rounds:
                for fault, rank in kill.victims(i, self.num_attention, self.num_expert).items():
                    yield kill.kill_worker(instance.server, fault, rank, asks, expected, self.warm_s)
            if i < self.baseline_rounds:
                yield restart.kill_everything(instance, asks, expected, self.warm_s)

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings, faults = result["settings"], result["faults"]
        rows = [_row(fault, found) for fault, found in faults.items()]
        told = [{"title": row["title"], **row["phases_ms"]} for row in rows if row.get("phases_ms")]
        times = f"{settings['rounds']} rounds, baseline {settings['baseline_rounds']}"
        yield Table(f"{plot.heading(result)}; {times}: median (worst)", _SEEN, rows)
        yield Table("What the server did: median (worst)", _DONE, rows)
        yield Table("Milliseconds from the kill to the next token: median (worst)", _PHASES, told)
        yield _LEGEND
        yield kill_rounds.survivors(result)
        lost, different = (sum(found[key] for found in faults.values()) for key in ("num_lost", "num_different"))
        yield kill_rounds.exactness(result, f"{lost} lost, {different} different: ")


def _row(fault: str, found: Row) -> Row:
    longer = found.get("restart_is_longer") if fault != "restart" else None
    return {
        **found,
        "title": TITLES[fault],
        "wrong": f"{found['num_lost']} / {found['num_different']}",
        "longer": f"{longer:.0f}x longer" if longer is not None else None,
    }
