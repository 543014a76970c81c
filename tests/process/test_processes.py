"""Processes and signals: starting, stopping, dying, leaving nothing behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from everserve.client import Stream, complete
from tests.process.cluster import is_alive, process_state, wait_until, wait_whole


def run_serve(*arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "everserve.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def num_running(server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def children(server) -> dict[str, int]:
    cluster = httpx.get(f"{server.url}/cluster").json()
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


def test_a_whole_life(start_server):
    with start_server() as server:
        cluster = httpx.get(f"{server.url}/cluster").json()
        assert cluster["violations"] == [] and cluster["epoch"] >= 1
        assert [worker["state"] for worker in cluster["workers"]] == ["ready"]
        pids = children(server)
        assert set(pids) == {"supervisor", "gateway", "orchestrator", "anchor", "zygote", "worker-0"}
        assert server.process.pid == pids["supervisor"]
        names = [event["event"] for event in server.events()]
        assert names.index("worker_became_ready") < names.index("serving")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
        assert not any(is_alive(pid) for pid in pids.values())


def test_sigterm_lets_running_streams_finish(start_server):
    with start_server() as server:
        streams: list[Stream] = []
        asyncio.run(during(streams, server, lambda: server.process.send_signal(signal.SIGTERM)))
        assert [len(stream.token_ids) for stream in streams] == [400] * 4
        assert all(stream.error is None and stream.finish_reason == "length" for stream in streams)
        assert server.process.wait(timeout=20) == 0


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
        server.process.wait(timeout=20)
        wait_until(lambda: not any(is_alive(pid) for pid in pids.values()))


def test_nobody_survives_the_supervisor(start_server):
    with start_server() as server:
        pids = children(server)
        os.kill(pids["supervisor"], signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids.values()))


@pytest.mark.parametrize("victim", ["gateway", "orchestrator"])
def test_a_death_that_cannot_be_survived_is_told(start_server, victim):
    """The truth: streams end, the server says why and exits, and nobody is left."""
    with start_server() as server:
        pids = children(server)
        streams: list[Stream] = []
        try:
            asyncio.run(during(streams, server, lambda: os.kill(pids[victim], signal.SIGKILL), max_tokens=4000))
        except ConnectionError:
            assert victim == "gateway"  # whose sockets are gone with it
        wait_until(lambda: not is_alive(pids[victim]))
        assert all(stream.finish_reason is None for stream in streams)
        assert server.process.wait(timeout=20) == 1
        assert f"the {victim} died (signal SIGKILL)" in server.log_text()
        assert not any(is_alive(pid) for pid in pids.values())


@pytest.mark.parametrize("victim", ["gateway", "orchestrator"])
def test_a_death_during_start_up_is_the_end_and_is_told(tmp_path, victim):
    command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--port", "0", "--event-log", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        events: list[dict] = []

        def started() -> bool:
            lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
            events[:] = [json.loads(line) for line in lines]
            return any(event["event"] == "process_started" and event["child"] == victim for event in events)

        wait_until(started)
        pids = [event["child_pid"] for event in events if event["event"] == "process_started"]
        os.kill(next(e["child_pid"] for e in events if e.get("child") == victim), signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"the {victim} died (signal SIGKILL)" in errors
    started()
    assert not any(event["event"] == "serving" for event in events)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_only_worker_is_replaced_and_its_streams_go_on(start_server, signum):
    """With both roles in one process there is nobody to take over: streams wait for the replacement."""
    with start_server() as server:
        undisturbed: list[Stream] = []
        asyncio.run(during(undisturbed, server, lambda: None, max_tokens=200))
        worker = children(server)["worker-0"]
        disturbed: list[Stream] = []
        asyncio.run(during(disturbed, server, lambda: os.kill(worker, signum), max_tokens=200))
        assert process_state(worker) in (None, "Z", "X", "T")
        wait_whole(server)
        assert children(server)["worker-0"] != worker
        assert [stream.token_ids for stream in disturbed] == [stream.token_ids for stream in undisturbed]


def test_two_servers_side_by_side(start_server, server):
    with start_server() as other:
        assert other.url != server.url
        for one in (server, other):
            streams: list[Stream] = []
            asyncio.run(during(streams, one, lambda: None, max_tokens=5))
            assert all(len(stream.token_ids) == 5 for stream in streams)


def test_a_client_that_leaves_is_forgotten(server):
    async def leave() -> None:
        stream = Stream()
        task = asyncio.create_task(complete(server.url, server.model, [1, 2, 3], 4000, stream))
        while not stream.token_ids:
            await asyncio.sleep(0.002)
        task.cancel()

    asyncio.run(leave())
    wait_until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 0)
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
        (["demo", "--block-size", "17"], "choose 16, 32, 64 or 128"),
        (["demo", "--dtype", "int3"], "choose one of"),
        (["demo", "--port", "0", "--max-model-len", "1000000"], "max_position_embeddings"),
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


def test_config_file(tmp_path, start_server):
    config = tmp_path / "serve.yaml"
    config.write_text("served-model-name: [yaml-name]\nmax-model-len: 256\n")
    with start_server("--config", str(config), "--max-model-len", "128") as server:
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["yaml-name"]
        assert models[0]["max_model_len"] == 128, "the command line wins"
    config.write_text("no-such-flag: 1\n")
    done = run_serve("demo", "--config", str(config))
    assert done.returncode == 2 and "no_such_flag" in done.stderr


def test_status_with_an_api_key(start_server):
    with start_server("--api-key", "secret") as server:
        command = [sys.executable, "-m", "everserve.cli", "status", "--url", server.url]
        without = subprocess.run(command, capture_output=True, text=True, check=False)
        assert without.returncode == 2 and "--api-key" in without.stderr and "Traceback" not in without.stderr
        given = subprocess.run([*command, "--api-key", "secret", "--json"], capture_output=True, text=True, check=False)
        assert given.returncode == 0 and '"violations": []' in given.stdout
