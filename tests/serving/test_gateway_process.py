"""The gateway process alone; the test is its supervisor, its orchestrator and its workers."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.ledger.layout import Shape
from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.model.bundled import DEMO_MODEL
from everserve.procs.launching import ENVIRONMENT
from everserve.procs.process import children_of, state_of
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.members import Members, Process, Worker, WorkerState
from everserve.tables.outputs import Output
from everserve.tables.validity import Conditions
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.events import ProcessStarted
from everserve.wire.messages import (
    AnyMessage,
    Ask,
    Attach,
    Cancel,
    ClusterChanged,
    EventHappened,
    GatewayBegun,
    GatewayReport,
    LogSettled,
    OrchestratorAttached,
    ProcessesChanged,
    Ready,
    Shutdown,
    StartGateway,
    StepOutput,
    StreamsReported,
    Submit,
    WorkerLost,
    WorkerReady,
)
from everserve.wire.operators import FaultRequest, FaultView
from tests.support.cluster import is_alive
from tests.support.fleet_toy import engine_stats
from tests.support.gateway_toy import answer_to
from tests.support.readable import num_readable

TIMEOUT_S = 60.0


class GatewayUnderTest:
    """One gateway process and the other ends of its channels."""

    def __init__(self, event_log: Path, **config: Any) -> None:
        self.event_log = event_log
        self.http = httpx.Client(timeout=TIMEOUT_S)
        listen = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listen.getsockname()[1]}"
        control, theirs = Channel.pair(are_packets=True)
        ledger = Ledger.create(Shape.of(num_connections=256, num_requests=256, num_bytes=64 << 20))
        fds = {"--control-fd": theirs.detach(), "--listen-fd": listen.detach(), "--ledger-fd": ledger}
        fds["--table-fd"] = SharedTable.create(num_gateways=1)
        arguments = ["--root-pid", str(os.getpid())]
        arguments += [text for flag, fd in fds.items() for text in (flag, str(fd))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everserve.gateway", *arguments],
            pass_fds=list(fds.values()),
            env=os.environ | ENVIRONMENT,
        )
        for fd in fds.values():
            os.close(fd)
        self.control = Channel(control)
        self.control.send(
            StartGateway(
                config=GatewayConfig(
                    model=str(DEMO_MODEL),
                    served_model_names=["demo"],
                    max_queue=16,
                    shutdown_timeout_s=5.0,
                    enable_chaos=True,
                    seed=1,
                    max_logprobs=5,
                    event_log=EventLogConfig(directory=str(event_log)),
                    **config,
                )
            )
        )
        self.attach_orchestrator()
        self.pid = expect(self.control, GatewayBegun).pid  # of the gateway; `process` is its keeper
        expect(self.control, Ready)

    def attach_orchestrator(self) -> None:
        """A new one, as the supervisor does it."""
        ours, theirs = Channel.pair()
        self.control.send(OrchestratorAttached(), fds=[theirs.fileno()])
        theirs.close()
        self.orchestrator = Channel(ours)

    def attach(self, incarnation: int) -> Channel:
        """A worker in seat 0 that is ready."""
        ours, theirs = Channel.pair()
        attach = Attach(rank=Rank(0), incarnation=Incarnation(incarnation))
        self.control.send(attach, fds=[theirs.fileno()])
        theirs.close()
        worker = Channel(ours)
        worker.send(
            WorkerReady(
                rank=Rank(0),
                incarnation=Incarnation(incarnation),
                max_model_len=128,
                vocab_size=1000,
                num_blocks=64,
                block_size=16,
                max_num_seqs=4,
            )
        )
        return worker

    def publish(self, *violations: str, epoch: int = 1) -> None:
        worker = Worker(
            rank=Rank(0), incarnation=Incarnation(1), pid=11, roles=(Role.ATTENTION,), state=WorkerState.READY
        )
        members = Members(epoch=Epoch(epoch), workers=(worker,))
        self.orchestrator.send(
            ClusterChanged(
                members=members,
                conditions=Conditions(coverage=violations),
                degraded=("thin",),
                num_experts_without_place=0,
                expert_stats={},
                num_stale=0,
            )
        )

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"{self.url}{path}")

    def until(self, path: str, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
        """Ask until the answer is right; the pauses between are the requests themselves."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition(answer := self.get(path)):
            assert time.monotonic() < deadline_s, f"{path}: {answer.status_code} {answer.text}"
        return answer


