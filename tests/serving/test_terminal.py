"""What people see: `demo`, `status --watch` and `serve`, on a terminal of 80 x 24 and without one."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from tests.support.readable import is_readable
from tests.support.shared_servers import CLUSTER

EVERSERVE = (sys.executable, "-m", "everserve.cli")
_LINES = re.compile(r"(?<!\n)(?<!\x1b\[2K)20\d\d-\d\d-\d\d \S+ \w+.*")  # that begin neither there nor at a line's start
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, command: tuple[str, ...] = EVERSERVE, ignores_sigint: bool = False) -> None:
        self.raw = ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignores_sigint else signal.SIG_DFL)  # inherited
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"},
        )
        signal.signal(signal.SIGINT, before)
        os.close(theirs)

    @property
    def text(self) -> str:
        """Without colours and the movements of the cursor."""
        return _ESCAPES.sub("", self.raw)

    def read_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline and self._read(), self.text[-3000:]

    def _read(self) -> bool:
        """What has come meanwhile; False at the end."""
        if not is_readable(self._ours, 0.1):
            return True
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # as Linux says that the last one has gone
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def hang_up(self) -> None:
        """As when its window is closed."""
        os.close(self._ours)

    def finish(self) -> int:
        """Its exit status, when it has ended by itself and nobody holds the terminal."""
        deadline = time.monotonic() + 60
        while self._read():
            assert time.monotonic() < deadline, self.text[-3000:]
        status = self.process.wait(timeout=90)
        os.close(self._ours)
        assert self.raw.count("\x1b[?25l") <= self.raw.count("\x1b[?25h"), "the cursor is shown again"
        return status


def test_the_demo_without_a_terminal():
    done = subprocess.run(
        [*EVERSERVE, "demo", "--tokens", "400"], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for victim in ("expert worker 2", "attention worker 0", "the orchestrator"):
        assert re.search(rf"SIGKILL to {victim} \(pid \d+\)", done.stdout), done.stdout
    assert done.stdout.count("all texts went on; largest gap") == 3
    assert "Tokens lost: 0. Tokens that differ from the undisturbed texts: 0." in done.stdout
    assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_demo_whose_server_refuses_says_why_in_one_line(tmp_path):
    """Here C was never compiled, and cannot be."""
    environment = os.environ | {"CC": "/no/compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([*EVERSERVE, "demo"], env=environment, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("everserve: ") and "/no/compiler" in line, done.stderr


@pytest.mark.long
def test_the_demo_on_a_terminal_until_it_is_interrupted():
    """In the background, where a shell has SIGINT ignored."""
    terminal = Terminal("demo", ignores_sigint=True)
    terminal.read_until(lambda: "✗3 SIGKILL to the orchestrator" in terminal.text, timeout_s=120)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 130
    for text in ("workers are ready", "worker 0 attention", "✗1 SIGKILL to expert worker 2", "tokens/s"):
        assert text in terminal.text
    assert "Traceback" not in terminal.text and "Tokens lost" not in terminal.text


def test_a_watcher_sees_a_kill_and_leaves_on_ctrl_c(shared_servers):
    with shared_servers.lend(*CLUSTER) as server:
        terminal = Terminal("status", "--watch", "--url", server.url)
        terminal.read_until(lambda: "whole since" in terminal.text)
        subprocess.run([*EVERSERVE, "kill", "3", "--url", server.url], check=True, capture_output=True)
        terminal.read_until(lambda: "expert worker 3 died (SIGKILL)" in terminal.text)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.finish() == 0
        assert terminal.raw.rindex("\x1b[?1049l") > terminal.raw.rindex("\x1b[?1049h"), "it leaves its screen"


NO_SERVER = "http://127.0.0.1:9"


def test_a_watcher_in_the_background_leaves_on_ctrl_c():
    """A shell starts background jobs with SIGINT ignored."""
    terminal = Terminal("status", "--watch", "--url", NO_SERVER, ignores_sigint=True)
    terminal.read_until(lambda: "no answer" in terminal.text)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 0


def test_a_watcher_leaves_when_its_terminal_is_gone():
    terminal = Terminal("status", "--watch", "--url", NO_SERVER)
    terminal.read_until(lambda: "no answer" in terminal.text)
    terminal.hang_up()
    try:
        terminal.process.wait(timeout=90)
    finally:
        terminal.process.kill()


def test_serve_shows_its_workers_until_they_are_ready():
    """Also where its own questions need the key."""
    terminal = Terminal("serve", "demo", "--port", "0", "--attention-workers", "2", "--api-key", "secret")
    try:
        terminal.read_until(lambda: "demo ready at http://" in terminal.text, timeout_s=120)
        assert "everserve: demo" in terminal.text  # its workers too, unless they were ready before the gateway
        assert not _LINES.findall(terminal.raw), (
            "what processes say begins where a bar was erased, or on a line of its own"
        )
    finally:
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 0


_BARS_AND_A_WRITER = """
import sys, threading
from everserve.cli.starting import bars_beside

def write():
    while not over.wait(1e-4):  # as fast as bars can follow, or all lines are still to be shown in the end
        print("2026-01-01 00:00:00 worker 1 says something", file=sys.stderr, flush=True)

for _ in range(3):
    over = threading.Event()
    with bars_beside("http://127.0.0.1:9", [], "a server"):  # which is not there: the bars end at once
        writer = threading.Thread(target=write)
        writer.start()
        over.wait(0.1)
        over.set()
        writer.join()
"""


def test_lines_that_come_while_the_bars_end():
    terminal = Terminal("-c", _BARS_AND_A_WRITER, command=(sys.executable,))
    assert terminal.finish() == 0
    assert "a server" in terminal.text and "says something" in terminal.text
    assert not _LINES.findall(terminal.raw), "none is printed beside a bar that is about to be erased"
