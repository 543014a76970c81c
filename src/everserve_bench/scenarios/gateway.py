"""What does one token cost the gateway, and how much more do several gateways carry?

Clients only count events, in processes of their own. A gateway's core time is read from the kernel while streams run,
prompts included. Beside it stands what the kernel alone takes: as many bytes, sent to as many connections at the same
pace, by a loop that does nothing else.
"""

import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, ClassVar

from everserve.config.base import Flag
from everserve.errors import EverserveError
from everserve.gateway.http.slices import batches
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import options, processes, report
from everserve_bench.counted_streams import CountedStream, read_all
from everserve_bench.load import random_prompts
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.slices import running
from everserve_bench.subject import Subject
from everserve_bench.tables import Table, medians, text

_MAX_CLIENTS = 4  # processes; each reads some ten thousand events a second
_STIME = 12  # among the fields of /proc/PID/stat behind the name
_SEND_S = 1.0
_SPAWN = get_context("spawn")


class GatewayCost(Scenario, frozen=True, kw_only=True):
    """What a token costs the gateway, and how much several carry.

    Exit status 1 if a stream did not get all its tokens.
    """

    NAME: ClassVar[str] = "gateway"

    streams: Annotated[
        tuple[int, ...], options.on_device("Concurrent streams; repeatable.", (16, 64), (256, 1024), min=1)
    ]
    gateways: Annotated[
        tuple[int, ...], options.on_device("`--gateways` of the server; repeatable.", (1,), (1, 4), min=1)
    ]
    prompt: Annotated[int, options.PROMPT] = 8
    max_tokens: Annotated[int, options.FIXED_TOKENS] = 256
    rounds: Annotated[int, Flag("Rounds, each with another server for each number of gateways.", min=1)] = 3
    more_flags: Annotated[tuple[str, ...], options.SERVE] = ()

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.prompt + self.max_tokens, "--tokens")
        rounds: dict[tuple[int, int], list[Result]] = {
            (number, streams): [] for streams in self.streams for number in self.gateways
        }
        progress.begin("gateways", self.rounds * len(rounds))
        for round_ in range(self.rounds):
            for number in self.gateways:
                with running(served, (*served.flags, *self._flags(number))) as server:
                    for streams in self.streams:
                        prompts = random_prompts(served.vocab_size, streams, self.prompt, seed=round_)
                        rounds[number, streams].append(_measure(server.server, prompts, self.max_tokens))
                        progress.advance()
            yield {"rows": [_row(*of, found) for of, found in rounds.items() if found]}

    def _flags(self, number: int) -> tuple[str, ...]:
        most = max(self.streams)
        length = -(-(self.prompt + self.max_tokens) // 256) * 256
        room = ("--max-num-seqs", str(most), "--max-model-len", str(length), "--no-enable-prefix-caching")
        return (*room, "--gateways", str(number), *self.more_flags)

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings = result["settings"]
        yield Table(
            f"prompt {settings['prompt']}, output {settings['max_tokens']}; medians of {settings['rounds']} rounds",
            [
                ("gateways", text("gateways")),
                ("streams", text("streams")),
                ("tokens/s", medians("tokens_per_s", digits=0)),
                ("core us/token", medians("core_us", digits=1)),
                ("of them the kernel's", medians("kernel_us", digits=1)),
                ("sends alone, us", medians("send_us", digits=1)),
                ("bytes/token", medians("num_bytes", digits=0)),
            ],
            result["rows"],
        )
        yield f"tokens that did not come: {sum(row['num_missing'] for row in result['rows'])}"

    @staticmethod
    def is_passed(result: Result) -> bool:
        return not any(row["num_missing"] for row in result["rows"])


def _row(gateways: int, streams: int, found: list[Result]) -> Result:
    figures = [name for name in found[0] if name != "num_missing"]
    return {
        "gateways": gateways,
        "streams": streams,
        **{name: report.spread([one[name] for one in found]) for name in figures},
        "num_missing": sum(one["num_missing"] for one in found),
    }


def _measure(server: LocalServer, prompts: list[list[int]], max_tokens: int) -> Result:
    """All streams once."""
    pids = [one["pid"] for one in processes.cluster(server)["processes"] if one["name"].startswith("gateway")]
    num_clients = min(_MAX_CLIENTS, os.cpu_count() or 1)
    shares = list(batches(prompts, -(-len(prompts) // num_clients)))
    core_s, kernel_s = processes.cpu_s(pids), _kernel_s(pids)
    with ProcessPoolExecutor(len(shares), mp_context=_SPAWN) as clients:
        told = [clients.submit(read_all, server.url, server.model, share, max_tokens) for share in shares]
        streams = [stream for client in told for stream in client.result()]
    core_s, kernel_s = processes.cpu_s(pids) - core_s, _kernel_s(pids) - kernel_s
    num_tokens = sum(sum(stream.counts) for stream in streams)
    if not num_tokens:
        raise EverserveError("no token came")
    num_bytes, per_s = sum(stream.num_bytes for stream in streams) // num_tokens, num_tokens / _seconds(streams)
    return {
        "tokens_per_s": per_s,
        "core_us": 1e6 * core_s / num_tokens,
        "kernel_us": 1e6 * kernel_s / num_tokens,
        "send_us": _send_us(num_bytes, len(prompts), per_s),
        "num_bytes": num_bytes,
        "num_missing": len(prompts) * max_tokens - num_tokens,
    }


def _seconds(streams: list[CountedStream]) -> float:
    """From the first token of all to the last."""
    arrived = [stream.times_s for stream in streams if stream.times_s]
    return max(times[-1] for times in arrived) - min(times[0] for times in arrived)


def _kernel_s(pids: list[int]) -> float:
    """Time of these processes that is the kernel's, in its ticks."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(field[_STIME]) for field in fields) / os.sysconf("SC_CLK_TCK")


def _send_us(num_bytes: int, num_connections: int, per_s: float) -> float:
    """Core time of one send, where each connection is sent so much in its turn, so many times a second in all."""
    data = bytes(num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listen:
        reader = _SPAWN.Process(target=_read_everything, args=(listen.getsockname(), num_connections), daemon=True)
        reader.start()
        connections = [listen.accept()[0] for _ in range(num_connections)]
        num_sent, spent_s, until_s = 0, 0.0, time.monotonic() + _SEND_S
        while time.monotonic() < until_s:
            begin_s = time.thread_time()
            for connection in connections:
                connection.send(data)
            spent_s += time.thread_time() - begin_s
            num_sent += num_connections
            time.sleep(num_connections / per_s)
        for connection in connections:
            connection.close()
        reader.join()
    return 1e6 * spent_s / num_sent


def _read_everything(address: tuple[str, int], num_connections: int) -> None:
    """Until all connections have ended."""
    poll = select.epoll()
    connections = {}
    for _ in range(num_connections):
        connection = socket.create_connection(address)
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    while connections:
        for fd, _ in poll.poll():
            if not connections[fd].recv(1 << 16):
                poll.unregister(fd)
                del connections[fd]