def expect(channel: Channel, kind: type) -> AnyMessage:
    message = channel.receive(TIMEOUT_S)
    assert isinstance(message, kind), message
    return message


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayUnderTest]:
    running = GatewayUnderTest(tmp_path)
    yield running
    running.http.close()
    running.process.kill()
    running.process.wait()


ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
LARGE = "{{ ('x' * (10 ** 10 * messages|length))|length }}"


def test_a_template_that_does_not_end_delays_nothing_else(tmp_path: Path) -> None:
    """Streams, completions, other chats; and its process ends with the gateway."""
    template = (
        f"{{% if endless %}}{ENDLESS}{{% endif %}}{{% if large %}}{LARGE}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    gateway = GatewayUnderTest(tmp_path, chat_template=template)
    worker = gateway.attach(1)
    gateway.until("/v1/models", lambda answer: answer.status_code == 200)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "word"}]}
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=TIMEOUT_S)
    endless = json.dumps({**chat, "chat_template_kwargs": {"endless": True}})
    (busy,) = children_of(gateway.pid)
    connection.request("POST", "/v1/chat/completions", endless, {"Content-Type": "application/json"})
    wait_until(lambda: state_of(busy) == "R")
    plain = gateway.http.post(f"{gateway.url}/tokenize", json={"prompt": "word"}).json()["tokens"]
    received: list[Any] = []
    streaming = threading.Thread(target=stream, args=(gateway.url, received))
    streaming.start()
    submit = expect(worker, Submit)
    assert isinstance(submit, Submit)
    send_tokens(worker, submit.spec.id, {0: 10, 1: 11, 2: 12, 3: 13}, last=3)
    streaming.join(TIMEOUT_S)
    assert received == [10, 11, 12, 13, "[DONE]"]
    assert gateway.http.post(f"{gateway.url}/tokenize", json=chat).json()["tokens"] == plain
    large = {**chat, "chat_template_kwargs": {"large": True}}
    answer = gateway.http.post(f"{gateway.url}/v1/chat/completions", json=large)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"] == "The chat template rejected the messages: it takes too much memory"
    assert gateway.http.post(f"{gateway.url}/tokenize", json=chat).json()["tokens"] == plain
    stopped = next(pid for pid in children_of(gateway.pid) if pid != busy)
    os.kill(stopped, signal.SIGSTOP)
    gateway.http.close()
    gateway.process.kill()
    gateway.process.wait()
    wait_until(lambda: not is_alive(busy) and not is_alive(stopped))
    connection.close()


def test_a_broken_template_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the chat template is broken: .* \(line 1\)"):
        GatewayUnderTest(tmp_path, chat_template="{% if %}")


def send_tokens(worker: Channel, id: str, tokens: dict[int, int], last: int | None = None) -> None:
    outputs = [
        Output(id=id, index=index, token=token, finish_reason="length" if index == last else None)
        for index, token in tokens.items()
    ]
    worker.send(StepOutput(outputs=outputs, stats=engine_stats()))


