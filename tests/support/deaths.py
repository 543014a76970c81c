"""A server whose gateway dies again and again, and clients of many kinds that know what their answers must be.

What may differ is what is random or timed: ids, the time, and how many tokens of the prompt were in the cache.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from everserve.procs.local_server import LocalServer
from everserve.procs.process import children_of
from tests.support.cluster import wait_until
from tests.support.raw_client import TIMEOUT_S, Answer, RawClient, post

PROMPTS = ("It was a cold evening in November when", "The sea was", "On the morning of the second day she")
CHAT = [{"role": "user", "content": "Tell me of the old house by the river."}]


def _requests() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, each of which has one answer."""
    found: list[tuple[str, dict[str, Any]]] = []
    for seed, (is_stream, options) in enumerate(
        itertools.product(
            (True, False),
            (
                {"max_tokens": 150},
                {"max_tokens": 40, "n": 3},
                {"max_tokens": 60, "logprobs": 2},
                {"max_tokens": 90, "stop": [" and ", "ing the"], "include_stop_str_in_output": True},
                {"max_tokens": 1},
            ),
        )
    ):
        body = {"model": "demo", "seed": seed, "temperature": 1.0, "ignore_eos": True, "stream": is_stream, **options}
        if is_stream and seed % 2:
            body["stream_options"] = {"include_usage": True}
        found.append(("/v1/completions", {**body, "prompt": PROMPTS[seed % 3]}))
        if "logprobs" in options:
            body |= {"logprobs": True, "top_logprobs": 2}
        found.append(("/v1/chat/completions", {**body, "messages": CHAT}))
    found.append(("/v1/completions", {"model": "no such model", "prompt": "x"}))
    found.append(("/v1/completions", {"model": "demo", "prompt": "x " * 3000, "max_tokens": 2, "seed": 1}))
    return found


REQUESTS = _requests()
FETCH = Path(__file__).with_name("fetch.mjs")


