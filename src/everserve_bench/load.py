"""Streams that run side by side for as long as a measurement takes, and whose right answer is known."""

import asyncio
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from everserve.client import Stream, complete, together
from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve_bench.analysis import Verdict, compare, first_difference

_FLOW_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 180.0
_PROMPT_TOKENS_PER_S = 1000.0  # no server worth waiting for computes prompts more slowly


@dataclass(frozen=True)
class Ask:
    """One request: the same one gets the same tokens every time."""

    prompt: list[int]
    max_tokens: int
    params: dict[str, Any] = field(default_factory=dict)

    async def send(self, server: LocalServer, stream: Stream) -> Stream:
        """A server that goes away in the middle is the stream's error, not ours."""
        try:
            await complete(server.url, server.model, self.prompt, self.max_tokens, stream, **self.params)
        except OSError as error:
            stream.error = f"the connection broke: {error}"
        return stream


def make_asks(num: int, num_prompt: int, max_tokens: int, vocab_size: int) -> list[Ask]:
    """Half greedy, half sampled with a seed of their own; no two prompts alike."""
    generator = random.Random("failover")
    sampled = {"temperature": 0.9, "top_p": 0.95}
    return [
        Ask(
            prompt=[generator.randrange(1, vocab_size) for _ in range(num_prompt)],
            max_tokens=max_tokens,
            params=sampled | {"seed": 1000 + i} if i % 2 else {},
        )
        for i in range(num)
    ]


def random_prompts(vocab_size: int, num: int, length: int, seed: int) -> list[list[int]]:
    """New prompts, so that the prefix cache cannot help."""
    generator = random.Random(f"{seed}/{num}/{length}")
    return [[generator.randrange(1, vocab_size) for _ in range(length)] for _ in range(num)]


async def send_all(server: LocalServer, asks: list[Ask]) -> list[Stream]:
    """Each once, all at the same time."""
    return await asyncio.gather(*(ask.send(server, Stream()) for ask in asks))


def patience_s(asks: list[Ask]) -> float:
    """How much longer than for short prompts it is worth to wait."""
    return sum(len(ask.prompt) for ask in asks) / _PROMPT_TOKENS_PER_S


class Load:
    """Every request runs at once; one that ends begins again, until told to finish or until it breaks."""

    def __init__(self, server: LocalServer, asks: list[Ask]) -> None:
        self._server = server
        self._asks = asks
        self._patience_s = patience_s(asks)
        self._is_finishing = False
        self.streams: list[list[Stream]] = [[] for _ in asks]  # of each request, one after the other
        self._work = asyncio.create_task(together(self._repeat(i) for i in range(len(asks))))

    async def flow(self, num_tokens: int = 5) -> None:
        """Until every stream has so many tokens: all prompts are computed."""
        deadline = asyncio.get_running_loop().time() + _FLOW_TIMEOUT_S + self._patience_s
        while not all(streams and len(streams[0].token_ids) >= num_tokens for streams in self.streams):
            if self._work.done() or asyncio.get_running_loop().time() > deadline:
                errors = {stream.error for streams in self.streams for stream in streams if stream.error}
                raise EverserveError(f"the streams do not flow: {errors or 'no tokens'}")
            await asyncio.sleep(0.005)

    def begin_nothing_more(self) -> None:
        """What runs goes on to its end."""
        self._is_finishing = True

    async def finish(self) -> None:
        """Let what runs come to its end, or notice that its server is gone, and begin nothing more."""
        self.begin_nothing_more()
        try:
            await asyncio.wait_for(self._work, FINISH_TIMEOUT_S + self._patience_s)
        except TimeoutError:
            stuck = [len(streams[-1].token_ids) for streams in self.streams if streams[-1].finish_reason is None]
            raise EverserveError(f"{len(stuck)} streams never end; they have {stuck} tokens") from None

    @property
    def arrivals_s(self) -> list[list[float]]:
        return [stream.arrivals_s for streams in self.streams for stream in streams]

    def verdicts(self, expected: list[list[int]]) -> list[Verdict]:
        """Every stream beside the undisturbed one. Where one is wrong, that is said on stderr, with the time on the
        clock that events have (`at_s`)."""
        verdicts = []
        for index, (streams, tokens) in enumerate(zip(self.streams, expected, strict=True)):
            for stream in streams:
                verdicts.append(compare(stream.token_ids, tokens))
                if not verdicts[-1].is_exact:
                    print(f"request {index}: {_difference(stream, tokens)}", file=sys.stderr)
        return verdicts

    def outcome(self, expected: list[list[int]]) -> dict[str, Any]:
        """All verdicts together, for a result."""
        verdicts = self.verdicts(expected)
        return {
            "num_streams": len(verdicts),
            "num_tokens": sum(verdict.num_tokens for verdict in verdicts),
            "num_wrong": sum(not verdict.is_exact for verdict in verdicts),
            "errors": sorted({stream.error for streams in self.streams for stream in streams if stream.error}),
        }

    async def _repeat(self, index: int) -> None:
        while not self._is_finishing:
            stream = Stream()
            self.streams[index].append(stream)
            await self._asks[index].send(self._server, stream)
            if stream.error:
                return


def _difference(stream: Stream, expected: list[int]) -> str:
    """Where it begins."""
    first = first_difference(stream.token_ids, expected)
    if first is None:
        return f"{len(stream.token_ids)} of {len(expected)} tokens came ({stream.error or stream.finish_reason})"
    at_s = stream.arrivals_s[first] if first < len(stream.arrivals_s) else float("nan")
    return f"token {first} is {stream.token_ids[first]} instead of {expected[first]}, at {at_s:.4f}"
