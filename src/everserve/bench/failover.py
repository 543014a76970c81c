"""What does a client see when a worker is killed, next to restarting everything?

Streams run side by side on a cluster of the bundled model. After a warm stretch one worker gets SIGKILL: an expert
worker, an attention worker, turn by turn. The baseline, in the same run and under the same load, is what servers
without failover do: everything is killed, everything is started again, and clients ask again from the prompt. It is a
generous one: the restart begins the moment the last process is dead, with nobody having to notice.

Every stream is compared, token by token, with the same request undisturbed: a benchmark that loses tokens has failed.

The prefix cache is off. The same requests come in every round, and a worker that takes over a stream would find its
tokens in the cache from the round before, which no real takeover does.
"""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from everserve.bench import analysis, failover_report, incident, plot, processes, report
from everserve.bench.incident import Round, Victim
from everserve.bench.load import Ask, Load, make_asks, send_all
from everserve.errors import ConfigError, EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve.runtime.local_server import LocalServer

NUM_PROMPT = 32
AFTER_S = 3.0  # observed at least so long after a kill ...
CALM_S = 1.0  # ... and so long after full strength


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

    @property
    def flags(self) -> tuple[str, ...]:
        workers = ("--attention-workers", str(self.num_attention), "--expert-workers", str(self.num_expert))
        return (*workers, "--no-enable-prefix-caching")


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact."""
    config = report.read_json(DEMO_MODEL / "config.json")
    if NUM_PROMPT + settings.max_tokens > config["max_position_embeddings"]:
        raise ConfigError(f"--tokens {settings.max_tokens}: the bundled model's context is 4096, prompt included")
    asks = make_asks(settings.num_streams, NUM_PROMPT, settings.max_tokens, config["vocab_size"])
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    rounds: list[Round] = []
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(contextlib.closing(Instance(settings.flags)))
        progress = stack.enter_context(Progress())
        progress.begin("failover", total=1 + 2 * settings.rounds + settings.baseline_rounds)
        expected = _undisturbed(instance.server, asks)
        progress.advance()
        for measure in _schedule(settings, instance, asks, expected):
            rounds.append(measure)
            progress.advance()
    result = {"model": "bundled model", "settings": asdict(settings), **failover_report.summarize(rounds)}
    result["rounds"] = [asdict(round_) for round_ in rounds]
    path = report.write("failover", result, out)
    failover_report.show(result, path, plot.write(result, path.with_suffix(".png")))
    return bool(result["is_exact"])


def _schedule(settings: Settings, instance: "Instance", asks: list[Ask], expected: list[list[int]]) -> Iterator[Round]:
    """Kinds of faults in turn, so that a slow minute of the machine does not hit one of them alone."""
    for i in range(max(settings.rounds, settings.baseline_rounds)):
        if i < settings.rounds:
            expert_rank = settings.num_attention + i % settings.num_expert
            yield asyncio.run(_kill_worker(instance.server, "expert", expert_rank, asks, expected, settings.warm_s))
            attention_rank = i % settings.num_attention
            yield asyncio.run(
                _kill_worker(instance.server, "attention", attention_rank, asks, expected, settings.warm_s)
            )
        if i < settings.baseline_rounds:
            yield _kill_everything(instance, asks, expected, settings.warm_s)


def _undisturbed(server: LocalServer, asks: list[Ask]) -> list[list[int]]:
    """The right answers."""
    streams = asyncio.run(send_all(server, asks))
    broken = [stream.error for stream in streams if stream.error or len(stream.token_ids) != asks[0].max_tokens]
    if broken:
        raise EverserveError(f"streams are incomplete without any fault: {broken}")
    return [stream.token_ids for stream in streams]


# -- one kill ------------------------------------------------------------------------------------


async def _kill_worker(
    server: LocalServer, fault: str, rank: int, asks: list[Ask], expected: list[list[int]], warm_s: float
) -> Round:
    """SIGKILL to one worker under full load; everything after that is the server's own doing."""
    await processes.wait_whole(server)
    seat = processes.worker(processes.cluster(server), rank)
    steal = report.Steal()
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    victim = Victim(rank, seat["incarnation"], seat["pid"], killed_s=time.perf_counter())
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.sleep(incident.AT_ONCE_S)  # whoever asks how it goes takes time from those who make it go
    whole_s = await processes.wait_whole(server, rank, victim.incarnation)
    end_s = max(victim.killed_s + AFTER_S, whole_s + CALM_S)
    await asyncio.sleep(end_s - time.perf_counter())
    stolen = steal.share()
    await load.finish()
    return incident.judge(
        fault,
        load.arrivals_s,
        killed_s=victim.killed_s,
        rank=rank,
        verdicts=load.verdicts(expected),
        end_s=end_s,
        whole_s=whole_s,
        stolen=stolen,
        warm_s=warm_s,
        told=incident.tell(server.events(), victim),
    )


def _kill_everything(instance: "Instance", asks: list[Ask], expected: list[list[int]], warm_s: float) -> Round:
    """SIGKILL to the supervisor, which takes everybody along; a new server; the same requests from their prompts."""
    steal = report.Steal()
    killed_s, load = asyncio.run(_kill_under_load(instance.server, asks, warm_s))
    instance.restart()
    whole_s = asyncio.run(processes.wait_whole(instance.server))
    replays = asyncio.run(send_all(instance.server, asks))
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
        end_s=max(continued_s) + CALM_S,
        whole_s=whole_s,
        stolen=stolen,
        warm_s=warm_s,
        told=None,
    )


async def _kill_under_load(server: LocalServer, asks: list[Ask], warm_s: float) -> tuple[float, Load]:
    """Returns when no process and no stream is left."""
    await processes.wait_whole(server)
    pids = processes.pids(processes.cluster(server))
    assert server.process is not None
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    killed_s = time.perf_counter()
    server.process.kill()
    server.process.wait()
    await processes.wait_gone(pids)
    await load.finish()
    return killed_s, load


class Instance:
    """The server that is up now."""

    def __init__(self, flags: tuple[str, ...]) -> None:
        self._flags = flags
        self.server = self._start()

    def restart(self) -> None:
        self.close()
        self.server = self._start()

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def _start(self) -> LocalServer:
        return LocalServer("demo", *self._flags).__enter__()
