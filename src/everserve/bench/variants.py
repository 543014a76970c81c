"""Variants of one server, side by side: what does a flag cost?

All are alive at once and only one of them is loaded at a time, in slices of about a second, in another order each
round: a slow moment of the machine hits all variants alike. Prompts are new in each round, so that no prefix cache
helps, and the same for all variants, which must all answer the same tokens.

Beside wall-clock figures stands the core time per token of all the server's processes: it does not depend on what else
the machine does.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everserve.bench import analysis, processes, report
from everserve.bench.engine import random_prompts
from everserve.client import complete_all, percentile
from everserve.errors import ConfigError, EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve.runtime.local_server import LocalServer

NUM_PROMPT = 32
IDLE_S = 2.0
_MAX_REPEATS = 5
# Of RAM for the KV cache of each attention worker: by default each server would take a quarter.
_SMALL_CACHE = ("--kv-cache-memory-bytes", str(128 << 20))


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One variant under load for a moment, in the stretch in which all streams decode."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    cpu_ms_per_token: float  # of all the server's processes, prompts included
    stolen: float


Samples = dict[tuple[str, int], list[Slice]]  # by variant and number of streams, a slice per round


@dataclass(frozen=True)
class Found:
    """What all rounds brought."""

    samples: Samples
    num_different: int  # tokens that differ from the reference's
    idle_cores: dict[str, float]  # that each server uses while nobody asks it anything
    num_repeated: dict[str, int]  # slices in which a process was replaced: nothing was to fail here


def compare(
    what: str,
    flags: Mapping[str, tuple[str, ...]],
    reference: str,
    *,
    streams: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    num_prompt: int = NUM_PROMPT,
) -> Found:
    """Start a server for each variant, and measure them all. `what` is for the progress line."""
    with contextlib.ExitStack() as stack:
        servers = {name: Server(stack.enter_context(_start(name, found))) for name, found in flags.items()}
        idle = _idle_share(servers)
        samples, num_different = _measure(what, servers, reference, streams, max_tokens, rounds, num_prompt)
    return Found(samples, num_different, idle, {name: server.num_repeated for name, server in servers.items()})


@contextlib.contextmanager
def _start(name: str, flags: tuple[str, ...]) -> Iterator[LocalServer]:
    """A variant's server; one that does not start says which it is."""
    server = LocalServer("demo", *flags, *_SMALL_CACHE)
    try:
        server.__enter__()
    except EverserveError as error:
        given = " ".join(flags) or "no flags"
        raise ConfigError(f"variant {name!r} ({given}) does not start: {_last_line(error)}") from error
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


def _measure(
    what: str,
    servers: dict[str, Server],
    reference: str,
    streams: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    num_prompt: int,
) -> tuple[Samples, int]:
    """All rounds; and how many tokens differ from those of the reference."""
    vocab_size = report.read_json(DEMO_MODEL / "config.json")["vocab_size"]
    samples: Samples = {(name, num): [] for num in streams for name in servers}
    num_different = 0
    with Progress().begin(what, total=(rounds + 1) * len(samples)) as progress:
        for round_ in range(rounds + 1):  # round 0 warms everything up and is thrown away
            for num_streams in streams:
                prompts = random_prompts(vocab_size, num_streams, num_prompt, seed=round_)
                answers: dict[str, list[list[int]]] = {}
                for name in random.Random(f"{round_}/{num_streams}").sample(list(servers), len(servers)):
                    found, answers[name] = servers[name].measure(prompts, max_tokens)
                    if round_ > 0:
                        samples[name, num_streams].append(found)
                    progress.advance()
                num_different += sum(_num_different(answer, answers[reference]) for answer in answers.values())
    return samples, num_different


def _num_different(answer: list[list[int]], reference: list[list[int]]) -> int:
    return sum(analysis.compare(ours, theirs).num_different for ours, theirs in zip(answer, reference, strict=True))


def _idle_share(servers: dict[str, Server]) -> dict[str, float]:
    """Cores that each server uses while nobody asks it anything: what it takes away from the one that is measured."""
    before = {name: processes.cpu_s(server.pids) for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: (processes.cpu_s(server.pids) - before[name]) / IDLE_S for name, server in servers.items()}
