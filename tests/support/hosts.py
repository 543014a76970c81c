"""Hosts on one machine: each has its own network, pids and host name, as namespaces of the kernel, joined by a bridge.

SIGKILL of a host's first process ends all of its processes at once, and its kernel says so to the others. A power loss
is the link down first: then no other host hears of it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_TRIAL = f"es{os.getpid()}trial"


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid():
        return "hosts are namespaces, which only root can make"
    missing = [name for name in ("ip", "unshare", "nsenter", "openssl") if shutil.which(name) is None]
    if missing:
        return f"hosts are made with {' and '.join(missing)}"
    made = _ip("netns", "add", _TRIAL)
    _ip("netns", "del", _TRIAL)
    return "" if made.returncode == 0 else f"this system makes no namespaces: {made.stderr.decode().strip()}"


def _ip(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["ip", *arguments], capture_output=True, check=False)


class Host:
    """One machine. What runs there is one tree of processes, whose first is `first`."""

    def __init__(self, network: str, subnet: str, number: int, directory: Path) -> None:
        self.name = f"{network}{number}"
        self.address = f"{subnet}.{number + 1}"
        self.log = directory / f"{self.name}.log"
        self._network, self._number = network, number
        self._process: subprocess.Popen[bytes] | None = None
        for command in (
            f"netns add {self.name}",
            f"-n {self.name} link set lo up",
            f"-n {network} link add v{number} type veth peer name eth0 netns {self.name}",
            f"-n {network} link set v{number} master br0 up",
            f"-n {self.name} addr add {self.address}/24 dev eth0",
            f"-n {self.name} link set eth0 up",
        ):
            made = _ip(*command.split())
            assert made.returncode == 0, made.stderr.decode()

    def run(self, *command: str) -> None:
        """Begin this command there, as the first process of the host."""
        script = f'hostname {self.name}; exec "$@"'
        isolated = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount", "--mount-proc", "--uts"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *isolated, "sh", "-c", script, "_", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def first(self) -> int:
        """Its first process, as this machine numbers it. (`ip netns exec` becomes unshare, whose child it is.)"""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def pids(self, name: str) -> list[int]:
        """Processes of the host with this name, as this machine numbers them."""
        below, found = [self.first], []
        while below:
            pid = below.pop()
            with contextlib.suppress(OSError):
                below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(pid)
        return found

    def kill(self) -> None:
        """All its processes at once."""
        assert self._process is not None
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.first, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def cut(self) -> None:
        """Nothing leaves it, and nothing comes."""
        assert _ip("-n", self._network, "link", "set", f"v{self._number}", "down").returncode == 0

    def heal(self) -> None:
        assert _ip("-n", self._network, "link", "set", f"v{self._number}", "up").returncode == 0

    def close(self) -> None:
        if self.is_running:
            self.kill()
        _ip("netns", "del", self.name)


class Network:
    """Hosts 0, 1, ... on one bridge, this machine beside them, and an instance over them: to its clients a server like
    any other."""

    model = "demo"
    admin = (("Authorization", "Bearer admin"),)  # it listens to other hosts: then changing it needs a key

    def __init__(self, num_hosts: int, directory: Path) -> None:
        self._name = f"es{os.getpid()}n"
        self._ours = f"es{os.getpid()}v"
        subnet = f"10.{os.getpid() % 200 + 40}.99"
        self.directory = directory
        self.key = directory / "key"
        for command in (
            f"netns add {self._name}",
            f"-n {self._name} link add br0 type bridge",
            f"-n {self._name} link set br0 up",
            f"link add {self._ours} type veth peer name ours netns {self._name}",
            f"-n {self._name} link set ours master br0 up",
            f"addr add {subnet}.100/24 dev {self._ours}",
            f"link set {self._ours} up",
        ):
            made = _ip(*command.split())
            assert made.returncode == 0, made.stderr.decode()
        self.hosts = [Host(self._name, subnet, number, directory) for number in range(num_hosts)]
        self.url = f"http://{self.hosts[0].address}:8000"

    def serve(self, *flags: str) -> None:
        command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--host", "0.0.0.0", "--port", "8000"]
        joined = ["--hosts", str(len(self.hosts)), "--cluster-key", str(self.key)]
        events = ["--event-log", str(self.directory / "events"), "--event-log-bytes", "0"]
        self.hosts[0].run(*command, *joined, *events, "--admin-key", "admin", *flags)

    def join(self, number: int) -> None:
        agent = [sys.executable, "-m", "everserve.cli", "agent", "--join", self.hosts[0].address]
        self.hosts[number].run(*agent, "--cluster-key", str(self.key), "--name", f"host-{number}")

    def events(self, process: str) -> list[dict[str, Any]]:
        """All events so far of a process of the first host."""
        lines = (line for path in (self.directory / "events").glob(f"{process}*.jsonl") for line in path.open())
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda event: event["at_s"])

    def log_text(self) -> str:
        return "\n".join(f"{host.name}:\n{host.log.read_text()}" for host in self.hosts if host.log.exists())

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        _ip("link", "del", self._ours)
        _ip("netns", "del", self._name)
