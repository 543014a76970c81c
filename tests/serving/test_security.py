"""A real server that listens beyond the loopback, with two clients' keys and an operator's: who may do and see what."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from everserve.client import Connection
from everserve.procs.local_server import LocalServer

A, B, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "key-admin"))
BODY = {"prompt": "It was", "max_tokens": 400, "stream": True, "ignore_eos": True, "return_token_ids": True}
FAULT = {"rank": 0, "signal": "CONT"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[LocalServer]:
    """By a file, and by flags, of which one is in the file too."""
    config = tmp_path_factory.mktemp("config") / "serve.yaml"
    config.write_text("served-model-name: [demo, yaml-name]\nmax-model-len: 2048\nenable-chaos: true\n")
    keys = {"EVERSERVE_API_KEY": "key-a key-b", "EVERSERVE_ADMIN_KEY": "key-admin"}
    flags = ("--config", str(config), "--max-model-len", "1024", "--host", "0.0.0.0", "--allowed-hosts", "my.name")
    with LocalServer("demo", *flags, environment=os.environ | keys) as running:
        running.url = running.url.replace("0.0.0.0", "127.0.0.1")
        yield running
        assert "Traceback" not in running.log_text(), running.log_text()


def test_a_stream_cannot_be_taken_over_with_another_key(guarded: LocalServer) -> None:
    async def take(headers: dict[str, str], last: int | None) -> Connection:
        named = {**headers, "X-Request-Id": "chosen-by-a", **({"Last-Event-ID": str(last)} if last is not None else {})}
        connection = await Connection.open(guarded.url, "POST", "/v1/completions", BODY, named)
        await connection.read_head()
        return connection

    async def run() -> None:
        mine = await take(A, None)
        first = await mine.read_event()
        assert mine.status == 200 and first is not None and first.id == "0"
        answers = []
        for key in (B, ADMIN, {}):
            thief = await take(key, 0)
            answers.append((thief.status, await thief.read_body()))
        assert [status for status, _ in answers] == [404, 404, 401] and b"no stream with this" in answers[0][1]
        ids = [0]
        for _ in range(10):
            event = await mine.read_event()
            assert event is not None and event.id is not None
            ids.append(int(event.id))
        mine.close()  # and comes back, with its own key
        again = await take(A, ids[-1])
        assert again.status == 200
        while event := await again.read_event():
            ids.append(int(event.id or -1))
        assert ids == list(range(len(ids))) and len(ids) == BODY["max_tokens"]

    asyncio.run(run())
    for key, sees in ((A, True), (B, False), (ADMIN, False)):
        with httpx.stream("GET", f"{guarded.url}/events", headers=key, timeout=30) as feed:
            lines = feed.iter_lines()
            told = next(line for line in lines if '"client_resumed"' in line)
        assert ("chosen-by-a" in told) == sees


def test_who_may_change_the_cluster(guarded: LocalServer) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    for headers, status in (({}, 401), (wrong, 401), (A, 403), (ADMIN, 200)):
        answer = httpx.post(f"{guarded.url}/cluster/fault", json=FAULT, headers=headers, timeout=30)
        assert answer.status_code == status, answer.text
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = httpx.post(f"{guarded.url}/cluster/fault", json=FAULT, headers={**ADMIN, **headers}, timeout=None)
        assert answer.status_code == 403
    untyped = httpx.post(
        f"{guarded.url}/cluster/fault", content=b'{"rank": 0, "signal": "CONT"}', headers=ADMIN, timeout=None
    )
    assert untyped.status_code == 400


def test_the_names_of_the_server(guarded: LocalServer) -> None:
    for host, status in (
        ("my.name", 200),
        ("localhost:1", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ):
        answer = httpx.get(f"{guarded.url}/cluster", headers={**A, "Host": host}, timeout=None)
        assert answer.status_code == status, host


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"EVERSERVE_ADMIN_KEY": "key-admin", "EVERSERVE_API_KEY": "key-a"}, "sent SIGCONT to rank 0"),
        ({"EVERSERVE_API_KEY": "key-a"}, "needs the admin key"),
    ],
)
def test_the_command_line_sends_the_admin_key(guarded: LocalServer, keys: dict[str, str], expected: str) -> None:
    command = [sys.executable, "-m", "everserve.cli", "kill", "0", "--signal", "CONT", "--url", guarded.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSERVE_")} | keys
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert expected in ended.stdout + ended.stderr and (ended.returncode == 0) == expected.startswith("sent")


def test_flags_from_a_file(guarded: LocalServer) -> None:
    models = httpx.get(f"{guarded.url}/v1/models", headers=A, timeout=None).json()["data"]
    assert [model["id"] for model in models] == ["demo", "yaml-name"]
    assert {model["max_model_len"] for model in models} == {1024}, "the command line wins"


def test_status_with_an_api_key(guarded: LocalServer) -> None:
    command = [sys.executable, "-m", "everserve.cli", "status", "--url", guarded.url]
    without = subprocess.run(command, capture_output=True, text=True, check=False)
    assert without.returncode == 2 and "--api-key" in without.stderr and "Traceback" not in without.stderr
    given = subprocess.run([*command, "--api-key", "key-a", "--json"], capture_output=True, text=True, check=False)
    assert given.returncode == 0 and '"violations": []' in given.stdout


def test_event_logs_are_for_their_owner(guarded: LocalServer) -> None:
    directory = guarded._directory / "events"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert len(modes) >= 4 and set(modes.values()) == {0o600}, modes


def test_the_official_client_with_a_right_and_with_a_wrong_key(guarded: LocalServer) -> None:
    import openai  # noqa: PLC0415 (slow, and every process imports this file)

    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="key-a", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo", "yaml-name"]
        assert client.completions.create(model="demo", prompt="It was", max_tokens=1).choices
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="demo", prompt="It was")
        assert caught.value.code == "invalid_api_key"
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert httpx.get(guarded.url + path, timeout=None).status_code == 200
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(guarded.url + path, json={}, timeout=None).status_code == 401
