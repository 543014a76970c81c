"""What do the protections cost when nothing fails, and what does splitting the model over processes cost?

Variants of the same server, all alive at once, only one of them loaded at a time, in slices of about a second, in
another order each round: a slow moment of the machine hits all variants alike. Each is compared with 2+2 (attention +
expert workers) of the same round. Prompts are new in each round, so that no prefix cache helps, and the same for all
variants, which must all answer the same tokens.

Beside wall-clock figures stands the core time per token of all the server's processes: it does not depend on what else
the machine does.
"""

import asyncio
import contextlib
import gc
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.bench import analysis, overhead_report, processes, report
from everserve.bench.engine import random_prompts
from everserve.bench.overhead_report import ALL_OFF, REFERENCE, Samples, Slice
from everserve.client import complete_all, percentile
from everserve.errors import ConfigError, EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.runtime.local_server import LocalServer

NUM_PROMPT = 32
IDLE_S = 2.0
_MAX_REPEATS = 5

_2_2 = ("--attention-workers", "2", "--expert-workers", "2")
_NO_DETECTION, _NO_SHADOWS, _FIXED_ROUTES = ("--detect-ms", "0"), ("--shadow-experts", "0"), ("--fixed-routes",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "one process, 1 thread": ("--threads", "1"),
    "1+1": ("--attention-workers", "1", "--expert-workers", "1"),
    REFERENCE: _2_2,
    "2+2, no detection": (*_2_2, *_NO_DETECTION),
    "2+2, no shadows": (*_2_2, *_NO_SHADOWS),
    "2+2, fixed routes": (*_2_2, *_FIXED_ROUTES),
    ALL_OFF: (*_2_2, *_NO_DETECTION, *_NO_SHADOWS, *_FIXED_ROUTES),
}
# Of RAM for the KV cache of each attention worker: by default each server would take a quarter.
_SMALL_CACHE = ("--kv-cache-memory-bytes", str(128 << 20))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    streams: tuple[int, ...]
    max_tokens: int
    rounds: int
    variants: tuple[str, ...]


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    _check(settings)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with contextlib.ExitStack() as stack:
        servers = {name: Server(stack.enter_context(_start(name))) for name in settings.variants}
        idle = _idle_share(servers)
        samples, num_different = _measure(servers, settings)
    result = {
        "model": "bundled model",
        "settings": asdict(settings) | {"prompt": NUM_PROMPT},
        "flags": {name: " ".join(VARIANTS[name]) for name in settings.variants},
        "idle_cores": idle,
        "num_different": num_different,
        "num_repeated": {name: server.num_repeated for name, server in servers.items()},
        **overhead_report.summarize(samples),
    }
    overhead_report.show(result, report.write("overhead", result, out))
    return num_different == 0


def _check(settings: Settings) -> None:
    unknown = [name for name in settings.variants if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(map(repr, VARIANTS))}")
    if REFERENCE not in settings.variants:
        raise ConfigError(f"--variant: {REFERENCE!r} must be among them, the others are compared with it")


@contextlib.contextmanager
def _start(name: str) -> Any:
    """A variant's server; one that does not start says which it is."""
    server = LocalServer("demo", *VARIANTS[name], *_SMALL_CACHE)
    try:
        server.__enter__()
    except EverserveError as error:
        flags = " ".join(VARIANTS[name]) or "no flags"
        raise ConfigError(f"variant {name!r} ({flags}) does not start: {_last_line(error)}") from error
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


def _last_line(error: EverserveError) -> str:
    """Of what the server printed: the line that says what is wrong, without the frame around it."""
    lines = [line.strip("│ ") for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if any(c.isalpha() for c in line)), str(error))


class Server:
    """A running variant and its processes."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.pids = processes.pids(processes.cluster(server))
        self.num_repeated = 0  # slices in which a process was replaced: nothing was to fail here

    def measure(self, prompts: list[list[int]], max_tokens: int) -> tuple[Slice, list[list[int]]]:
        """One slice, and the tokens that it brought; once more if a process was lost meanwhile."""
        for _ in range(_MAX_REPEATS):
            found = self._slice(prompts, max_tokens)
            asyncio.run(processes.wait_whole(self.server))
            pids = processes.pids(processes.cluster(self.server))
            if pids == self.pids:
                return found
            self.pids = pids
            self.num_repeated += 1
        raise EverserveError(f"processes die under load without any fault: {self.server.log_text()[-2000:]}")

    def _slice(self, prompts: list[list[int]], max_tokens: int) -> tuple[Slice, list[list[int]]]:
        steal, cpu_s = report.Steal(), processes.cpu_s(self.pids)
        streams = complete_all(self.server.url, self.server.model, prompts, max_tokens)
        cpu_s = processes.cpu_s(self.pids) - cpu_s
        stolen = steal.share()
        broken = [stream.error for stream in streams if stream.error or len(stream.token_ids) != max_tokens]
        if broken:
            raise EverserveError(f"streams are incomplete: {broken}")
        steady = analysis.steady([stream.arrivals_s for stream in streams])
        found = Slice(
            tokens_per_s=steady.tokens_per_s,
            itl_p50_ms=1e3 * percentile(steady.gaps_s, 0.5),
            itl_p99_ms=1e3 * percentile(steady.gaps_s, 0.99),
            cpu_ms_per_token=1e3 * cpu_s / (len(prompts) * max_tokens),
            stolen=stolen,
        )
        return found, [stream.token_ids for stream in streams]


def _measure(servers: dict[str, Server], settings: Settings) -> tuple[Samples, int]:
    """All rounds; and how many tokens differ from those of 2+2."""
    vocab_size = report.read_json(DEMO_MODEL / "config.json")["vocab_size"]
    samples: Samples = {(name, num): [] for num in settings.streams for name in servers}
    num_different = 0
    progress = report.Progress("overhead", total=(settings.rounds + 1) * len(samples))
    for round_ in range(settings.rounds + 1):  # round 0 warms everything up and is thrown away
        for num_streams in settings.streams:
            prompts = random_prompts(vocab_size, num_streams, NUM_PROMPT, seed=round_)
            answers: dict[str, list[list[int]]] = {}
            for name in random.Random(f"{round_}/{num_streams}").sample(list(servers), len(servers)):
                found, answers[name] = servers[name].measure(prompts, settings.max_tokens)
                if round_ > 0:
                    samples[name, num_streams].append(found)
                progress.advance()
            num_different += sum(_num_different(answer, answers[REFERENCE]) for answer in answers.values())
    return samples, num_different


def _num_different(answer: list[list[int]], reference: list[list[int]]) -> int:
    return sum(analysis.compare(ours, theirs).num_different for ours, theirs in zip(answer, reference, strict=True))


def _idle_share(servers: dict[str, Server]) -> dict[str, float]:
    """Cores that each server uses while nobody asks it anything: what it takes away from the one that is measured."""
    before = {name: processes.cpu_s(server.pids) for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: (processes.cpu_s(server.pids) - before[name]) / IDLE_S for name, server in servers.items()}
