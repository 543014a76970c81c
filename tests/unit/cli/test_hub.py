"""Names of the hub: from its library's cache, or downloaded by the library from a hub on this machine."""

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from everserve.cli.hub import is_beside_weights, is_name
from everserve.cli.model_files import resolve_model
from everserve.errors import ConfigError, UserError
from everserve.model.bundled import DEMO_MODEL
from everserve.procs.launching import ENVIRONMENT
from tests.support.models import model_directory

NAME, COMMIT = "Someone/Tiny-1.5", "0123456789abcdef0123456789abcdef01234567"
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        *((name, True) for name in (NAME, "Qwen/Qwen3-0.6B", "a/b")),
        *((path, False) for path in ("demo", "./models/a", "/a/b", "../a", "a/b/c", "~/a", "a/", "a/.", "a b/c", "")),
    ],
)
def test_which_arguments_are_names(model: str, is_one: bool) -> None:
    assert is_name(model) == is_one


def test_which_files_are_needed_beside_weights() -> None:
    needed = [*NEEDED, "tokenizer.model", "merges.txt", "chat_template.jinja", "additional_chat_templates/rag.jinja"]
    others = ["README.md", "original/tokenizer.model", "pytorch_model.bin", "consolidated.safetensors", "a.gguf"]
    assert [name for name in (*needed, *others) if is_beside_weights(name)] == needed


# the cache


