"""A server under load for a moment, and what that was like."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from everserve.client import complete_all, percentile
from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve_bench import analysis, processes, report
from everserve_bench.subject import Subject

_START_S = 180.0  # until all workers are there: a GPU's kernels may have to be compiled
_GONE_S = 60.0
_MAX_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One variant under load for a moment, in the stretch in which all streams decode."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    cpu_ms_per_token: float  # of all the server's processes, prompts included
    stolen: float


@contextlib.contextmanager
def running(served: Subject, flags: tuple[str, ...]) -> Iterator["Server"]:
    """A variant's server. Afterwards all that it had is free for the next one."""
    local = LocalServer(served.model, *flags)
    try:
        local.__enter__()
    except EverserveError as error:
        raise EverserveError(f"does not start: {_reason(error)}") from error
    try:
        server = Server(local)
        yield server
    finally:
        local.__exit__(None, None, None)
    asyncio.run(processes.wait_gone(server.pids, _GONE_S))


def _reason(error: EverserveError) -> str:
    """The line that says what is wrong: the last one of what was printed."""
    return str(error).splitlines()[-1]


class Server:
    """A running variant and its processes."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        asyncio.run(processes.wait_whole(server, timeout_s=_START_S))
        self.pids = processes.pids(processes.cluster(server))
        self.num_repeated = 0  # slices in which a process was replaced: nothing was to fail here

    def measure(self, prompts: list[list[int]], max_tokens: int) -> tuple[Slice, list[list[int]]]:
        """One slice, and the tokens that it brought; once more if a process was lost meanwhile, or if on a busy machine
        the first stream ended before the last one began."""
        for _ in range(_MAX_REPEATS):
            found = self._slice(prompts, max_tokens)
            asyncio.run(processes.wait_whole(self.server))
            pids = processes.pids(processes.cluster(self.server))
            if pids != self.pids:
                self.pids = pids
                self.num_repeated += 1
            elif found is not None:
                return found
        if found is None:
            raise EverserveError(f"streams of {max_tokens} tokens are too short to run side by side")
        raise EverserveError(f"processes die under load without any fault: {self.server.log_text()[-2000:]}")

    def _slice(self, prompts: list[list[int]], max_tokens: int) -> tuple[Slice, list[list[int]]] | None:
        """None if the streams never ran all together."""
        steal, cpu_s = report.Steal(), processes.cpu_s(self.pids)
        streams = complete_all(self.server.url, self.server.model, prompts, max_tokens)
        cpu_s = processes.cpu_s(self.pids) - cpu_s
        stolen = steal.share()
        broken = [stream.error for stream in streams if stream.error or len(stream.token_ids) != max_tokens]
        if broken:
            raise EverserveError(f"streams are incomplete: {broken}")
        try:
            steady = analysis.steady([stream.arrivals_s for stream in streams])
        except ValueError:
            return None
        found = Slice(
            tokens_per_s=steady.tokens_per_s,
            itl_p50_ms=1e3 * percentile(steady.gaps_s, 0.5),
            itl_p99_ms=1e3 * percentile(steady.gaps_s, 0.99),
            cpu_ms_per_token=1e3 * cpu_s / (len(prompts) * max_tokens),
            stolen=stolen,
        )
        return found, [stream.token_ids for stream in streams]
