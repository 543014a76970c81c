"""What does a client see when a worker is killed, next to restarting everything?

Streams run side by side on a cluster of the bundled model, or of a large shape on a GPU. After a warm stretch one
worker gets SIGKILL: an expert worker, an attention worker, turn by turn. The baseline, in the same run and under the
same load, is what servers without failover do: everything is killed, everything is started again, and clients ask again
from the prompt. It is a generous one: the restart begins as soon as the last process is dead, without any detection.

Every stream is compared, token by token, with the same request undisturbed: a benchmark that loses tokens has failed.
On a GPU it has also failed if a death took another worker along.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from everserve.bench import analysis, failover_report, incident, kill, plot, processes, report
from everserve.bench.incident import Round
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, Load, make_asks, send_all
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress

_GONE_TIMEOUT_S = 60.0  # the driver of a GPU takes its time to let a killed process die


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_attention: int
    num_expert: int
    num_streams: int
    max_tokens: int
    rounds: int
    baseline_rounds: int
    warm_s: float
    shape: str = BUNDLED
    num_layers: int | None = None
    num_prompt: int = 32
    spares: int | None = None  # None, here and below: as the server does by itself
    kv_log: str | None = None

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


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, and on a GPU no survivor was harmed."""
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(
                f"--tokens {settings.max_tokens}: the context of the {served.title} is {served.max_context}, prompt"
                " included"
            )
        asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
        rounds = _measure(settings, served, asks)
    result = {"model": served.title, "settings": asdict(settings), **failover_report.summarize(rounds)}
    result["rounds"] = [asdict(round_) for round_ in rounds]
    path = report.write("failover", result, out)
    failover_report.show(result, path, plot.write(result, path.with_suffix(".png")))
    return failover_report.is_passed(result)


def _measure(settings: Settings, served: Subject, asks: list[Ask]) -> list[Round]:
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    rounds: list[Round] = []
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(contextlib.closing(Instance(served.model, settings.flags(served))))
        progress = stack.enter_context(Progress())
        progress.begin("failover", total=1 + 2 * settings.rounds + settings.baseline_rounds)
        expected = kill.undisturbed(instance.server, asks)
        progress.advance()
        for measure in _schedule(settings, instance, asks, expected):
            rounds.append(measure)
            progress.advance()
    return rounds


def _schedule(settings: Settings, instance: Instance, asks: list[Ask], expected: list[list[int]]) -> Iterator[Round]:
    """Kinds of faults in turn, so that a slow minute of the machine does not hit one of them alone."""
    for i in range(max(settings.rounds, settings.baseline_rounds)):
        if i < settings.rounds:
            for fault, rank in kill.victims(i, settings.num_attention, settings.num_expert).items():
                yield kill.kill_worker(instance.server, fault, rank, asks, expected, settings.warm_s)
        if i < settings.baseline_rounds:
            yield _kill_everything(instance, asks, expected, settings.warm_s)


# -- the baseline --------------------------------------------------------------------------------


def _kill_everything(instance: Instance, asks: list[Ask], expected: list[list[int]], warm_s: float) -> Round:
    """SIGKILL to the supervisor, which ends all processes; a new server; the same requests from their prompts."""
    steal = report.Steal()
    killed_s, load = kill.run(_kill_under_load(instance.server, asks, warm_s))
    instance.restart()
    whole_s = kill.run(processes.wait_whole(instance.server, timeout_s=kill.WHOLE_TIMEOUT_S))
    replays = kill.run(send_all(instance.server, asks))
    stolen = steal.share()
    broken = [streams[-1] for streams in load.streams]
    arrivals = [stream.arrivals_s for streams in load.streams for stream in streams[:-1]]
    news = [analysis.with_replay(old.arrivals_s, new.arrivals_s) for old, new in zip(broken, replays, strict=True)]
    verdicts = [analysis.compare(stream.token_ids, tokens) for stream, tokens in zip(replays, expected, strict=True)]
    continued_s = [next(iter(new[len(old.arrivals_s) :]), whole_s) for old, new in zip(broken, news, strict=True)]
    return incident.judge(
        "restart",
        arrivals + news,
        killed_s=killed_s,
        rank=None,
        verdicts=verdicts,
        end_s=max(continued_s) + kill.CALM_S,
        whole_s=whole_s,
        stolen=stolen,
        warm_s=warm_s,
        told=None,
    )


async def _kill_under_load(server: LocalServer, asks: list[Ask], warm_s: float) -> tuple[float, Load]:
    """Returns when no process and no stream is left."""
    await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
    pids = processes.pids(processes.cluster(server))
    assert server.process is not None
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    killed_s = time.perf_counter()
    server.process.kill()
    server.process.wait()
    await processes.wait_gone(pids, _GONE_TIMEOUT_S)
    await load.finish()
    return killed_s, load