def test_a_stream_survives_two_workers_and_the_orchestrator(gateway: GatewayUnderTest) -> None:
    assert gateway.get("/health").status_code == 503
    assert expect(gateway.orchestrator, GatewayReport) == GatewayReport(epoch=Epoch(0), logs=[])
    gateway.control.send(ProcessesChanged(processes=(Process(name="gateway", pid=gateway.pid),)))
    gateway.control.send(EventHappened(event=ProcessStarted(process="supervisor", child="x", child_pid=1)))
    gateway.publish()
    first = gateway.attach(1)
    gateway.until("/health", lambda answer: answer.status_code == 200)
    received: list[Any] = []
    client = threading.Thread(target=stream, args=(gateway.url, received))
    client.start()
    submit = expect(first, Submit)
    assert isinstance(submit, Submit)
    id = submit.spec.id
    send_tokens(first, id, {0: 10, 1: 11})
    gateway.until("/metrics", lambda answer: metric(answer, "vllm:generation_tokens_total") == 2)

    second = lose_the_first(gateway, first, id)
    third = lose_the_orchestrator_and_the_second(gateway, second, id)
    meet_another_orchestrator(gateway)
    send_tokens(third, id, {3: 13}, last=3)
    client.join(TIMEOUT_S)
    assert received == [10, 11, 12, 13, "[DONE]"]
    assert expect(gateway.orchestrator, LogSettled) == LogSettled(rank=Rank(0), incarnation=Incarnation(2))
    gateway.publish(epoch=2)
    gateway.until("/cluster", lambda answer: answer.json()["degraded"] == ["thin"])
    answer = gateway.get("/metrics")
    assert metric(answer, "everserve_requests_resumed_total") == 2
    assert metric(answer, "everserve_stall_seconds_count") == 2
    first.close()
    check_events(gateway)
    gateway.control.send(Shutdown(grace_s=1.0))
    assert gateway.process.wait(TIMEOUT_S) == 0
    with pytest.raises(ChannelClosed):
        gateway.control.receive(TIMEOUT_S)


def lose_the_first(gateway: GatewayUnderTest, first: Channel, id: str) -> Channel:
    """It hangs and is declared gone; it speaks later."""
    lost = WorkerLost(rank=Rank(0), incarnation=Incarnation(1), roles=(Role.ATTENTION,), cause="hang")
    gateway.orchestrator.send(lost)
    gateway.until("/health", lambda answer: answer.status_code == 503)
    send_tokens(first, id, {2: 99, 3: 99})
    gateway.until("/metrics", lambda answer: metric(answer, "everserve_stale_messages_total") == 1)
    second = gateway.attach(2)
    submit = expect(second, Submit)
    assert isinstance(submit, Submit) and (list(submit.spec.known), submit.source) == ([10, 11], (0, 1))
    return second


def lose_the_orchestrator_and_the_second(gateway: GatewayUnderTest, second: Channel, id: str) -> Channel:
    gateway.orchestrator.close()
    gone = gateway.until("/cluster", lambda answer: len(answer.json()["degraded"]) > 1)
    thin, orchestrator = gone.json()["degraded"]
    assert gone.json()["violations"] == [] and thin == "thin" and "the orchestrator is gone" in orchestrator
    assert gateway.get("/health").status_code == 200, "requests are served, so no load balancer takes it out"
    assert gone.json()["processes"] == [{"name": "gateway", "pid": gateway.pid, "host": 0}]
    send_tokens(second, id, {2: 12})
    second.close()
    gateway.until("/metrics", lambda answer: metric(answer, "everserve_failovers_total") == 2)
    third = gateway.attach(3)
    submit = expect(third, Submit)
    assert isinstance(submit, Submit) and (list(submit.spec.known), submit.source) == ([10, 11, 12], (0, 2))
    return third


def meet_another_orchestrator(gateway: GatewayUnderTest) -> None:
    """It hears of the one log that is still needed; and later, when it is not any more."""
    gateway.attach_orchestrator()
    second_log, third_log = (Rank(0), Incarnation(2)), (Rank(0), Incarnation(3))
    report = expect(gateway.orchestrator, GatewayReport)
    assert report == GatewayReport(epoch=Epoch(1), logs=[second_log, third_log], lost=[second_log])


