"""The gateway is killed before and after each system call on the way of a request and its answer: it accepts, receives,
gives streams to workers, hears their tokens, commits and sends.

One client asks for three answers on one connection, in pieces, the third while the first is written, and says its last
word. In a first run the gateway's calls are counted; then it is killed at one of them, in each run at another one.
Between two calls a gateway only writes into its own memory and the ledger (tests/property/test_ledger_torn.py). That
bytes which are only believed to be sent are found is shown in tests/unit/gateway/test_transport.py.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from everserve.procs.local_server import LocalServer
from tests.support.cluster import is_alive, wait_until
from tests.support.deaths import CHAT, PROMPTS, Deaths
from tests.support.raw_client import RawClient, post
from tests.support.stepping import CannotTrace, Stepped, Stop

OPTIONS = {"model": "demo", "temperature": 1.0, "ignore_eos": True}
STREAM = {**OPTIONS, "prompt": PROMPTS[0], "seed": 1, "stream": True}
ASKED = (
    post("/v1/completions", {**STREAM, "max_tokens": 16}),
    post("/v1/completions", {**OPTIONS, "prompt": PROMPTS[1], "max_tokens": 4, "seed": 2}, chunked=True),
    post("/v1/chat/completions", {**OPTIONS, "messages": CHAT, "max_tokens": 16, "seed": 3, "stream": True}),
)
_MOST_TRIES = 5
PATH = (("accept", "listen"), ("recvfrom", "client"), ("sendto", "client"))

Site = tuple[str, str, bool]  # a call, of which descriptor, before or after it
Kill = Callable[[Stepped], None]


class Client(threading.Thread):
    """Asks, and compares every byte. `port`: its own, when it is connected."""

    def __init__(self, address: tuple[str, int], asked: tuple[bytes, ...], known: list[Any] | None) -> None:
        super().__init__()
        self._asked = asked
        self.port = 0
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        self._address = address
        self._known = known

    def run(self) -> None:
        try:
            asyncio.run(self._ask())
        except BaseException as error:
            self.error = error

    async def _ask(self) -> None:
        client = await RawClient.connect(self._address, random.Random(1))
        self.port = client.port
        await client.send([*self._asked[:2]], num_cuts=1)
        self.answers.append((await client.receive()).normal())
        await client.send([self._asked[2]])
        self.answers += [(await client.receive()).normal() for _ in self._asked[1:]]
        await client.close()
        assert self._known in (None, self.answers), f"{self.answers} instead of {self._known}"


class Walk:
    """A server, and what its gateway does for one client, call by call."""

    def __init__(self, server: LocalServer, asked: tuple[bytes, ...] = ASKED) -> None:
        self.deaths = Deaths(server)
        self._asked = asked
        self.known: list[Any] | None = None
        self._pid = 0  # of the gateway

    def go(self, is_over: Callable[[list[Site]], bool] = lambda sites: False, kill: Kill = Stepped.kill) -> list[Site]:
        """All calls, or those up to the one at which the gateway is killed. The answers are compared."""
        wait_until(lambda: self.deaths.gateway() is not None, timeout_s=60)
        client = Client(self.deaths.address, self._asked, self.known)
        stepped = self._seize()
        sites: list[Site] = []
        kinds: dict[int, str] = {}
        client.start()
        for stop in stepped.stops():
            if not client.is_alive():
                stepped.let_go()
                break
            if not sites and stop.call != "accept":
                continue
            sites.append((stop.call, self._kind(stop, client.port, kinds), stop.is_before))
            if is_over(sites):
                kill(stepped)
                break
        client.join()
        if client.error is not None:
            raise AssertionError(f"killed at {len(sites)}: {sites[-1:]}: {client.error}") from client.error
        self.known = self.known or client.answers
        return sites

    def _seize(self) -> Stepped:
        """The gateway. One that was killed is still there for a moment, and cannot be had any more."""
        for _ in range(_MOST_TRIES):
            self._pid = self.deaths.gateway() or 0
            try:
                return Stepped(self._pid)
            except OSError:
                if not is_alive(self._pid):
                    wait_until(lambda: self.deaths.gateway() not in (None, self._pid), timeout_s=60)
                else:
                    raise
        raise AssertionError("each gateway was dead")

    def _kind(self, stop: Stop, port: int, kinds: dict[int, str]) -> str:
        """What its descriptor is: the socket that listens, the client's, or something else."""
        fd = stop.fd
        if stop.call == "accept":
            return "listen"
        if stop.call in ("epoll_wait", "mmap", "munmap", "mprotect", "futex") or fd > 1 << 16:
            return ""
        if kinds.get(fd) != "client":
            kinds[fd] = "client" if self._is_of(fd, port) else ""
        return kinds[fd]

    def _is_of(self, fd: int, port: int) -> bool:
        with suppress(OSError):
            inode = name_at(Path(f"/proc/{self._pid}/fd/{fd}")).removeprefix("socket:[").removesuffix("]")
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] == inode:
                    return int(fields[2].partition(":")[2], 16) == port
        return False


@pytest.fixture(scope="module")
def walk() -> Iterator[Walk]:
    with LocalServer("demo", "--attention-workers", "1", "--expert-workers", "0", "--detect-ms", "5000") as server:
        walk = Walk(server)
        try:
            walk.go()
        except CannotTrace as error:
            pytest.skip(str(error))
        yield walk


def test_at_each_kind_of_call(walk: Walk) -> None:
    """All of the client's connection, and some of the others."""
    rng = random.Random(4)
    sites = walk.go()
    first = dict.fromkeys(sites)
    assert {(call, kind, is_before) for call, kind in PATH for is_before in (True, False)} <= first.keys(), first
    of_client = [site for site in first if site[1]]
    others = [site for site in first if not site[1]]
    for site in of_client + rng.sample(others, min(len(others), 15)):
        walk.go(at_number(site, rng.randint(1, sites.count(site))))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_at_each_call(walk: Walk) -> None:
    at, reached = 0, set[Site]()
    while len(sites := walk.go(lambda sites, at=at: len(sites) > at)) > at:  # type: ignore[misc]
        reached.add(sites[-1])
        at += 1
    assert at > 50 and {(call, kind, True) for call, kind in PATH} <= reached


def name_at(fd: Path) -> str:
    with suppress(OSError):
        return str(fd.readlink())
    return ""


def at_number(site: Site, number: int) -> Callable[[list[Site]], bool]:
    """The process stands there for this time."""
    return lambda sites: sites[-1] == site and sites.count(site) == number
