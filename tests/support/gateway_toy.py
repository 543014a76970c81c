"""A gateway without processes: a toy tokenizer, scripted workers and an orchestrator at the other ends of real sockets,
a bare ASGI client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from everserve.config.gateway import GatewayConfig
from everserve.errors import OverloadedError
from everserve.gateway.api.app import create_app
from everserve.gateway.api.exposition import Metrics
from everserve.gateway.gateway import Gateway
from everserve.gateway.observe.feed import EventFeed
from everserve.gateway.questions import Questions
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.tracing import Tracing
from everserve.gateway.text.sampling import GenerationDefaults
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.gateway.text.tokenizer_files import TokenizerFiles
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Members, Process, Worker, WorkerState
from everserve.tables.outputs import AttentionLoad, EngineStats, Output, TokenLogprobs
from everserve.tables.requests import RequestSpec
from everserve.tables.validity import Conditions
from everserve.wire.channel import AsyncChannel, Channel, ChannelClosed
from everserve.wire.event_log import EventLog
from everserve.wire.messages import (
    Answered,
    AnyMessage,
    Ask,
    Cancel,
    ClusterChanged,
    GatewayReport,
    GivenBack,
    LogSettled,
    Rejected,
    StepOutput,
    StreamsReported,
    Submit,
    WorkerLost,
    WorkerReady,
)
from everserve.wire.operators import (
    AnyRequest,
    DrainRequest,
    DrainView,
    FaultRequest,
    FaultView,
    SwitchRequest,
    SwitchView,
    View,
)
from tests.support.fleet_toy import engine_stats

EOS = "<|end|>"
QUEUED_S = 0.25
MAX_NUM_SEQS = 4
CAPACITY = MAX_NUM_SEQS + 4  # of one worker, as the gateway sees it
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "and")]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra|default('') }}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token; a few merges; two added tokens, one of them special."""
    names = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken("plain text é", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models have it: words with a mark for the space, and byte tokens for the rest."""
    words = ["<unk>", EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁and", "a", "b", "é", "▁▁"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def model_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> ModelTokenizer:
    return ModelTokenizer(
        TokenizerFiles(
            backend=byte_level_tokenizer(),
            special_tokens={"eos_token": EOS},
            chat_template=chat_template,
            class_name="PreTrainedTokenizerFast",
            config={},
        )
    )


def make_gateway_config(**changes: Any) -> GatewayConfig:
    fields: dict[str, Any] = {
        "model": "toy",
        "served_model_names": ["toy", "alias"],
        "max_queue": 8,
        "shutdown_timeout_s": 1.0,
        "seed": 1,
        **changes,
    }
    return GatewayConfig(**fields)


class ScriptedWorker:
    """Answers each stream with the tokens that the test's script gives for it: at once, or as far as the test lets it
    advance. Without a script, it is the test that answers."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        channel: AsyncChannel,
        script: Callable[[RequestSpec], list[int]] | None,
        is_paced: bool,
    ) -> None:
        self.rank = Rank(rank)
        self.incarnation = Incarnation(incarnation)
        self.channel = channel
        self.specs: list[RequestSpec] = []
        self.sources: list[WorkerId | None] = []
        self.cancelled: list[str] = []
        self._script = script
        self._is_paced = is_paced
        self._ahead: dict[str, list[Output]] = {}  # what each stream's next outputs are

    async def run(self) -> None:
        try:
            while True:
                self._handle(await self.channel.receive())
        except ChannelClosed:
            return

    def say_ready(self, **changes: int) -> None:
        fields = {"max_model_len": 64, "vocab_size": 265, "num_blocks": 100, "block_size": 4, **changes}
        fields.setdefault("max_num_seqs", MAX_NUM_SEQS)
        self.channel.send(WorkerReady(rank=self.rank, incarnation=self.incarnation, **fields))

    def die(self) -> None:
        """As a killed process: the kernel closes its end."""
        self.channel.channel.sock.shutdown(2)

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self.specs.append(message.spec)
            self.sources.append(message.source)
            if self._script is not None:
                self._ahead[message.spec.id] = outputs_of(message.spec, self._script(message.spec))
                while not self._is_paced and self.advance():
                    pass
        elif isinstance(message, Cancel):
            self.cancelled.append(message.id)
            self._ahead.pop(message.id, None)

    def advance(self) -> bool:
        """One more token of each stream, in one message. False: there is none."""
        outputs = [ahead.pop(0) for ahead in self._ahead.values() if ahead]
        if outputs:
            self.send(*outputs)
        return bool(outputs)

    def send(self, *outputs: Output, stats: EngineStats | None = None) -> None:
        self.channel.send(StepOutput(outputs=list(outputs), stats=stats or engine_stats()))

    def give_back(self) -> None:
        """As a worker that leaves."""
        self.channel.send(GivenBack(ids=[spec.id for spec in self.specs]))

    def reject(self, stream_id: str, reason: str, is_server_fault: bool) -> None:
        self.channel.send(Rejected(id=stream_id, reason=reason, is_server_fault=is_server_fault))


