"""TLS by nginx in front of a gateway, with the configuration in deploy/nginx. The test is the worker behind it."""

import contextlib
import queue
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from everserve.wire.messages import Cancel, Submit
from tests.serving.test_gateway_process import TIMEOUT_S, GatewayUnderTest, expect, send_tokens
from tests.support.cluster import wait_until

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "everserve.conf"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "return_token_ids": True, "ignore_eos": True}

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None or shutil.which("openssl") is None, reason="nginx and openssl are not installed"
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(directory / "everserve.key"), "-out", str(directory / "everserve.crt")]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *key, *names, *files], check=True, capture_output=True)
    return directory / "everserve.crt"


@pytest.fixture
def gateway(tmp_path) -> Iterator[GatewayUnderTest]:
    running = GatewayUnderTest(tmp_path / "events")
    yield running
    running.http.close()
    running.process.kill()
    running.process.wait()


@pytest.fixture
def proxied(gateway, certificate, tmp_path) -> Iterator[httpx.Client]:
    """A client of the proxy."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    site = CONFIG.read_text()
    for ours, tried in (
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("server 127.0.0.1:8000;", f"server {gateway.url.removeprefix('http://')};"),
        ("/etc/nginx/tls/", f"{certificate.parent}/"),
    ):
        assert ours in site
        site = site.replace(ours, tried)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {tmp_path / kind};\n" for kind in kinds)
    http = f"access_log off;\n{paths}{site}"
    config = tmp_path / "nginx.conf"
    config.write_text(f"pid {tmp_path / 'pid'};\nevents {{}}\nhttp {{\n{http}\n}}\n")
    command = ["nginx", "-p", str(tmp_path), "-c", str(config), "-e", "stderr"]
    with subprocess.Popen([*command, "-g", "daemon off; master_process off;"], stderr=subprocess.PIPE) as nginx:
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trust, timeout=TIMEOUT_S) as client:
            wait_until(lambda: nginx.poll() is not None or _answers(client), what="nginx")
            assert nginx.poll() is None, nginx.stderr.read()
            yield client
        nginx.terminate()


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return client.get("/livez").status_code == 200
    return False


class Reading:
    """A stream that is read as it comes, on a thread."""

    def __init__(self, client: httpx.Client, **headers: str) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self._is_enough = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, headers))
        self._thread.start()

    def _read(self, client: httpx.Client, headers: dict[str, str]) -> None:
        with client.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith(("id: ", "data: ")):
                    self.lines.put(line)
                if self._is_enough.is_set():
                    return

    def next(self, beginning: str) -> str:
        """The next line that begins so."""
        while not (line := self.lines.get(timeout=TIMEOUT_S)).startswith(beginning):
            pass
        return line.removeprefix(beginning)

    def leave(self) -> None:
        """With the next line."""
        self._is_enough.set()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def test_tokens_pass_as_they_come_and_clients_come_back(gateway: GatewayUnderTest, proxied: httpx.Client) -> None:
    gateway.publish()
    worker = gateway.attach(1)
    gateway.until("/health", lambda answer: answer.status_code == 200)
    assert proxied.get("/readyz").status_code == 200 and proxied.get("/metrics").status_code == 404
    refused = proxied.get("/v1/models", headers={"Host": "elsewhere.example.org"})
    assert refused.status_code == 403 and "--allowed-hosts" in refused.text

    first = Reading(proxied, **{"X-Request-Id": "mine"})
    submit = expect(worker, Submit)
    assert isinstance(submit, Submit)
    send_tokens(worker, submit.spec.id, {0: 10})
    assert "10" in first.next("data: "), "nothing is held back: there is no second token yet"
    first.leave()
    send_tokens(worker, submit.spec.id, {1: 11})
    first.join()
    assert expect(worker, Cancel) == Cancel(id=submit.spec.id), "the proxy has told that the client is gone"

    second = Reading(proxied, **{"X-Request-Id": "mine", "Last-Event-ID": "0"})
    again = expect(worker, Submit)
    assert isinstance(again, Submit) and list(again.spec.known) == [10, 11]
    send_tokens(worker, again.spec.id, {2: 12, 3: 13}, last=3)
    seen = [second.next("data: ") for _ in range(3)]
    for line, token in zip(seen, (11, 12, 13), strict=True):
        assert f'"token_ids":[{token}]' in line
    second.join()
    worker.close()


def test_an_instance_that_heals_itself_is_alive(gateway: GatewayUnderTest, proxied: httpx.Client) -> None:
    worker = gateway.attach(1)
    gateway.publish("expert 3 of layer 1 has no place")
    gateway.until("/cluster", lambda answer: bool(answer.json()["violations"]))
    assert proxied.get("/livez").status_code == 200
    unready = proxied.get("/readyz")
    assert unready.status_code == 503 and "has no place" in unready.text and "retry-after" in unready.headers
    worker.close()
