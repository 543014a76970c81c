"""A fleet without HTTP: workers at the other ends of real sockets that advance when the test says so."""

import asyncio
import struct
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

from everserve.errors import EverserveError
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.others import Others
from everserve.gateway.streams.stream import Stream
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.outputs import EngineStats, Output
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import Flow, RequestSpec, SamplingParams, as_tokens
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.events import AnyEvent
from everserve.wire.messages import Cancel, GivenBack, PrefillsPending, Rejected, StepOutput, Submit, WorkerReady

CAPACITY = 4 + 4  # of a worker with 4 seats
LIE = 1_000_000  # added to tokens that nobody may ever see


def next_token(spec: RequestSpec, tokens: list[int]) -> int:
    """The model: a hash of everything before, and of the seed."""
    context = [spec.params.seed, *spec.prompt, *tokens]
    return zlib.crc32(struct.pack(f"<{len(context)}q", *context)) % 50_000


def whole_stream(spec: RequestSpec) -> list[int]:
    """What a client must receive."""
    tokens: list[int] = []
    while len(tokens) < spec.params.max_tokens:
        tokens.append(next_token(spec, tokens))
    return tokens


class Recorder:
    """A listener that writes everything down."""

    def __init__(self) -> None:
        self.tokens: list[int | None] = []
        self.finish_reason: str | None = None
        self.errors: list[EverserveError] = []
        self.raises: Exception | None = None

    def on_output(self, output: Output, now_s: float) -> None:
        if self.raises is not None:
            raise self.raises
        assert self.finish_reason is None and not self.errors, "nothing comes after the end"
        assert output.index == len(self.tokens)
        self.tokens.append(output.token)
        self.finish_reason = output.finish_reason

    def on_failure(self, error: EverserveError) -> None:
        self.errors.append(error)


