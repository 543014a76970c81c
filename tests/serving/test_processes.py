"""Processes and signals: starting, stopping, dying, leaving nothing behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everserve.client import Stream, complete
from everserve.procs.process import children_of
from tests.support.cluster import get, is_alive, process_state, wait_until, wait_whole


def run_serve(*arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "everserve.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def num_running(server) -> float:
    lines = get(server, "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def children(server) -> dict[str, int]:
    cluster = get(server, "/cluster").json()
    pids = {process["name"]: process["pid"] for process in cluster["processes"]}
    return pids | {f"worker-{worker['rank']}": worker["pid"] for worker in cluster["workers"]}


async def during(stream_of: list[Stream], server, act: Callable[[], None], num: int = 4, max_tokens: int = 400) -> None:
    """Run streams, call `act` once all of them have a token, and wait for their ends."""
    stream_of.extend(Stream() for _ in range(num))
    work = asyncio.gather(
        *(complete(server.url, server.model, [5 + i, 6, 7], max_tokens, stream) for i, stream in enumerate(stream_of))
    )
    while not all(stream.token_ids for stream in stream_of):
        await asyncio.sleep(0.002)
    act()
    await asyncio.wait_for(work, 60)


@pytest.fixture(scope="module")
def own(start_server):
    """A server for faults that it survives, and for its end."""
    with start_server() as running:
        yield running
        assert "Traceback" not in running.log_text(), running.log_text()


@pytest.mark.long
def test_a_second_signal_ends_everything_at_once(start_server):
    with start_server("--shutdown-timeout", "600") as server:
        pids = children(server)

        def twice() -> None:
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: any(event["event"] == "shutdown_began" for event in server.events()))
            server.process.send_signal(signal.SIGINT)

        with pytest.raises((ConnectionError, AssertionError)):
            streams: list[Stream] = []
            asyncio.run(during(streams, server, twice, max_tokens=4000))
            assert all(stream.finish_reason for stream in streams)
        server.process.wait(timeout=90)
        wait_until(lambda: not any(is_alive(pid) for pid in pids.values()))


def test_a_signal_while_it_starts_ends_everything_at_once(tmp_path):
    """There is nothing to finish: nobody is asked to."""
    command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--port", "0", "--shutdown-timeout", "600"]
    server = subprocess.Popen([*command, "--event-log", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(children_of(server.pid)) == 5)
    pids = children_of(server.pid)
    server.send_signal(signal.SIGTERM)
    _, said = server.communicate(timeout=90)
    assert server.returncode == 0 and "Traceback" not in said, said
    assert not any(is_alive(pid) for pid in pids)
    events = [json.loads(line) for path in tmp_path.glob("supervisor*") for line in path.read_text().splitlines()]
    assert {e["exit_status"] for e in events if e["event"] == "process_ended"} == {-signal.SIGKILL}


def test_a_gateway_that_ends_by_itself_ends_the_instance(start_server):
    """The truth: the server says why and exits, and no process is left."""
    with start_server() as server:
        pids = children(server)
        os.kill(pids["gateway"], signal.SIGTERM)
        assert server.process.wait(timeout=90) == 1
        assert "the gateway died (exit status 0)" in server.log_text()
        assert not any(is_alive(pid) for pid in pids.values())


def in_session(leader: int) -> list[int]:
    """Processes that this one, or a child of it, has started; not those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *numbers = path.read_text().rsplit(")", 1)[1].split()
            if int(numbers[2]) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("number", "status"), [(None, 2), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_command_that_ends_before_it_serves_leaves_no_zygote(number, status):
    """Its flags are refused, long after the zygote was started; or it is ended before that."""
    command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--port", "0", "--block-size", "17"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(lambda: children_of(process.pid) or process.poll() is not None, what="a zygote")
        assert process.poll() is None, "the zygote is there before anything else"
        if number is not None:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    # Python dies of SIGINT, though it was handled, if that came while a string was executed, as dataclasses do. A
    # shell says 130 of both.
    died = -signal.SIGINT if number is signal.SIGINT else status
    assert process.returncode in (status, died) and "Traceback" not in said, said
    if number is not None:  # it may have come before the command knew its zygote: then the kernel ends that
        wait_until(lambda: not in_session(process.pid), what="the end of the zygote")
    assert not in_session(process.pid)


class Starting:
    """A server from its very first event on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--event-log", str(directory)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Starting":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def events(self, name: str) -> list[dict]:
        lines = [line for path in self._directory.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def kill(self, child: str) -> None:
        wait_until(lambda: any(event["child"] == child for event in self.events("process_started")))
        os.kill(next(e["child_pid"] for e in self.events("process_started") if e["child"] == child), signal.SIGKILL)


def test_helpers_that_die_during_start_up_are_replaced(tmp_path):
    helpers = ("orchestrator", "anchor", "zygote")
    with Starting(tmp_path) as server:
        for victim in helpers:
            server.kill(victim)
        wait_until(lambda: server.events("serving"), what="a server")
        started = [event["child"] for event in server.events("process_started")]
        server.process.terminate()
        _, errors = server.process.communicate(timeout=90)
    assert sorted(started) == sorted(["keeper", "gateway", *helpers, *helpers]), errors
    assert server.process.returncode == 0 and "Traceback" not in errors, errors


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_only_worker_is_replaced_and_its_streams_go_on(own, signum):
    """With both roles in one process there is no other to take over: streams wait for the replacement."""
    wait_whole(own)
    undisturbed: list[Stream] = []
    asyncio.run(during(undisturbed, own, lambda: None, max_tokens=200))
    worker = children(own)["worker-0"]
    disturbed: list[Stream] = []
    asyncio.run(during(disturbed, own, lambda: os.kill(worker, signum), max_tokens=200))
    assert process_state(worker) in (None, "Z", "X", "T")
    wait_whole(own)
    assert children(own)["worker-0"] != worker
    assert [stream.token_ids for stream in disturbed] == [stream.token_ids for stream in undisturbed]


def test_two_servers_side_by_side(own, server):
    assert own.url != server.url
    for one in (server, own):
        streams: list[Stream] = []
        asyncio.run(during(streams, one, lambda: None, max_tokens=5))
        assert all(len(stream.token_ids) == 5 for stream in streams)


def test_a_whole_life(own):
    """To the end: SIGTERM lets running streams finish. (The last test of this server.)"""
    cluster = get(own, "/cluster").json()
    assert cluster["violations"] == [] and cluster["epoch"] >= 1
    assert [worker["state"] for worker in cluster["workers"]] == ["ready"]
    pids = children(own)
    assert set(pids) == {"root", "supervisor", "keeper", "gateway", "orchestrator", "anchor", "zygote", "worker-0"}
    assert own.process.pid == pids["root"]
    names = [event["event"] for event in own.events()]
    assert names.index("worker_became_ready") < names.index("serving")
    streams: list[Stream] = []

    def end() -> None:
        """And the supervisor dies while it waits for the streams."""
        own.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any(event["event"] == "shutdown_began" for event in own.events("supervisor")))
        os.kill(pids["supervisor"], signal.SIGKILL)

    asyncio.run(during(streams, own, end))
    assert [len(stream.token_ids) for stream in streams] == [400] * 4
    assert all(stream.error is None and stream.finish_reason == "length" for stream in streams)
    assert own.process.wait(timeout=90) == 0
    assert not any(is_alive(pid) for pid in pids.values())
    said = own.log_text()
    own_lines = [line for line in said[said.index("everserve: SIGTERM") :].splitlines() if line.startswith("everserve")]
    # The next supervisor says the first line, too, if the one before died between saying and recording it.
    assert [*dict.fromkeys(own_lines)] == [
        "everserve: SIGTERM: stopping; running requests get 30 s",
        "everserve: the supervisor died (signal SIGKILL); the next one goes on",
        "everserve: stopped",
    ], "no word of a crash"


def test_a_client_that_leaves_is_forgotten(server):
    async def leave() -> None:
        stream = Stream()
        task = asyncio.create_task(complete(server.url, server.model, [1, 2, 3], 4000, stream))
        while not stream.token_ids:
            await asyncio.sleep(0.002)
        task.cancel()

    asyncio.run(leave())
    wait_until(lambda: get(server, "/load").json()["server_load"] == 0)
    wait_until(lambda: num_running(server) == 0)


def test_a_taken_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve("demo", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "choose another --host or --port" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/does/not/exist"], "is not a directory"),
        (["demo", "--block-size", "17"], "choose one of 16, 32, 64, 128"),
        (["demo", "--dtype", "int3"], "choose one of"),
        pytest.param(
            ["demo", "--port", "0", "--max-model-len", "1000000"], "max_position_embeddings", marks=pytest.mark.long
        ),
        (["demo", "--port", "0", "--kv-cache-memory-bytes", "1000"], "lower --max-model-len"),
        (["demo", "--no-such-flag"], "No such option"),
        (["demo", "--config", "/nope.yaml"], "nope.yaml"),
    ],
)
def test_impossible_flags_are_clear_errors(arguments, words):
    done = run_serve(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_incomplete_model_directory_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    done = run_serve(str(tmp_path), "--port", "0")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("everserve: ") and "GPT2LMHeadModel" in last
    assert "Traceback" not in done.stderr


def test_a_config_file_with_unknown_settings(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("max-modle-len: 1\n--No_such: 1\nport: 0\n")
    done = run_serve("demo", "--config", str(config))
    assert done.returncode == 2
    assert "unknown: max-modle-len (did you mean max-model-len?); --No_such; see" in done.stderr


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["demo"], signal.SIGTERM),  # as `timeout` sends it
        pytest.param(["chaos", "--seconds", "60"], signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(["bench", "failover"], signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(["demo"], signal.SIGHUP, marks=pytest.mark.long),  # as when its window is closed
        (["demo"], signal.SIGKILL),
    ],
)
def test_who_has_a_server_of_its_own_takes_it_along(command, number, tmp_path):
    command, environment = [sys.executable, "-m", "everserve.cli", *command], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 (the tests may run under nohup)
    ) as owner:
        wait_until(lambda: any(children_of(pid) for pid in children_of(owner.pid)), 120, "a server with its processes")
        servers = children_of(owner.pid)
        processes = servers + [pid for server in servers for pid in children_of(server)]
        owner.send_signal(number)
        _, said = owner.communicate(timeout=90)
        assert owner.returncode != 0 and b"Traceback" not in said, said
    wait_until(lambda: not any(is_alive(pid) for pid in processes), 10, "the end of its server")
    assert number == signal.SIGKILL or not list(tmp_path.iterdir()), "and its files"
