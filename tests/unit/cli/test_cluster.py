"""`everserve status` and `everserve kill`, against a server that says what the test wants."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from everserve import __version__
from everserve.cli import drain, health, kill, scale, status, switch, version
from everserve.cli.app import app
from everserve.errors import ConfigError
from tests.support.http_threads import QuietHandler, ServerThread

assert drain and health and kill and scale and status and switch and version  # importing them registers the commands
WORKER = {
    **{"rank": 0, "incarnation": 2, "pid": 11, "roles": ["attention"], "state": "ready", "note": ""},
    **{"requests": 3, "running": 2, "waiting": 1, "kv_cache_usage": 0.25, "slots": 0, "shadow_slots": 0},
}
EXPERT = {**WORKER, "rank": 1, "pid": 0, "roles": ["expert"], "state": "starting", "slots": 40, "shadow_slots": 8}
CLUSTER: dict[str, Any] = {
    "epoch": 7,
    "violations": [],
    "degraded": ["rank 1 (expert) is starting"],
    "processes": [{"name": "supervisor", "pid": 1}],
    "workers": [WORKER, {**EXPERT, "note": "crashed [twice]"}],
}
DEVICES = [
    {"device": 0, "state": "serving", "level": 0, "reason": "", "note": "", "workers": [0]},
    {"device": 1, "state": "down", "level": 3, "reason": "a fan", "note": "is used on: …", "workers": [1]},
]


class ScriptedServer(ServerThread):
    """Answers every request with the same status and JSON, and remembers the last one."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: Any = CLUSTER
        self.asked: tuple[str, str, Any, str | None] | None = None
        scripted = self

        class Handler(QuietHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                scripted.asked = (
                    self.command,
                    self.path,
                    json.loads(body) if body else None,
                    self.headers.get("authorization"),
                )
                data = json.dumps(scripted.answer).encode()
                self.send_response(scripted.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

        super().__init__(Handler)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


def invoke(*arguments: str, **environment: str) -> Any:
    env = {"COLUMNS": "160", "EVERSERVE_API_KEY": "", "EVERSERVE_ADMIN_KEY": "", **environment}
    return CliRunner().invoke(app, arguments, env=env)


def test_status_shows_workers_and_what_is_missing(server: ScriptedServer) -> None:
    result = invoke("status", "--url", server.url, "--api-key", "k")
    assert result.exit_code == 0, result.output
    assert server.asked == ("GET", "/cluster", None, "Bearer k")
    for text in ("epoch 7, valid", "degraded: rank 1 (expert) is starting", "supervisor 1", "attention", "25 %"):
        assert text in result.output
    assert "32 + 8 shadow" in result.output and "crashed [twice]" in result.output


@pytest.mark.parametrize("role", ["attention", "attention+expert"])
def test_nothing_of_a_status_is_cut_at_80_columns(server: ScriptedServer, role: str) -> None:
    """Workers with both roles have all experts, so there are no shadows beside them."""
    has_both = role == "attention+expert"
    note = "ended 3 times while starting, next start in 4.0 s: " + "a long reason " * 8
    workers = [
        {**WORKER, "rank": 0, "pid": 4194303, "incarnation": 12, "requests": 1024, "kv_cache_usage": 1.0},
        {**EXPERT, "rank": 31, "pid": 4194302, "slots": 64, "shadow_slots": 32, "state": "starting", "note": note},
    ]
    if has_both:
        for worker in workers:
            worker.update(roles=["attention", "expert"], slots=64, shadow_slots=0)
    server.answer = {**CLUSTER, "workers": workers, "recent": ["expert worker 31 died"]}
    arguments = ("status", "--url", server.url)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "EVERSERVE_API_KEY": ""})
    lines = result.output.splitlines()
    assert (
        "…" not in result.output
        and f"rank 31: {note}".strip() in result.output
        and "- expert worker 31" in result.output
    )
    (heads,) = [line for line in lines if line.startswith("rank  ")]
    table = lines[lines.index(heads) : lines.index(heads) + 3]
    assert max(map(len, table)) <= 80
    assert (
        " incarnation " in heads
        and role in table[1]
        and "1024" in table[1]
        and "100 %" in table[1]
        and "4194303" in table[1]
    )
    assert "starting" in table[2] and (has_both or "32 + 32 shadow" in table[2])