def outputs_of(spec: RequestSpec, tokens: list[int]) -> list[Output]:
    """What a worker would send if the model chose these tokens, until a limit is reached."""
    params = spec.params
    scores = [None, *(_scores(token, params.prompt_logprobs) for token in spec.prompt[1:])]
    prompt_logprobs = scores if params.prompt_logprobs is not None else None
    if params.pooled:
        return [Output(id=spec.id, index=0, finish_reason="length", pooled=pooled_of(list(spec.prompt)), num_cached=2)]
    if params.max_tokens == 0:
        return [Output(id=spec.id, index=0, finish_reason="length", prompt_logprobs=prompt_logprobs)]
    outputs: list[Output] = []
    for index, token in list(enumerate(tokens))[len(spec.known) :]:
        is_stop = token in params.stop_ids
        is_last = is_stop or index + 1 >= params.max_tokens
        outputs.append(
            Output(
                id=spec.id,
                index=index,
                token=token,
                finish_reason=("stop" if is_stop else "length") if is_last else None,
                stop_id=token if is_stop else None,
                logprobs=_scores(token, params.logprobs) if params.logprobs is not None else None,
                prompt_logprobs=prompt_logprobs if index == 0 else None,
                num_cached=2 if index == 0 else 0,
                queued_s=QUEUED_S if index == 0 else 0.0,
            )
        )
        if is_last:
            break
    return outputs


def pooled_of(prompt: list[int]) -> bytes:
    """A vector that depends on every token."""
    return np.random.default_rng(prompt).normal(size=8).astype("<f4").tobytes()


def _scores(token: int, num_top: int | None) -> TokenLogprobs:
    top = [token, *range(40, 40 + 20)][: num_top or 0]
    values = tuple(-0.5 - i for i in range(len(top)))
    return TokenLogprobs(logprob=-0.5, rank=1, top_ids=tuple(top), top_logprobs=values)


class ToyOrchestrator:
    """Says what the test wants it to say, and remembers what it was asked for."""

    def __init__(self, channel: AsyncChannel) -> None:
        self.channel = channel
        self.report: GatewayReport | None = None  # what the gateway knew at the beginning
        self.settled: list[WorkerId] = []
        self.asked: list[Ask] = []
        self.loads: dict[Rank, AttentionLoad] = {}  # that the gateway reported last
        self.answers = True
        self.answer: Answered | View | None = None  # the next ones: a refusal or a view; None: what is asked for
        self._epoch = 0

    async def run(self) -> None:
        try:
            report = await self.channel.receive()
            assert isinstance(report, GatewayReport)
            self.report, self._epoch = report, report.epoch
            while True:
                self._handle(await self.channel.receive())
        except ChannelClosed:
            return

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, LogSettled):
            self.settled.append((message.rank, message.incarnation))
            return
        if isinstance(message, StreamsReported):
            self.loads = message.loads
            return
        assert isinstance(message, Ask)
        self.asked.append(message)
        if self.answers:
            self.channel.send(answer_to(message, self.answer))

    def publish(self, *workers: Worker, violations: tuple[str, ...] = (), **changes: Any) -> None:
        self._epoch += 1
        members = Members(epoch=Epoch(self._epoch), workers=workers)
        fields: dict[str, Any] = {
            "degraded": (),
            "expert_stats": {},
            "conditions": Conditions(coverage=violations),
        } | changes
        fields = {"num_experts_without_place": 0, "num_stale": 0} | fields
        self.channel.send(ClusterChanged(members=members, **fields))

    def lose(self, worker: ScriptedWorker, cause: str = "hang") -> None:
        roles = (Role.ATTENTION,)
        self.channel.send(WorkerLost(rank=worker.rank, incarnation=worker.incarnation, roles=roles, cause=cause))

    def die(self) -> None:
        self.channel.channel.sock.shutdown(2)