def keep(cache: Path, files: dict[str, Path], revision: str = "main") -> Path:
    """As the library leaves them: contents by their hash, and links to them in the snapshot of a commit."""
    root = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(COMMIT)
    for name, file in files.items():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def files_of_tiny(**options: str) -> dict[str, Path]:
    """A tiny model with the bundled model's tokenizer."""
    files = {file.name: file for file in model_directory("qwen3", **options).iterdir()}
    return files | {name: DEMO_MODEL / name for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and no hub."""
    from huggingface_hub import constants  # noqa: PLC0415  as in the product: only here

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"])
def test_what_is_complete_in_the_cache_needs_no_hub(cache: Path, shard_size: str) -> None:
    snapshot = keep(cache, files_of_tiny(shard_size=shard_size))
    assert resolve_model(NAME) == snapshot
    assert resolve_model(NAME, "main") == snapshot
    assert resolve_model(NAME, COMMIT) == snapshot
    with pytest.raises(ConfigError, match=f"hf download {NAME} --revision v2`"):
        resolve_model(NAME, "v2")


@pytest.mark.parametrize("missing", ["everything", "config.json", "model-00002", "index", "tokenizer.json"])
def test_what_is_not_is_one_line_that_says_how_to_fetch_it(cache: Path, missing: str) -> None:
    files = files_of_tiny(shard_size="50KB")
    if missing != "everything":
        kept = {name: file for name, file in files.items() if missing not in name}
        assert len(kept) < len(files)
        keep(cache, kept)
    with pytest.raises(ConfigError) as caught:
        resolve_model(NAME)
    assert str(caught.value) == (
        f"{NAME} is not a directory, is not complete in {cache}, and HF_HUB_OFFLINE is set: fetch it with"
        f" `hf download {NAME}` where there is a network, and bring that cache here"
    )


def test_a_directory_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose path could be a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert resolve_model(NAME) == tmp_path / NAME
    with pytest.raises(ConfigError, match="--revision v2 is for names of the hub"):
        resolve_model(NAME, "v2")


def test_a_directory_waits_for_no_library() -> None:
    """Every start would: importing the hub's takes a second, torch three."""
    program = """
import sys
from everserve.cli import serve
from everserve.cli.model_files import check_model, resolve_model
from everserve.config.model import ModelSource
check_model(ModelSource(directory=str(resolve_model("demo"))))
sys.exit(str({"huggingface_hub", "tokenizers", "torch", "transformers"} & sys.modules.keys() or ""))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, check=False)
    assert done.stderr.strip() == b""


# a hub


class Hub(http.server.ThreadingHTTPServer):
    """The part of the hub's API that downloads use, for one repository."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], token: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.token = files, token
        self.fetched: set[str] = set()
        self.holds_back = ""  # a file whose end never comes
        self.is_begun = threading.Event()  # that file
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        path, files = unquote(urlsplit(self.path).path), self.server.files
        resolved = f"/{NAME}/resolve/{COMMIT}/"
        if self.server.token is not None and self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            found = [{"rfilename": name, "size": len(content), "blobId": "0"} for name, content in files.items()]
            self._send_json({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": found, "tags": []})
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            kinds = {"type": "file", "oid": "0"}
            self._send_json([{**kinds, "path": name, "size": len(content)} for name, content in files.items()])
        elif path.startswith(resolved) and path.removeprefix(resolved) in files:
            self._send_file(path.removeprefix(resolved))
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        content, end = self.server.files[name], len(self.server.files[name])
        if self.command == "GET":
            self.server.fetched.add(name)
            if name == self.server.holds_back:
                end //= 2
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, end)
        if end < len(content):
            self.server.is_begun.set()
            self.rfile.read()  # until the client is gone

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], end: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:end])
            self.wfile.flush()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One that can be reached."""
    from huggingface_hub import constants  # noqa: PLC0415

    files = {name: file.read_bytes() for name, file in files_of_tiny(shard_size="50KB").items()}
    others = ("README.md", "consolidated.safetensors", "original/tokenizer.model", "pytorch_model.bin")
    with Hub({**files, **dict.fromkeys(others, b"other")}, token="secret") as found:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found
        found.shutdown()


def test_a_download_brings_what_is_needed_and_what_came_is_served_without_the_hub(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "everserve")
    directory = resolve_model(NAME, token="secret")
    assert directory.name == COMMIT and directory.is_relative_to(cache)
    needed = {name for name in hub.files if name in NEEDED or name.startswith("model")}
    assert {file.name for file in directory.iterdir()} == needed == hub.fetched
    assert all((directory / name).read_bytes() == hub.files[name] for name in needed)
    (told,) = [record.message for record in caplog.records if record.name.startswith("everserve")]
    assert told.startswith(f"downloads {NAME} (") and str(cache) in told

    hub.fetched.clear()
    assert resolve_model(NAME, token="another") == directory, "the hub is not asked"
    weights = next(name for name in needed if name.startswith("model-"))
    for name in (weights, "tokenizer.json"):
        (directory / name).resolve().unlink()
    assert resolve_model(NAME, token="secret") == directory
    assert (directory / weights).is_file() and hub.fetched == {weights, "tokenizer.json"}


def refused(cache: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None = None, token: str = "secret") -> str:
    """By a cache that nothing is in yet."""
    from huggingface_hub import constants  # noqa: PLC0415

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with pytest.raises(UserError) as caught:
        resolve_model(NAME, revision, token)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_cannot_be_had_or_served_is_one_line_before_the_weights_come(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog
) -> None:
    caplog.set_level("INFO", "everserve")
    assert "is gated: accept its conditions" in refused(tmp_path / "1", monkeypatch, token="another")
    assert f"{NAME} has no revision v2" in refused(tmp_path / "2", monkeypatch, "v2")
    config = json.loads(hub.files["config.json"])
    hub.files["config.json"] = json.dumps({**config, "architectures": ["Qwen3NextForCausalLM"]}).encode()
    assert "needs recurrent layers" in refused(tmp_path / "3", monkeypatch)
    hub.files["config.json"] = json.dumps(config).encode()
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    for name in [name for name in hub.files if name.startswith("model")]:
        del hub.files[name]
    assert "has no safetensors files on the hub" in refused(tmp_path / "4", monkeypatch)
    hub.shutdown()
    hub.server_close()
    assert f"fetch it with `hf download {NAME}`" in refused(tmp_path / "5", monkeypatch)
    assert capsys.readouterr().err == "" and not [one for one in caplog.records if one.name.startswith("everserve")]


_PROGRAM = "import sys; from everserve.cli.model_files import resolve_model; resolve_model(sys.argv[1], token='secret')"


def test_an_interrupted_download_ends_at_once(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own, which the library tells what to do when it is imported."""
    hub.holds_back = next(name for name in hub.files if name.startswith("model-"))
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | ENVIRONMENT
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PROGRAM, NAME]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            assert hub.is_begun.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT
        finally:
            process.kill()