@pytest.mark.parametrize("strip_scheme", [True, False])
@pytest.mark.parametrize("end", ["", "/"])
def test_urls_with_and_without_a_scheme(server: ScriptedServer, strip_scheme: bool, end: str) -> None:
    url = server.url.removeprefix("http://") if strip_scheme else server.url
    assert invoke("status", "--url", url + end).exit_code == 0
    assert server.asked is not None and server.asked[1] == "/cluster"
    by_variable = CliRunner().invoke(app, ["status"], env={"EVERSERVE_URL": url + end, "EVERSERVE_API_KEY": ""})
    assert by_variable.exit_code == 0
    server.answer = {"rank": 3, "incarnation": 2, "pid": 99, "signal": "KILL"}
    assert invoke("kill", "3", "--url", url + end).exit_code == 0
    assert server.asked[1] == "/cluster/fault"


@pytest.mark.parametrize("url", ["", "ftp://here", ":8000", "http://", "here:port", "http://[::1"])
def test_what_is_no_url_is_one_line(url: str) -> None:
    assert "expected the address of a server" in str(failure("status", "--url", url))


def test_the_version() -> None:
    for arguments in (["--version"], ["version"]):
        result = invoke(*arguments)
        assert (result.exit_code, result.output) == (0, f"{__version__}\n")


def test_status_of_an_instance_that_is_not_valid(server: ScriptedServer) -> None:
    server.answer = {**CLUSTER, "violations": ["no attention worker is ready"]}
    result = invoke("status", "--url", server.url)
    assert result.exit_code == 1
    assert "NOT VALID" in result.output and "violated: no attention worker is ready" in result.output
    result = invoke("status", "--url", server.url, "--json")
    assert result.exit_code == 1 and json.loads(result.output) == server.answer


def test_kill_says_who_got_it(server: ScriptedServer) -> None:
    server.answer = {"rank": 3, "incarnation": 2, "pid": 99, "signal": "STOP"}
    result = invoke("kill", "3", "--signal", "stop", "--url", server.url)
    assert result.exit_code == 0, result.output
    assert result.output == "sent SIGSTOP to rank 3 (incarnation 2, pid 99)\n"
    assert server.asked == ("POST", "/cluster/fault", {"rank": 3, "signal": "STOP"}, None)
    invoke("kill", "3", "--url", server.url)
    assert server.asked[2] == {"rank": 3, "signal": "KILL"}


def test_what_changes_the_cluster_is_asked_with_the_admin_key(server: ScriptedServer) -> None:
    server.answer = {"rank": 3, "incarnation": 2, "pid": 99, "signal": "KILL"}
    keys = {"EVERSERVE_API_KEY": "client other", "EVERSERVE_ADMIN_KEY": "operator"}
    for arguments in (["kill", "3"], ["kill", "anchor"], ["drain", "3", "--wait", "0"]):
        for flags, environment, sent in (
            (["--admin-key", "a", "--api-key", "k"], {}, "Bearer a"),
            (["--admin-key", "a"], {}, "Bearer a"),
            ([], keys, "Bearer operator"),
            (["--api-key", "k"], {}, "Bearer k"),
            ([], {}, None),
        ):
            assert invoke(*arguments, *flags, "--url", server.url, **environment).exit_code == 0
            assert server.asked is not None and server.asked[3] == sent
    server.answer = CLUSTER
    invoke("status", "--url", server.url, **keys)
    assert server.asked[3] == "Bearer client"


def test_scale_waits_until_there_are_the_workers_asked_for(server: ScriptedServer) -> None:
    goal = {"attention": 1, "expert": 1, "devices": 2, "added": [1], "retired": [2, 3]}
    server.answer = {**goal, **CLUSTER, "workers": [WORKER, {**EXPERT, "state": "ready"}]}
    result = invoke("scale", "--attention", "1", "--expert", "1", "--url", server.url)
    first, last = result.output.splitlines()
    assert first == "1 attention worker and 1 expert worker on 2 devices; new: rank 1, leaving: ranks 2, 3"
    assert last.startswith("done after")
    server.answer = {**goal, **CLUSTER}
    late = str(failure("scale", "--attention", "1", "--timeout", "1", "--url", server.url))
    assert "not done after 1 s" in late
    assert (
        "1 attention worker ready; rank 1 is starting"
        in invoke("scale", "--expert", "1", "--timeout", "1", "--url", server.url).output
    )
    server.answer = {**goal, "devices": 4}
    assert invoke("scale", "--devices", "4", "--no-wait", "--url", server.url).exit_code == 0
    assert server.asked == ("POST", "/cluster/scale", {"devices": 4}, None)
    assert "or --devices" in str(failure("scale", "--url", server.url))
    assert "or --devices" in str(failure("scale", "--devices", "2", "--expert", "1", "--url", server.url))
    server.status, server.answer = 409, {"error": {"message": "Not scaled: no room.", "type": ""}}
    assert "Not scaled: no room." in str(failure("scale", "--expert", "9", "--url", server.url))