class ToySupervisor:
    """Sends signals to nobody, and says that it did."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.answer: Answered | None = None
        self.link = Questions("supervisor", self._receive)

    def _receive(self, message: Ask) -> None:
        self.asked.append(message)
        asyncio.get_running_loop().call_soon(self.link.on_answer, answer_to(message, self.answer))


def refusal(reason: str) -> Answered:
    return Answered(id="", refused=reason)


def answer_to(ask: Ask, answer: Answered | View | None) -> Answered:
    """None: what was asked for."""
    if isinstance(answer, Answered):
        return msgspec.structs.replace(answer, id=ask.id)
    return Answered(id=ask.id, view=msgspec.json.encode(answer or _granted(ask.request)))


def _granted(request: AnyRequest) -> View:
    match request:
        case DrainRequest():
            return DrainView(rank=request.rank, incarnation=1)
        case SwitchRequest():
            return SwitchView(rank=request.rank, role=request.role)
        case FaultRequest(process=str(process), signal=str(signal)):
            return FaultView(process=process, pid=99, signal=signal)
        case FaultRequest(rank=int(rank), signal=str(signal)):
            return FaultView(rank=rank, incarnation=1, pid=4242, signal=signal)
    raise AssertionError(f"the test says what is answered to {request}")


def member(rank: int, incarnation: int = 1, **changes: Any) -> Worker:
    fields: dict[str, Any] = {"pid": 4242, "roles": (Role.ATTENTION,), "state": WorkerState.READY, **changes}
    return Worker(rank=Rank(rank), incarnation=Incarnation(incarnation), **fields)


class Response:
    """What the app sent so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The JSON of each event; the text [DONE] as it is."""
        return [data if data == "[DONE]" else json.loads(data) for _, data in self._lines()]

    @property
    def event_ids(self) -> list[int]:
        """The id of each event, if it has one."""
        return [int(id) for id, _ in self._lines() if id is not None]

    def _lines(self) -> list[tuple[str | None, str]]:
        """The id, if there is one, and the data of each event that has arrived completely."""
        parts = [part.split("\n") for part in self.body.decode().split("\n\n")[:-1]]
        heads = [line.removeprefix("id: ") if rest else None for line, *rest in parts]
        assert all(part[-1].startswith("data: ") for part in parts)
        return [(head, part[-1].removeprefix("data: ")) for head, part in zip(heads, parts, strict=True)]


class ToyServer:
    """An app, its workers, its orchestrator, and a client."""

    def __init__(
        self, gateway: Gateway, script: Callable[[RequestSpec], list[int]] | None, is_paced: bool = False
    ) -> None:
        self.gateway = gateway
        self.script = script
        self.is_paced = is_paced
        self.workers: list[ScriptedWorker] = []
        self.supervisor = ToySupervisor()
        gateway.supervisor = self.supervisor.link
        self.app = create_app(gateway)
        self._tasks: list[asyncio.Future[None]] = []
        self._orchestrators: list[ToyOrchestrator] = []
        self.orchestrator = self.attach_orchestrator()

    @property
    def worker(self) -> ScriptedWorker:
        """The first one."""
        return self.workers[0]

    def metrics_text(self) -> str:
        """What `/metrics` says, for a test that must not give the event loop a turn."""
        return b"".join(Metrics(self.gateway).pieces()).decode()

    def attach_orchestrator(self) -> ToyOrchestrator:
        """A new one, whatever has become of the one before."""
        ours, theirs = Channel.pair()
        self.orchestrator = ToyOrchestrator(AsyncChannel(theirs))
        self._orchestrators.append(self.orchestrator)
        self._tasks.append(asyncio.ensure_future(self.orchestrator.run()))
        self.gateway.orchestrator.attach(ours)
        return self.orchestrator

    def attach(self, rank: int, incarnation: int = 1) -> ScriptedWorker:
        """A worker that has not said anything yet."""
        ours, theirs = Channel.pair()
        worker = ScriptedWorker(rank, incarnation, AsyncChannel(theirs), self.script, self.is_paced)
        self.workers.append(worker)
        self._tasks.append(asyncio.ensure_future(worker.run()))
        self.gateway.fleet.attach(worker.rank, worker.incarnation, ours)
        return worker

    async def add_worker(self, rank: int, incarnation: int = 1, **changes: int) -> ScriptedWorker:
        """A worker that is ready."""
        worker = self.attach(rank, incarnation)
        worker.say_ready(**changes)
        fleet = self.gateway.fleet
        await until(lambda: (link := fleet.link(worker.rank)) is not None and link.ready is not None)
        return worker

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in (*self.workers, *self._orchestrators):
            end.channel.close()
        self.gateway.keeper.close()
        self.gateway.orchestrator.close()
        self.gateway.fleet.close(OverloadedError("the test is over"))

    def begin(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str | None] | None = None,  # None: not sent
        *,
        reads: bool = True,
        hosts: Sequence[str] = (),
        scope: Mapping[str, Any] | None = None,
    ) -> tuple["asyncio.Task[None]", Response, asyncio.Event]:
        """Start an exchange; set the event to disconnect. A client that does not read takes one piece of the body."""
        response, gone = Response(), asyncio.Event()
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
        incoming = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                if response.body and not reads:
                    await asyncio.Event().wait()
                response.body += message["body"]
                response.is_complete = not message.get("more_body")

        path, _, query = path.partition("?")
        pairs = [
            *((name, value) for name, value in sent.items() if value is not None),
            *(("host", host) for host in hosts),
        ]
        exchange = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in pairs],
            **(scope or {}),
        }
        return asyncio.ensure_future(self.app(exchange, receive, send)), response, gone

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str | None] | None = None
    ) -> Response:
        task, response, _ = self.begin(method, path, body, headers)
        await asyncio.wait_for(task, 30)
        assert response.is_complete
        return response

    async def post(self, path: str, body: Any, **headers: str) -> Response:
        return await self.request("POST", path, body, headers)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0)


async def settle() -> None:
    """Everything that was sent is on its way no more: from worker to client takes a few turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def toy_server(
    script: Callable[[RequestSpec], list[int]] | None = None,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    defaults: GenerationDefaults | None = None,
    is_ready: bool = True,
    is_paced: bool = False,
    tracing: Tracing | None = None,
    **changes: Any,
) -> AsyncIterator[ToyServer]:
    """A gateway with an orchestrator that finds all well, and one worker attached."""
    start = make_gateway_config(**changes)
    feed = EventFeed()
    fleet = Fleet(start.max_queue, tell=EventLog("gateway", tell=feed.publish).append)
    defaults = defaults or GenerationDefaults(eos_ids=(0,))
    gateway = Gateway(start, model_tokenizer(chat_template), defaults, fleet, feed, tracing)
    gateway.cluster.processes = (Process(name="gateway", pid=7),)
    server = ToyServer(gateway, script, is_paced)
    try:
        await until(lambda: server.orchestrator.report is not None)
        server.orchestrator.publish(member(0))
        await until(lambda: gateway.cluster.members is not None)
        if is_ready:
            await server.add_worker(0)
        else:
            server.attach(0)
        yield server
    finally:
        await server.close()