class Deaths:
    """A server whose gateway is killed, and clients that compare what they get."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        parts = urlsplit(server.url)
        self.address = (str(parts.hostname), int(parts.port or 0))
        self.num_deaths = 0
        self.are_keepers = False  # that are killed
        self.takes_others = 0.0  # how often another process dies in the same moment
        self.others: Counter[str] = Counter()
        self.is_over = threading.Event()
        self.errors: list[str] = []
        self.right: Counter[str] = Counter()
        self.known: list[Any] = []

    def begin_again(self) -> None:
        """For another test with the same server."""
        self.num_deaths = 0
        self.is_over.clear()
        self.known.clear()
        self.right.clear()

    def gateway(self) -> int | None:
        """Nothing while there is none, or it has no keeper."""
        keeper = self.keeper()
        return next(iter(children_of(keeper)), None) if keeper is not None else None

    def keeper(self) -> int | None:
        """The one that has a gateway."""
        return next((pid for pid in self.keepers() if children_of(pid)), None)

    def keepers(self) -> list[int]:
        return [pid for pid in children_of(self.root) if name_of(pid) == "es-keeper"]

    @property
    def root(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    async def learn(self) -> None:
        """What the answers are while nothing happens."""
        client = await RawClient.connect(self.address, random.Random(0))
        for path, body in REQUESTS:
            await client.send([post(path, body)])
            self.known.append((await client.receive()).normal())
        await client.close()

    def kill(self, num: int, rng: random.Random, longest_s: float) -> None:
        """So many gateways, each at a random moment of its life, after it has answered."""
        until = self.num_deaths + num
        while self.num_deaths < until:
            before = self.num_right
            wait_until(lambda before=before: self.num_right > before or self.errors, timeout_s=TIMEOUT_S)
            if self.errors:
                return
            time.sleep(rng.random() * longest_s)
            gateway = self.gateway()
            pid = self.keeper() if self.are_keepers else gateway
            if pid is not None and gateway is not None:
                if rng.random() < self.takes_others:
                    self._kill_other(rng)
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda gateway=gateway: self.gateway() not in (gateway, None), timeout_s=60)
                self.num_deaths += 1

    def _kill_other(self, rng: random.Random) -> None:
        """A worker, the supervisor, the orchestrator, the anchor or the zygote: any child of root but keepers."""
        keepers = self.keepers()
        by_name = {name_of(pid): pid for pid in children_of(self.root) if pid not in keepers}
        name = rng.choice(sorted(by_name))
        with suppress(ProcessLookupError):
            os.kill(by_name[name], signal.SIGKILL)
            self.others[name.partition("-")[2].rstrip("-.0123456789")] += 1

    @property
    def num_right(self) -> int:
        """Answers: what a client that has said its last word hears is none."""
        return sum(self.right.values()) - self.right["half-closed"]

    def check(self, kind: str, which: int, answer: Any) -> None:
        if answer != self.known[which]:
            self.errors.append(f"{kind} {REQUESTS[which]}: {_difference(answer, self.known[which])}")
        self.right[kind] += 1

    async def raw(self, seed: int) -> None:
        """Keep-alive, pipelining, bodies in pieces and in chunks, slow reading."""
        rng = random.Random(seed)
        while not self.is_over.is_set():
            client = await RawClient.connect(self.address, rng, is_slow=seed % 4 == 0)
            for _ in range(rng.randint(1, 5)):
                asked = [rng.randrange(len(REQUESTS)) for _ in range(rng.choice((1, 1, 1, 3)))]
                pieces = [post(*REQUESTS[which], chunked=rng.random() < 0.3) for which in asked]
                await client.send(pieces, num_cuts=rng.choice((0, 0, 2)))
                for which in asked:
                    self.check("raw", which, (await client.receive()).normal())
                if self.is_over.is_set():
                    break
            await client.close()

    def run_raw(self, num: int) -> None:
        async def run() -> None:
            await asyncio.gather(*(self.raw(seed) for seed in range(num)))

        self._guard("raw", lambda: asyncio.run(run()))

    async def returning(self, seed: int) -> None:
        """Breaks off its connection again and again, and comes back for the rest."""
        rng = random.Random(4000 + seed)
        streams = [which for which, (_, body) in enumerate(REQUESTS) if body.get("stream")]
        for number in itertools.count():
            which = rng.choice(streams)
            body, headers = b"", {"X_Request_Id": f"returning-{seed}-{number}"}
            while not body.endswith(b"data: [DONE]\n\n"):
                client = await RawClient.connect(self.address, rng)
                await client.send([post(*REQUESTS[which], **headers)])
                body += await client.receive_events(rng.randint(1, 40))
                client.abort()
                body = body[: body.rfind(b"\n\n") + 2]
                headers["Last_Event_Id"] = str(body.count(b"\n\n") - 1)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.1)
            self.check("returning", which, Answer(200, {"content-type": "text/event-stream"}, body).normal())
            if self.is_over.is_set():
                return

    def run_returning(self, num: int) -> None:
        async def run() -> None:
            await asyncio.gather(*(self.returning(seed) for seed in range(num)))

        self._guard("returning", lambda: asyncio.run(run()))

    def run_httpx(self, seed: int) -> None:
        rng = random.Random(1000 + seed)

        def run() -> None:
            with httpx.Client(base_url=self.server.url, timeout=TIMEOUT_S) as client:
                while not self.is_over.is_set():
                    which = rng.randrange(len(REQUESTS))
                    path, body = REQUESTS[which]
                    done = client.post(path, json=body)
                    self.check("httpx", which, Answer(done.status_code, dict(done.headers), done.content).normal())

        self._guard("httpx", run)

    def run_openai(self, seed: int) -> None:
        """Whose own objects are compared, as far as they are about text."""
        rng = random.Random(2000 + seed)

        def run() -> None:
            with openai.OpenAI(
                base_url=f"{self.server.url}/v1", api_key="x", max_retries=0, timeout=TIMEOUT_S
            ) as client:
                while not self.is_over.is_set():
                    which = rng.randrange(10)
                    path, body = REQUESTS[2 * which]
                    assert path == "/v1/completions"
                    extra = {name: body[name] for name in ("ignore_eos", "include_stop_str_in_output") if name in body}
                    plain = {name: value for name, value in body.items() if name not in extra}
                    texts: dict[int, str] = {}
                    answer = client.completions.create(**plain, extra_body=extra)
                    for part in answer if body["stream"] else [answer]:
                        for choice in part.choices:
                            texts[choice.index] = texts.get(choice.index, "") + choice.text
                    self.check("openai", 2 * which, self._with_texts(2 * which, texts))

        self._guard("openai", run)

    def run_openai_chat(self, seed: int) -> None:
        """The same of chats."""
        rng = random.Random(5000 + seed)

        def run() -> None:
            with openai.OpenAI(
                base_url=f"{self.server.url}/v1", api_key="x", max_retries=0, timeout=TIMEOUT_S
            ) as client:
                while not self.is_over.is_set():
                    which = 2 * rng.randrange(10) + 1
                    path, body = REQUESTS[which]
                    assert path == "/v1/chat/completions"
                    extra = {name: body[name] for name in ("ignore_eos", "include_stop_str_in_output") if name in body}
                    plain = {name: value for name, value in body.items() if name not in extra}
                    texts: dict[int, str] = {}
                    answer = client.chat.completions.create(**plain, extra_body=extra)
                    for part in answer if body["stream"] else [answer]:
                        for choice in part.choices:
                            said = (choice.delta if body["stream"] else choice.message).content or ""
                            texts[choice.index] = texts.get(choice.index, "") + said
                    self.check("openai chat", which, self._with_texts(which, texts))

        self._guard("openai chat", run)

    def run_aiohttp(self, seed: int) -> None:
        rng = random.Random(6000 + seed)

        async def ask() -> None:
            aiohttp = import_module("aiohttp")
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as client:
                while not self.is_over.is_set():
                    which = rng.randrange(len(REQUESTS))
                    path, body = REQUESTS[which]
                    async with client.post(f"{self.server.url}{path}", json=body) as done:
                        headers = {name.lower(): value for name, value in done.headers.items()}
                        self.check("aiohttp", which, Answer(done.status, headers, await done.read()).normal())

        self._guard("aiohttp", lambda: asyncio.run(ask()))

    def run_node(self, seed: int) -> None:
        rng = random.Random(7000 + seed)

        def run() -> None:
            command = ["node", str(FETCH), self.server.url]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
                assert node.stdin is not None and node.stdout is not None
                while not self.is_over.is_set():
                    which = rng.randrange(len(REQUESTS))
                    node.stdin.write(json.dumps(REQUESTS[which]) + "\n")
                    node.stdin.flush()
                    status, kind, text = json.loads(node.stdout.readline())
                    self.check("node", which, Answer(status, {"content-type": kind}, text.encode()).normal())
                node.stdin.close()

        self._guard("node", run)

    def run_half_closed(self, num: int) -> None:
        """Says its last word behind its request. Such a client has left; but what it had sent is what is answered: a
        successor that counts the last word as a byte would read another request."""

        async def ask(seed: int) -> None:
            rng = random.Random(8000 + seed)
            while not self.is_over.is_set():
                client = await RawClient.connect(self.address, rng)
                begun = await client.last_word(post(*REQUESTS[rng.randrange(20)]), num_cuts=rng.choice((0, 1)))
                assert b"HTTP/1.1 200 OK".startswith(begun[:15]), begun[:300]
                self.right["half-closed"] += 1
                await asyncio.sleep(rng.random())  # so that others get most of the time

        async def run() -> None:
            await asyncio.gather(*(ask(seed) for seed in range(num)))

        self._guard("half-closed", lambda: asyncio.run(run()))

    def _with_texts(self, which: int, texts: dict[int, str]) -> Any:
        """The known answer, if these are its texts."""
        _, known = self.known[which]
        if "choices" in known:
            said = {choice["index"]: _text_of(choice, "message") for choice in known["choices"]}
        else:
            said = {
                index: "".join(_text_of(event["choices"][0], "delta") for event in events)
                for index, events in known.items()
                if index != "end"
            }
        return self.known[which] if said == texts else texts

    def run_curl(self, seed: int) -> None:
        rng = random.Random(3000 + seed)

        def run() -> None:
            while not self.is_over.is_set():
                which = rng.randrange(len(REQUESTS) - 1)
                path, body = REQUESTS[which]
                command = [
                    "curl",
                    "-sS",
                    "-N",
                    "-i",
                    "-m",
                    str(TIMEOUT_S),
                    f"{self.server.url}{path}",
                    "--data-binary",
                    "@-",
                ]
                done = subprocess.run(
                    [*command, "-H", "Content-Type: application/json"],
                    input=json.dumps(body).encode(), capture_output=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                head, _, text = done.stdout.partition(b"\r\n\r\n")
                status_line, *lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                self.check("curl", which, Answer(int(status_line.split()[1]), headers, text).normal())

        self._guard("curl", run)

    def _guard(self, kind: str, run: Any) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    def run(self, num_deaths: int, num_raw: int = 20, longest_s: float = 0.3, seed: int = 0) -> None:
        """Clients of all kinds, while so many gateways die."""
        asyncio.run(self.learn())
        work: list[Any] = [lambda: self.run_raw(num_raw)]
        work += [lambda: self.run_returning(num_raw // 4)]
        work += [lambda: self.run_httpx(0), lambda: self.run_openai(0), lambda: self.run_openai_chat(0)]
        work += [lambda: self.run_half_closed(2)]
        if find_spec("aiohttp"):
            work.append(lambda: self.run_aiohttp(0))
        if shutil.which("curl"):
            work.append(lambda: self.run_curl(0))
        if shutil.which("node"):
            work.append(lambda: self.run_node(0))
        threads = [threading.Thread(target=run) for run in work]
        for thread in threads:
            thread.start()
        try:
            self.kill(num_deaths, random.Random(seed), longest_s)
        finally:
            self.is_over.set()
            for thread in threads:
                thread.join()
        assert not self.errors, self.errors[:3]
        assert self.num_deaths == num_deaths
        assert set(self.right) >= {"raw", "returning", "httpx", "openai", "openai chat", "half-closed"}, self.right


def _difference(answer: Any, known: Any) -> str:
    """The first event that is another one, and some around it."""
    if not isinstance(answer, tuple) or answer[0] != known[0] or "end" not in known[1]:
        return f"{answer} is not {known}"
    for index in known[1]:
        came, wanted = answer[1].get(index, []), known[1][index]
        for at in range(max(len(came), len(wanted))):
            if came[at : at + 1] != wanted[at : at + 1]:
                return f"choice {index}, event {at} of {len(wanted)}: {came[at : at + 3]} is not {wanted[at : at + 3]}"
    return f"{list(answer[1])} is not {list(known[1])}"


def _text_of(choice: dict[str, Any], field: str) -> str:
    """Of a completion or a chat."""
    return choice["text"] if "text" in choice else choice[field].get("content") or ""


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