def check_events(gateway: GatewayUnderTest) -> None:
    """The gateway's own are in its file and in its feed."""
    gateway.until("/metrics", lambda _: "stale_dropped" in own_events(gateway))
    assert own_events(gateway).count("request_resumed") == 2
    with httpx.stream("GET", f"{gateway.url}/events", timeout=TIMEOUT_S) as feed:
        lines = (line for line in feed.iter_lines() if line.startswith("event: "))
        shown = [next(lines).removeprefix("event: ") for _ in range(4)]
    assert shown == ["process_started", "request_resumed", "request_resumed", "stale_dropped"]


def test_faults_go_to_the_orchestrator_and_back(gateway: GatewayUnderTest) -> None:
    gateway.publish()
    worker = gateway.attach(1)
    gateway.until("/health", lambda answer: answer.status_code == 200)
    answers: list[httpx.Response] = []

    def inject() -> None:
        body = {"rank": 0, "signal": "STOP"}
        answers.append(httpx.post(f"{gateway.url}/cluster/fault", json=body, timeout=TIMEOUT_S))

    client = threading.Thread(target=inject)
    client.start()
    expect(gateway.orchestrator, GatewayReport)
    while isinstance(asked := gateway.orchestrator.receive(TIMEOUT_S), StreamsReported):
        pass  # about once a second, and before what operators ask for
    assert isinstance(asked, Ask) and asked.request == FaultRequest(rank=0, signal="STOP")
    gateway.orchestrator.send(answer_to(asked, FaultView(rank=0, incarnation=1, pid=11, signal="STOP")))
    client.join(TIMEOUT_S)
    assert answers[0].json() == {"rank": 0, "incarnation": 1, "pid": 11, "signal": "STOP"}
    worker.close()


def test_faults_on_other_processes_go_to_the_supervisor_and_back(gateway: GatewayUnderTest) -> None:
    answers: list[httpx.Response] = []

    def inject() -> None:
        body = {"process": "orchestrator", "signal": "KILL"}
        answers.append(httpx.post(f"{gateway.url}/cluster/fault", json=body, timeout=TIMEOUT_S))

    client = threading.Thread(target=inject)
    client.start()
    asked = expect(gateway.control, Ask)
    assert isinstance(asked, Ask) and asked.request == FaultRequest(process="orchestrator", signal="KILL")
    gateway.control.send(answer_to(asked, FaultView(process="orchestrator", pid=12, signal="KILL")))
    client.join(TIMEOUT_S)
    assert answers[0].json() == {"process": "orchestrator", "pid": 12, "signal": "KILL"}


def test_a_client_comes_back_for_the_rest_and_an_old_connection_is_closed(gateway: GatewayUnderTest) -> None:
    worker = gateway.attach(1)
    gateway.until("/v1/models", lambda answer: answer.status_code == 200)
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "return_token_ids": True, "ignore_eos": True}
    first = post(gateway, json.dumps(body))
    submit = expect(worker, Submit)
    assert isinstance(submit, Submit)
    send_tokens(worker, submit.spec.id, {0: 10, 1: 11})
    old_answer = first.getresponse()
    assert read_events(old_answer, 2) == [("0", [10]), ("1", [11])]

    # The second token was lost on its way; the old connection looks alive.
    second = post(gateway, "whatever", **{"Last-Event-ID": "0"})
    answer = second.getresponse()
    assert read_events(answer, 1) == [("1", [11])]
    with pytest.raises(http.client.IncompleteRead):
        old_answer.read()

    # Nobody is there: the worker need not go on.
    answer.close()
    second.close()
    cancel = expect(worker, Cancel)
    assert isinstance(cancel, Cancel) and cancel.id == submit.spec.id
    gateway.until("/metrics", lambda answer: metric(answer, "everserve_suspended_streams") == 1)
    third = post(gateway, json.dumps(body), **{"Last-Event-ID": "1"})
    again = expect(worker, Submit)
    assert isinstance(again, Submit) and list(again.spec.known) == [10, 11] and again.spec.id != submit.spec.id
    send_tokens(worker, submit.spec.id, {2: 99})  # what it said before it had heard that it need not
    send_tokens(worker, again.spec.id, {2: 12, 3: 13}, last=3)
    answer = third.getresponse()
    assert read_events(answer, 2) == [("2", [12]), ("3", [13])]
    assert answer.read() == b"id: 4\ndata: [DONE]\n\n"
    assert metric(gateway.get("/metrics"), "everserve_client_resumes_total") == 2
    assert own_events(gateway).count("client_resumed") == 2


