"""What fault tests share: streams whose right answer is known, faults that prove they landed, a cluster that heals."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from everserve.client import Stream
from everserve.procs.local_server import LocalServer
from everserve_bench.load import Ask, Load

_LOOK_EVERY_S = 0.02  # most conditions ask the server, which is busy with what is waited for


def wait_until(condition: Callable[[], object], timeout_s: float = 90.0, what: str = "it") -> None:
    """The time is for what hangs: a machine that is busy with other things may need much of it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(_LOOK_EVERY_S)


def num_backed_up(server: LocalServer) -> int:
    """How many workers have seen that the backup in host memory is complete."""
    return len(re.findall(r"copied [\d,]+ experts? to the backup in", server.log_text()))


def process_state(pid: int) -> str | None:
    """The state letter that ps shows; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int) -> bool:
    return process_state(pid) not in (None, "Z", "X")


def asks(num: int, num_prompt: int, max_tokens: int) -> list[Ask]:
    """Half greedy, half sampled with a seed; no two alike."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
    return [
        Ask(
            prompt=[(7 * i + 13 * j) % 4000 + 5 for j in range(num_prompt + i)],
            max_tokens=max_tokens,
            params=sampled | {"seed": 100 + i} if i % 2 else {},
        )
        for i in range(num)
    ]


# Tests share the cores with each other: there a healthy worker may well be silent for the 50 ms of the default.
PATIENT = ("--detect-ms", "500")
SMALL_STEPS = ("--max-num-batched-tokens", "64")  # a long prompt is many steps, each of which tells how far it is
DECODE = asks(6, num_prompt=12, max_tokens=96)
PREFILL = asks(4, num_prompt=1000, max_tokens=24)


def run_all(server: LocalServer, wanted: list[Ask]) -> list[list[int]]:
    """The streams as this server answers them when nobody disturbs it."""

    async def run() -> list[Stream]:
        return await asyncio.gather(*(ask.send(server, Stream()) for ask in wanted))

    streams = asyncio.run(run())
    assert all(stream.error is None for stream in streams), [stream.error for stream in streams]
    return [stream.token_ids for stream in streams]


_right_answers: dict[str, list[list[int]]] = {}


def right_answers(server: LocalServer, wanted: list[Ask]) -> list[list[int]]:
    """The same from the server that is never disturbed, asked once for all files of a process."""
    key = repr(wanted)
    if key not in _right_answers:
        _right_answers[key] = run_all(server, wanted)
    return _right_answers[key]


def run_with(server: LocalServer, wanted: list[Ask], when: Callable[[list[Stream]], bool], act: Callable[[], object]):
    """The same streams, with `act` called in their middle, as soon as `when` says so."""
    return run_streams(server, [ask.send for ask in wanted], when, act)


def run_streams(
    server: LocalServer,
    sends: Sequence[Callable[[LocalServer, Stream], Awaitable[Stream]]],
    when: Callable[[list[Stream]], bool],
    act: Callable[[], object],
) -> list[Stream]:
    """Any streams, with `act` called in their middle, as soon as `when` says so. Where this process waits for a core
    longer than the server, streams may end before that: then they begin again."""

    async def run() -> list[Stream]:
        while True:
            streams = [Stream() for _ in sends]
            work = asyncio.gather(*(send(server, stream) for send, stream in zip(sends, streams, strict=True)))
            while not work.done():
                if await asyncio.to_thread(when, streams) and not work.done():
                    await asyncio.to_thread(act)
                    return await work
            errors = [stream.error for stream in streams if stream.error]
            assert not errors, errors

    return asyncio.run(run())


def until_it_hits(attempt: Callable[[], object]) -> None:
    """Until it returns something true. `attempt` lets a fault loose on streams and compares them; whether the fault has
    hit any is known afterwards: their server may have ended them while their client waited for a core to read them."""
    while not attempt():
        pass


def in_decode(streams: list[Stream]) -> bool:
    time.sleep(0.001)
    return all(len(stream.token_ids) >= 5 for stream in streams)


def in_prefill(server: LocalServer, rank: int | None = None) -> Callable[[list[Stream]], bool]:
    """This attention worker (without a rank: at least one of them) has computed a part of a prompt, and has a stream
    without a token. The server must not cache prefixes, and should compute them in SMALL_STEPS."""

    def check(streams: list[Stream]) -> bool:
        busy = [one for one in cluster(server)["workers"] if "attention" in one["roles"] and one["running"]]
        num_without = sum(not stream.token_ids for stream in streams)
        if rank is None:
            return bool(busy and num_without)
        # More streams without a token than other workers can have.
        return any(num_without > len(streams) - one["requests"] for one in busy if one["rank"] == rank)

    return check


def assert_equal(streams: list[Stream], expected: list[list[int]]) -> None:
    """Token for token: nothing lost, nothing twice, nothing different."""
    assert [stream.error for stream in streams] == [None] * len(streams)
    for stream, tokens in zip(streams, expected, strict=True):
        assert stream.token_ids == tokens


