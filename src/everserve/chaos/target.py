"""The server from outside: what it says of itself, and whether its processes can be reached directly."""

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from everserve.chaos.schedule import PROCESSES, Device, Seats, Victim
from everserve.client import Broken, Connection, key_headers, unauthorized
from everserve.errors import ConfigError, EverserveError
from everserve.procs import process

_ANSWER_S = 30.0
_NO_RANK = (1 << 31) - 1  # a rank that no server has


class Reply(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise NoAnswer(f"not JSON: {self.body[:80]!r}") from error


class NoAnswer(EverserveError):
    """The server could not be reached, or said nothing for too long."""


class Process(NamedTuple):
    """A process that can get a signal."""

    pid: int
    rank: int | None  # of a worker
    incarnation: int


class View:
    """What /cluster said at one moment."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.workers: list[dict[str, Any]] = sorted(data["workers"], key=lambda worker: int(worker["rank"]))

    @property
    def seats(self) -> Seats:
        names = {process["name"] for process in self.data["processes"]}
        return Seats(
            num_attention=len(self._of_role("attention")),
            num_expert=len(self._of_role("expert")),
            processes=tuple(name for name in PROCESSES if name in names),
            devices=self._devices(),
        )

    @property
    def roles(self) -> dict[str, int]:
        """How many workers have each role."""
        return {role: len(self._of_role(role)) for role in ("attention", "expert")}

    @property
    def is_whole(self) -> bool:
        """Every rank has a ready worker, every expert has all its places, and there is an orchestrator."""
        ready = all(worker["state"] == "ready" for worker in self.workers)
        return bool(self.workers) and ready and not self.data["violations"] and not self.data["degraded"]

    @property
    def has_all_spares(self) -> bool:
        spares = self.data.get("spares", {"ready": 0, "wanted": 0})
        return bool(spares["ready"] >= spares["wanted"])

    @property
    def busy(self) -> list[str]:
        """Attention workers that still have something of a request."""
        return [
            f"attention worker {worker['rank']}: {worker['requests']} requests, {worker['running']} running, "
            f"{worker['waiting']} waiting, KV usage {worker['kv_cache_usage']:.4f}"
            for worker in self._of_role("attention")
            if worker["requests"] or worker["running"] or worker["waiting"] or worker["kv_cache_usage"]
        ]

    @property
    def pids(self) -> dict[str, int]:
        """The pids of all processes, by name; of workers, by role and number: a rank may have another role after
        scaling.
        """
        found = {process["name"]: int(process["pid"]) for process in self.data["processes"]}
        for role in ("attention", "expert"):
            workers = enumerate(self._of_role(role))
            found |= {f"{role} worker {i}": int(worker["pid"]) for i, worker in workers if worker["pid"]}
        return found

    @property
    def devices_away(self) -> set[int]:
        """Those that are gone, and those whose workers all start again."""
        return {device["device"] for device in self.data.get("devices", ()) if device["state"] != "serving"}

    def find(self, victim: Victim) -> Process | None:
        """The victim's process now, as far as the gateway knows."""
        if victim.name in PROCESSES:
            pids = [process["pid"] for process in self.data["processes"] if process["name"] == victim.name]
            return Process(pids[0], None, 0) if pids else None
        workers = self._of_role(victim.name)
        if victim.number >= len(workers):
            return None  # it has retired
        worker = workers[victim.number]
        return Process(worker["pid"], worker["rank"], worker["incarnation"]) if worker["pid"] else None

    def _devices(self) -> tuple[Device, ...]:
        found = []
        for device in self.data.get("devices", ()):
            num_of = {
                role: sum(worker["rank"] in device["workers"] for worker in self._of_role(role))
                for role in ("attention", "expert")
            }
            found.append(Device(device["device"], num_of["attention"], num_of["expert"]))
        return tuple(found)

    def _of_role(self, role: str) -> list[dict[str, Any]]:
        """Seats with both roles count as attention seats."""
        return [worker for worker in self.workers if role == worker["roles"][0]]


class Target:
    """A server with --enable-chaos."""

    def __init__(self, url: str, api_key: str | None = None, admin_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.headers: Mapping[str, str] = key_headers(api_key, admin_key)
        self._admin_headers = key_headers(admin_key, api_key)

    async def ask(self, method: str, path: str, body: object = None, timeout_s: float = _ANSWER_S) -> Reply:
        """One exchange, whatever its status; NoAnswer if there is none in time."""
        is_administration = method == "POST" and path.startswith("/cluster/")
        headers = self._admin_headers if is_administration else self.headers
        try:
            async with asyncio.timeout(timeout_s):
                connection = await Connection.open(self.url, method, path, body, headers)
                try:
                    return Reply(await connection.read_head(), await connection.read_body())
                finally:
                    connection.close()
        except (OSError, Broken) as error:  # TimeoutError is an OSError
            raise NoAnswer(f"{method} {path}: no answer from {self.url} ({error or 'in time'})") from error

    async def get(self, path: str) -> Any:
        reply = await self.ask("GET", path)
        if reply.status == 401:
            raise ConfigError(unauthorized(self.url, self.headers))
        if reply.status != 200:
            raise NoAnswer(f"GET {path}: {self.url} answered {reply.status}")
        return reply.json()

    async def view(self) -> View:
        return View(await self.get("/cluster"))

    async def metrics(self) -> dict[str, float]:
        """The sum over all labels, by name."""
        values: dict[str, float] = {}
        for line in (await self.ask("GET", "/metrics")).body.decode().splitlines():
            if line and not line.startswith("#"):
                name = line.partition("{")[0].split()[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    async def check_chaos(self) -> None:
        """An error unless the server allows faults. Asks for a fault at a rank that does not exist."""
        try:
            reply = await self.ask("POST", "/cluster/fault", {"rank": _NO_RANK, "signal": "CONT"}, timeout_s=15.0)
        except NoAnswer as error:
            raise ConfigError(f"{error}: is the server running? see --url") from error
        if reply.status == 401:
            raise ConfigError(unauthorized(self.url, self._admin_headers, "--admin-key, --api-key"))
        if reply.status == 403:
            raise ConfigError(f"{self.url} does not allow faults: {_message(reply)}")
        if reply.status != 404:
            raise ConfigError(
                f"{self.url} answered {reply.status} to a test of /cluster/fault: is that an Everserve server?"
            )

    async def model(self) -> tuple[str, int]:
        """Its name, and its longest context."""
        first = (await self.get("/v1/models"))["data"][0]
        return str(first["id"]), int(first["max_model_len"])

    async def can(self, path: str, body: dict[str, Any]) -> bool:
        """Whether the server does this."""
        return (await self.ask("POST", path, body)).status == 200

    async def tokenize(self, model: str, text: str) -> list[int]:
        reply = await self.ask("POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        if reply.status != 200:
            raise NoAnswer(f"POST /tokenize: {self.url} answered {reply.status}")
        ids: list[int] = reply.json()["tokens"]
        return ids


def _message(reply: Reply) -> str:
    """What an error's body says, if it is one of ours."""
    match reply.json():
        case {"error": {"message": str(message)}}:
            return message
    return "start it with --enable-chaos"


def root_here(view: View) -> int | None:
    """The pid of root, if the server's processes are on this host: its children, and ours to signal."""
    pids = view.pids
    root = pids.pop("root", 0)
    if not root or not pids or not set(pids.values()) <= _near(root, pids.get("keeper", 0)):
        return None
    try:
        os.kill(root, 0)
    except OSError:
        return None  # not ours to signal
    return root


def _near(root: int, keeper: int) -> set[int]:
    """The children of root, and the gateway, which is the keeper's."""
    return {*process.children_of(root), *(process.children_of(keeper) if keeper else ())}