def post(gateway: GatewayUnderTest, body: str, **headers: str) -> http.client.HTTPConnection:
    """A request of the client that calls it `mine`; the answer is not waited for."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=TIMEOUT_S)
    connection.request(
        "POST", "/v1/completions", body, {"X-Request-Id": "mine", "Content-Type": "application/json", **headers}
    )
    return connection


def read_events(answer: http.client.HTTPResponse, num: int) -> list[tuple[str, list[int]]]:
    """The ids and tokens of the next events."""
    events = []
    for _ in range(num):
        id, data, _ = (answer.readline().decode().strip() for _ in range(3))
        tokens = json.loads(data.removeprefix("data: "))["choices"][0]["token_ids"]
        events.append((id.removeprefix("id: "), tokens))
    return events


def test_clients_leave_descriptors_to_workers(gateway: GatewayUnderTest) -> None:
    """More clients than descriptors, none of them asks: a new worker and a new client still get through."""
    gateway.publish()
    first = gateway.attach(1)
    gateway.until("/health", lambda answer: answer.status_code == 200)
    limit, num_before = 96, num_descriptors(gateway)
    assert num_before < limit // 2
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (limit, limit))
    address = ("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
    crowd = [socket.create_connection(address, timeout=TIMEOUT_S) for _ in range(2 * limit)]
    try:
        # A 503, or, for those that have not asked for a second, the end of the connection: both can be read.
        wait_until(lambda: num_readable(crowd) >= len(crowd) - limit)
        wait_until(lambda: num_descriptors(gateway) < limit - 10)  # those that are closed go in the next turn
        first.close()
        second = gateway.attach(2)  # its channel is a descriptor
        gateway.orchestrator.close()
        gateway.attach_orchestrator()
        expect(gateway.orchestrator, GatewayReport)
        received: list[Any] = []
        client = threading.Thread(target=stream_when_there_is_room, args=(gateway.url, received))
        client.start()
        submit = expect(second, Submit)
        assert isinstance(submit, Submit)
        send_tokens(second, submit.spec.id, {0: 10, 1: 11, 2: 12, 3: 13}, last=3)
        client.join(TIMEOUT_S)
        assert received == [10, 11, 12, 13, "[DONE]"]
    finally:
        for sock in crowd:
            sock.close()
    assert gateway.process.poll() is None


def num_descriptors(gateway: GatewayUnderTest) -> int:
    return len(list(Path(f"/proc/{gateway.pid}/fd").iterdir()))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def stream_when_there_is_room(url: str, received: list[Any]) -> None:
    """As clients do that get a 503: again. Those that do not ask lose their places after a second."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not received and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPStatusError, httpx.TransportError):
            stream(url, received)


def test_the_end_of_the_supervisor_is_the_end(gateway: GatewayUnderTest) -> None:
    gateway.control.close()
    assert gateway.process.wait(TIMEOUT_S) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(gateway.pid, 0)


def stream(url: str, received: list[Any]) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "return_token_ids": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                received.append(data)
            elif data:
                received.extend(json.loads(data)["choices"][0]["token_ids"])


def metric(answer: httpx.Response, name: str) -> float:
    lines = answer.text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)


def own_events(gateway: GatewayUnderTest) -> list[str]:
    (path,) = gateway.event_log.glob("gateway.jsonl")
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]
