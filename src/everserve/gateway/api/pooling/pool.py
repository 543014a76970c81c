"""The streams of one request that wants vectors: one for each prompt, a number of them at a time."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everserve.errors import EverserveError
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.access import Owner
from everserve.gateway.http.errors import from_exception
from everserve.gateway.http.exchange import JsonPieces, watch_disconnect
from everserve.gateway.http.memory import Hold
from everserve.gateway.http.responses import PromptTokensDetails, Usage
from everserve.gateway.streams.stream import Stream
from everserve.gateway.text.prompts import Prompt
from everserve.tables.outputs import Output
from everserve.tables.requests import Flow, RequestSpec, SamplingParams

MOST_AT_ONCE = 64  # streams of one request: others' should not wait behind thousands
_PARAMS = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)
_TOKEN_BYTES = 4
_TEXT_BYTES = 6  # for each byte of a vector, where it becomes JSON


class Pooled:
    """Listens to the stream of one prompt."""

    def __init__(self, pool: "Pool", index: int, spec: RequestSpec, arrived_s: float) -> None:
        self.index = index
        self.output: Output | None = None
        self.stream = Stream(spec, self)
        self._pool = pool
        self._arrived_s = arrived_s

    def on_output(self, output: Output, now_s: float) -> None:
        self.output = output
        self._measure(output, now_s)
        self._pool.on_ended(self)

    def on_failure(self, error: EverserveError) -> None:
        self.stream.metrics.num_finished["error"] += 1
        self._pool.on_failure(error)

    def _measure(self, output: Output, now_s: float) -> None:
        metrics, num_prompt = self.stream.metrics, len(self.stream.spec.prompt)
        metrics.num_finished["stop"] += 1
        metrics.queue_s.observe(self.stream.waited_s + output.queued_s)
        metrics.latency_s.observe(now_s - self._arrived_s)
        metrics.num_prompt_tokens += num_prompt
        metrics.num_cached_tokens += output.num_cached
        metrics.prompt_tokens.observe(num_prompt)
        metrics.computed_tokens.observe(num_prompt - output.num_cached)


class Pool:
    """From `open` to `close`; `ended` is done when every prompt has its vector."""

    def __init__(
        self, gateway: Gateway, prompts: Sequence[Prompt], id: str, may_see: str, flow: Flow, salt: bytes, held: Hold
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gateway = gateway
        self._prompts = prompts
        self._id, self._may_see = id, may_see
        self._flow, self._salt = flow, salt
        self._held = held
        self._arrived_s = 0.0
        self._outputs: dict[int, Output] = {}
        self._open: dict[int, Pooled] = {}
        self._next = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._prompts)

    def open(self, arrived_s: float) -> None:
        """Begin with as many prompts as may run at a time."""
        num_first = min(len(self._prompts), MOST_AT_ONCE)
        self._gateway.check_room(num_first, self._flow.key)
        self._held.set(self._held.num_body_bytes + _TOKEN_BYTES * self.num_tokens)
        self._arrived_s = arrived_s
        for _ in range(num_first):
            self._submit()

    def _submit(self) -> None:
        index, prompt = self._next, self._prompts[self._next]
        self._next += 1
        spec = RequestSpec(
            id=self._gateway.stream_id(f"{self._id}-{index}", self._may_see),
            prompt=prompt.ids,
            params=_PARAMS,
            flow=self._flow,
            cache_salt=self._salt,
        )
        pooled = self._open[index] = Pooled(self, index, spec, self._arrived_s)
        self._gateway.fleet.submit([pooled.stream])

    def on_ended(self, pooled: Pooled) -> None:
        """One of them is done; the next may run."""
        assert pooled.output is not None and pooled.output.pooled is not None, "that is what its params ask for"
        del self._open[pooled.index]
        if not self._outputs:
            self._hold(len(pooled.output.pooled))
        self._outputs[pooled.index] = pooled.output
        if self.ended.done():
            return
        if self._next < len(self._prompts):
            self._submit()
        elif not self._open:
            self.ended.set_result(None)

    def _hold(self, num_bytes: int) -> None:
        """Each vector has so many: all of them wait until the last one is there."""
        held = self._held
        try:
            held.set(held.num_bytes + len(self._prompts) * num_bytes * (1 + _TEXT_BYTES))
        except EverserveError as error:
            self.on_failure(error)

    def on_failure(self, error: EverserveError) -> None:
        if not self.ended.done():
            self.ended.set_exception(from_exception(error))

    def leave(self) -> None:
        """The client has left."""
        self.ended.cancel()

    def close(self) -> None:
        """The answer is complete, or its client has left."""
        for pooled in reversed(self._open.values()):
            pooled.stream.metrics.num_finished["abort"] += 1
            self._gateway.fleet.cancel(pooled.stream)
        self._open.clear()
        self._held.release()

    def outputs(self) -> list[Output]:
        """What came of each prompt, when all have ended."""
        return [self._outputs[index] for index in range(len(self._prompts))]

    def usage(self) -> Usage:
        num_cached = sum(output.num_cached for output in self._outputs.values())
        return Usage(
            prompt_tokens=self.num_tokens,
            completion_tokens=0,
            total_tokens=self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


class PooledResponse(Response):
    """Writes what `pieces` makes of a pool. Until then nothing is sent, and a new gateway begins it again."""

    def __init__(self, gateway: Gateway, pool: Pool, owner: Owner, pieces: Callable[[Pool], Iterator[bytes]]) -> None:
        super().__init__()
        self.owner = owner
        self._gateway = gateway
        self._pool = pool
        self._pieces = pieces

    @property
    def is_complete(self) -> bool:
        return self._pool.ended.done()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pool, state = self._pool, scope["state"]
        self._gateway.answers.add(self)
        try:
            pool.open(state["arrived_s"])
            connection = state.get("connection")
            if connection is not None and connection.ledger is not None:
                connection.ledger.begin_request(0)  # its preparation has killed no gateway
            with watch_disconnect(receive, pool.leave):
                await asyncio.wait([pool.ended])
            if not pool.ended.cancelled():
                pool.ended.result()
                await JsonPieces(await self._gateway.slices.run(self._pieces(pool)))(scope, receive, send)
        finally:
            self._gateway.answers.discard(self)
            pool.close()