def under_load(server: LocalServer, wanted: list[Ask], expected: list[list[int]], act: Callable[[], object]) -> None:
    """Streams run and begin again while `act` runs; all are as expected."""

    async def run() -> list[bool]:
        load = Load(server, wanted)
        await load.flow()
        await asyncio.to_thread(act)
        await load.finish()
        assert [stream.error for streams in load.streams for stream in streams if stream.error] == []
        return [verdict.is_exact for verdict in load.verdicts(expected)]

    exact = asyncio.run(run())
    assert len(exact) >= len(wanted) and all(exact)


# -- the cluster ---------------------------------------------------------------------------------


@contextlib.contextmanager
def unharmed(server: LocalServer) -> Iterator[LocalServer]:
    """It runs until its users have ended, and has printed no traceback by then."""
    with server as running:
        yield running
        assert running.process is not None and running.process.poll() is None, running.log_text()
        assert "Traceback" not in running.log_text(), running.log_text()


# One for all: making one takes longer than many a fault. What hangs is for pytest's limit to end.
_http = httpx.Client(timeout=None)


def get(server: LocalServer, path: str) -> httpx.Response:
    return _http.get(f"{server.url}{path}")


def cluster(server: LocalServer) -> dict[str, Any]:
    return get(server, "/cluster").json()


def worker(server: LocalServer, rank: int) -> dict[str, Any]:
    return next(w for w in cluster(server)["workers"] if w["rank"] == rank)


def post(server: LocalServer, path: str, body: object) -> httpx.Response:
    return _http.post(f"{server.url}{path}", json=body)


def memory_names(pids: Iterable[int], prefix: str) -> set[str]:
    """Our shared memory that these processes have open or mapped, and whose name begins so."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names.update(str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())
            names.update(line.split()[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line)
    found = {name.removeprefix("/memfd:everserve-").split()[0] for name in names if "memfd:everserve-" in name}
    return {name for name in found if name.startswith(prefix)}


def memory_file(server: LocalServer, name: str) -> Path:
    """Shared memory of the instance with this name, as the anchor has it open: to damage it. Of an incarnation, the
    newest: a log that is taken over in place keeps the number of the one that made it."""
    (pid,) = [entry["pid"] for entry in cluster(server)["processes"] if entry["name"] == "anchor"]
    links = ((fd, str(fd.readlink())) for fd in Path(f"/proc/{pid}/fd").iterdir())
    named = re.compile(rf"memfd:everserve-{re.escape(name)}(?:\.(\d+))? ")
    found = [(int(match[1] or 0), fd) for fd, link in links if (match := named.search(link))]
    return max(found)[1]


def is_whole(server: LocalServer) -> bool:
    now = cluster(server)
    return (
        not now["violations"] and not now["degraded"] and all(worker["state"] == "ready" for worker in now["workers"])
    )


def wait_whole(server: LocalServer) -> None:
    wait_until(lambda: is_whole(server), what="full strength")


def detected(server: LocalServer, rank: int, incarnation: int) -> list[dict[str, Any]]:
    return [
        event
        for event in server.events()
        if event["event"] == "fault_detected" and (event["rank"], event["incarnation"]) == (rank, incarnation)
    ]


def started(server: LocalServer, rank: int, after: int) -> dict[str, Any] | None:
    """The start of the first process in this seat after that incarnation, as soon as the supervisor has told it."""
    for event in server.events("supervisor"):
        if event["event"] == "worker_started" and event["rank"] == rank and event["incarnation"] > after:
            return event
    return None


def metric(server: LocalServer, name: str) -> float:
    """The sum over all labels."""
    lines = get(server, "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Fault:
    """A signal to one worker, and the proof that it landed."""

    def __init__(self, server: LocalServer, rank: int, signum: signal.Signals) -> None:
        self._server = server
        self._signum = signum
        victim = worker(server, rank)
        self.rank, self.pid, self.incarnation = rank, victim["pid"], victim["incarnation"]

    def __call__(self) -> None:
        os.kill(self.pid, self._signum)

    def wake(self) -> None:
        """SIGCONT when it has been declared gone: streams may have ended without it. On a slow machine it may have been
        killed by now, as fenced workers are after a while."""
        self._wait_detected()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _wait_detected(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        wait_until(lambda: found.extend(detected(self._server, self.rank, self.incarnation)) or found, what="detection")
        return found[0]

    def assert_landed(self) -> None:
        if self._signum == signal.SIGKILL:
            wait_until(lambda: not is_alive(self.pid), what="the death")
        found = self._wait_detected()
        assert found["cause"] == ("crash" if self._signum == signal.SIGKILL else "hang"), found
        wait_until(lambda: worker(self._server, self.rank)["incarnation"] > self.incarnation, what="a successor")