class ToyWorker:
    """Runs the streams that it is given, a token at a time; a liar sends tokens that nobody may ever see."""

    def __init__(self, rank: int, incarnation: int, channel: Channel) -> None:
        self.rank = Rank(rank)
        self.incarnation = Incarnation(incarnation)
        self.specs: dict[str, RequestSpec] = {}  # all that it was ever given, in order
        self.sources: dict[str, WorkerId | None] = {}  # with each of them
        self.following: list[int] = []  # how many were announced behind each of them
        self.tokens: dict[str, list[int]] = {}  # of those that run
        self.prefills: list[dict[Rank, tuple[PendingPrompt, ...]]] = []  # what it was told of other homes
        self._publishes = False
        self.is_liar = False
        self.is_leaving = False
        self._channel = channel
        self._stats: dict[str, Any] = {}

    @property
    def log(self) -> WorkerId:
        return self.rank, self.incarnation

    def say_ready(self, max_num_seqs: int = 4, max_model_len: int = 64, num_blocks: int = 100, **more: Any) -> None:
        self._publishes = more.get("shares_workers", False)
        self._channel.send(
            WorkerReady(
                rank=self.rank,
                incarnation=self.incarnation,
                max_model_len=max_model_len,
                vocab_size=50_000,
                num_blocks=num_blocks,
                block_size=16,
                max_num_seqs=max_num_seqs,
                **more,
            )
        )

    def receive(self) -> None:
        """Everything that has arrived."""
        try:
            messages = self._channel.receive_all()
        except ChannelClosed:
            return
        for message in messages:
            if isinstance(message, Submit):
                self.specs[message.spec.id] = message.spec
                self.sources[message.spec.id] = message.source
                self.following.append(message.num_following)
                if self.is_leaving:
                    self._channel.send(GivenBack(ids=[message.spec.id]))
                else:
                    self.tokens[message.spec.id] = list(message.spec.known)
            elif isinstance(message, Cancel):
                self.tokens.pop(message.id, None)
            elif isinstance(message, PrefillsPending):
                self.prefills.append(message.homes)

    def step(self, *ids: str) -> None:
        """One more token of each of these streams (of all, if none is named), in one message."""
        self.receive()
        outputs = [self._advance(id) for id in ids or list(self.tokens) if id in self.tokens]
        self.send(outputs, **(self._pending() if self._publishes else {}))

    def send(self, outputs: list[Output], **stats: Any) -> None:
        self._stats |= stats
        self._channel.send(StepOutput(outputs=outputs, stats=engine_stats(**self._stats)))

    def _pending(self) -> dict[str, Any]:
        """What a home publishes: prompts without an answer."""
        waiting = [self.specs[id] for id, tokens in self.tokens.items() if tokens == self.specs[id].known]
        prompts = tuple(PendingPrompt(0, len(spec.prompt) + len(spec.known)) for spec in waiting)
        cost = sum(prompt.num_tokens * (prompt.num_tokens + 3) // 2 for prompt in prompts)
        return {"num_received": len(self.following), "prompts": prompts, "pending_prefill_cost": cost}

    def reject(self, id: str, is_server_fault: bool = False) -> None:
        self.receive()
        del self.tokens[id]
        self._channel.send(Rejected(id=id, reason="no", is_server_fault=is_server_fault))

    def give_back(self) -> None:
        """It leaves; what it has not received yet it gives back when it comes."""
        self.is_leaving = True
        self._channel.send(GivenBack(ids=list(self.tokens)))
        self.tokens.clear()

    def send_raw(self, data: bytes) -> None:
        self._channel.sock.send(data)

    def die(self) -> None:
        """As a killed process: the kernel closes its end; what it sent before can still be read."""
        self._channel.close()

    def _advance(self, id: str) -> Output:
        spec, tokens = self.specs[id], self.tokens[id]
        index = len(tokens)
        tokens.append(next_token(spec, tokens) + LIE * self.is_liar)
        finish = "length" if len(tokens) >= spec.params.max_tokens else None
        if finish:
            del self.tokens[id]
        return Output(id=id, index=index, token=tokens[-1], finish_reason=finish)


class ToyFleet:
    """A fleet, its workers, its clients, and a clock that stands still until it is moved."""

    def __init__(self, max_queue: int = 100, others: Others | None = None) -> None:
        self.now_s = 1000.0
        self.events: list[AnyEvent] = []
        self.fleet = Fleet(max_queue, tell=self.events.append, clock=lambda: self.now_s, others=others)
        self.fleet.has_orchestrator = True
        self.settled: list[WorkerId] = []  # what the orchestrator was told
        self.fleet.logs.report_to(self.settled.append)
        self.workers: list[ToyWorker] = []
        self.streams: list[Stream] = []

    def attach(self, rank: int, incarnation: int = 1) -> ToyWorker:
        """A process that has not said anything yet."""
        ours, theirs = Channel.pair()
        self.fleet.attach(Rank(rank), Incarnation(incarnation), ours)
        worker = ToyWorker(rank, incarnation, Channel(theirs))
        self.workers.append(worker)
        return worker

    async def pair(self, **params: Any) -> tuple[ToyWorker, ToyWorker]:
        """Two workers, of which the first has a stream."""
        workers = await self.join(0), await self.join(1)
        self.submit(**params)
        await self.settle()
        return workers

    async def join(self, rank: int, incarnation: int = 1, **ready: int) -> ToyWorker:
        """A process that is ready."""
        worker = self.attach(rank, incarnation)
        worker.say_ready(**ready)
        await self.settle()
        return worker

    def lose(self, worker: ToyWorker, cause: str = "hang") -> None:
        """What the orchestrator says."""
        self.fleet.lose(worker.rank, worker.incarnation, (Role.ATTENTION,), cause)

    def submit(
        self, *, prompt: list[int] | None = None, max_tokens: int = 4, n: int = 1, key: str = "", weight: float = 1.0
    ) -> list[Recorder]:
        """n choices of one prompt: a request."""
        first = len(self.streams)
        flow = Flow(key, first, weight)
        streams = [
            Stream(
                RequestSpec(
                    id=f"s{first + i}",
                    prompt=as_tokens(prompt or [1, 2, 3]),
                    params=SamplingParams(max_tokens=max_tokens, seed=first + i),
                    flow=flow,
                ),
                Recorder(),
            )
            for i in range(n)
        ]
        self.streams += streams
        self.fleet.submit(streams)
        return [stream.listener for stream in streams]  # type: ignore[misc]

    def cancel(self, index: int) -> None:
        self.fleet.cancel(self.streams[index])

    def kinds(self) -> list[str]:
        """The names of what happened."""
        return [str(event.__struct_config__.tag) for event in self.events]

    async def run(self, *workers: ToyWorker, num_steps: int = 4) -> None:
        """All of their streams, one step after the other."""
        for _ in range(num_steps):
            for worker in workers:
                worker.step()
            await self.settle()

    async def settle(self) -> None:
        """Everything that was sent is read: one turn of the loop finds the sockets readable, the next has read them.

        A socket at its end that had messages is read twice.
        """
        for _ in range(4):
            await asyncio.sleep(0)
        for worker in self.workers:
            if worker._channel.sock.fileno() >= 0:
                worker.receive()

    async def close(self) -> None:
        self.fleet.close(EverserveError("the test is over"))
        for worker in self.workers:
            worker.die()


def assert_complete(toy: ToyFleet, *indices: int) -> None:
    """These clients (all, if none is named) have their whole streams, and nothing else."""
    for stream in [toy.streams[i] for i in indices] or toy.streams:
        recorder = stream.listener
        assert isinstance(recorder, Recorder)
        assert recorder.tokens == whole_stream(stream.spec) and recorder.finish_reason == "length"
        assert not recorder.errors


def engine_stats(**changes: Any) -> EngineStats:
    fields: dict[str, Any] = {
        "num_running": 0,
        "num_waiting": 0,
        "kv_usage": 0.0,
        "num_steps": 0,
        "num_preemptions": 0,
        "num_prompt_tokens": 0,
        "num_generated_tokens": 0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
        **changes,
    }
    return EngineStats(**fields)


def with_fleet(test: Callable[[ToyFleet], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with a fleet of its own."""

    async def run() -> None:
        toy = ToyFleet(**options)
        try:
            await asyncio.wait_for(test(toy), 30)
        finally:
            await toy.close()

    asyncio.run(run())