def test_switch_waits_until_the_worker_has_its_role(server: ScriptedServer) -> None:
    server.answer = {**CLUSTER, "workers": [WORKER, {**EXPERT, "state": "ready"}]}
    result = invoke("switch", "1", "--role", "expert", "--url", server.url)
    first, last = result.output.splitlines()
    assert first == "rank 1 becomes an expert worker" and last.startswith("done after")
    late = failure("switch", "0", "--role", "expert", "--timeout", "1", "--url", server.url)
    assert "not done after 1 s" in str(late)
    assert invoke("switch", "0", "--role", "expert", "--no-wait", "--url", server.url).exit_code == 0
    assert server.asked == ("POST", "/cluster/switch", {"rank": 0, "role": "expert"}, None)
    server.status, server.answer = 409, {"error": {"message": "Not switched: it is the last one.", "type": ""}}
    assert "it is the last one" in str(failure("switch", "0", "--role", "expert", "--url", server.url))


def test_a_wrong_key_is_told_that_it_is_wrong(server: ScriptedServer) -> None:
    server.status, server.answer = 401, {"error": {"message": "", "type": "", "param": "", "code": ""}}
    for arguments in (["status"], ["kill", "0"], ["drain", "0"]):
        assert "wants an API key" in str(failure(*arguments, "--url", server.url))
        wrong = str(failure(*arguments, "--url", server.url, "--api-key", "k"))
        assert "this API key is wrong" in wrong and "wants" not in wrong
    assert "--admin-key" in str(failure("kill", "0", "--url", server.url))


def test_what_goes_wrong_is_one_line(server: ScriptedServer) -> None:
    server.status = 403
    server.answer = {"error": {"message": "start the server with --enable-chaos", "type": "", "param": "", "code": ""}}
    assert "--enable-chaos" in str(failure("kill", "0", "--url", server.url))
    server.status = 401
    assert "--api-key" in str(failure("kill", "0", "--url", server.url))
    server.status, server.answer = 404, ["somebody else"]
    assert "404" in str(failure("status", "--url", server.url))
    assert "KILL, STOP" in str(failure("kill", "0", "--signal", "USR1", "--url", server.url))
    assert "is the server running" in str(failure("kill", "0", "--url", "http://127.0.0.1:1"))


def failure(*arguments: str) -> BaseException:
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError), result.output
    return result.exception


# -- health --------------------------------------------------------------------------------------


def test_health_shows_every_device(server: ScriptedServer) -> None:
    server.answer = CLUSTER | {"devices": DEVICES}
    result = invoke("health", "--url", server.url)
    assert result.exit_code == 0 and server.asked is not None and server.asked[:2] == ("GET", "/cluster")
    first, second = result.output.splitlines()
    assert "level 0: healthy" in first
    assert all(words in second for words in ("device 1", "down", "level 3: drained", "a fan", "is used on: …"))
    assert "device 1: health level 3 (a fan)" in invoke("status", "--url", server.url).output


def test_health_says_it_with_the_admin_key(server: ScriptedServer) -> None:
    server.answer = {"device": 1, "level": 3, "reason": "a fan", "done": "it is drained"}
    result = invoke("health", "1", "3", "--reason", "a fan", "--url", server.url, EVERSERVE_ADMIN_KEY="a")
    assert result.exit_code == 0 and result.output == "it is drained\n"
    assert server.asked == ("POST", "/cluster/health", {"device": 1, "level": 3, "reason": "a fan"}, "Bearer a")


@pytest.mark.parametrize("arguments", [("1",), ("1", "7"), ("-1", "3"), ("1", "three")])
def test_health_that_makes_no_sense(server: ScriptedServer, arguments: tuple[str, ...]) -> None:
    result = invoke("health", *arguments, "--url", server.url)
    assert (result.exit_code == 2 or isinstance(result.exception, ConfigError)) and server.asked is None
