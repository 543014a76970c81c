"""Another installed version goes on with the instance: `everserve upgrade`.

look      both versions say what they have in common with others (cli/compatibility.py), and the other one whether
          it can serve this model: so a version that cannot be imported, or cannot talk to this one, changes nothing
become    the supervisor ends; root execs the other interpreter, with the same pid, children and descriptors, and
          makes the next supervisor, which starts orchestrator, anchor and zygote: of the other version
confirm   when these three have spoken. If one of them, or the supervisor, ends before, root execs the old one again
workers   are drained one after the other by the command (cli/upgrade.py): each successor is of the new version
gateways  are followed one after the other, with all connections (gateway/succession.py)
"""

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

import msgspec

from everserve.config.model import ModelSource
from everserve.procs import process
from everserve.procs.root_end import RootEnd
from everserve.wire.messages import Answered
from everserve.wire.operators import UpgradeView

CONFIRM_S = 300.0  # a zygote imports for seconds, for minutes where the host is busy
_LOOK_S = 90.0
_MODULE = "everserve.cli.compatibility"

log = logging.getLogger(__name__)


def untrusted(python: str) -> str:
    """The part of this path that another user could replace; empty if there is none. What it leads to will run as this
    user, with all that the instance has; and an operator who may ask for an upgrade need not be this user."""
    for part in (Path(python), *Path(python).parents):
        try:
            found = part.stat()
        except OSError:
            continue  # it is refused when it is to be run
        except ValueError:  # no path at all
            return repr(python)
        is_shared = found.st_mode & 0o022 and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.geteuid()) or is_shared:
            return str(part)
    return "" if Path(python).is_absolute() else python


class Upgrade:
    """The supervisor's part of an upgrade. `answer`: tells all gateways; `record`: writes the process table."""

    def __init__(
        self,
        root: RootEnd,
        model: ModelSource,
        answer: Callable[[Answered], None],
        record: Callable[[], None],
    ) -> None:
        self._root = root
        self._model = model
        self._answer = answer
        self._record = record
        self._look: Look | None = None  # at another version
        self._unconfirmed: set[str] = set()  # helpers of a new version, until they have spoken
        self._confirm_by = 0.0

    @property
    def is_under_way(self) -> bool:
        return self._look is not None or self.is_unconfirmed

    @property
    def is_unconfirmed(self) -> bool:
        """This version has not yet shown that it can go on."""
        return bool(self._unconfirmed)

    def begin_to_confirm(self, helpers: Collection[str]) -> None:
        """This supervisor is the first one of its version."""
        self._unconfirmed, self._confirm_by = set(helpers), time.monotonic() + CONFIRM_S

    def ask(self, id: str, python: str) -> None:
        """Looks at that version; what was asked is answered when that is known."""
        if part := untrusted(python):
            reason = f"{part}: the path must be absolute, and only root and the server's user may be able to change it"
            self._answer(Answered(id=id, refused=reason))
        else:
            self._look = Look(id, python, self._model, time.monotonic())

    def tend(self) -> None:
        """Call this regularly. Ends this process when the other version is to go on, or the one before."""
        if self._unconfirmed and time.monotonic() > self._confirm_by:
            self._give_way(f"nothing was heard of its {', '.join(sorted(self._unconfirmed))}")
        look = self._look
        refusal = look.refusal(time.monotonic()) if look is not None else None
        if look is None or refusal is None:
            return
        self._look = None
        look.close()
        if refusal:
            self._answer(Answered(id=look.id, refused=refusal))
            return
        view = UpgradeView(version=look.version, python=sys.executable)
        self._answer(Answered(id=look.id, view=msgspec.json.encode(view)))
        self._record()
        self._root.become(look.python)
        os._exit(0)  # nothing is closed or ended: the next supervisor goes on with it

    def confirm(self, name: str) -> None:
        """The first word of a helper: it could be started, and could read what it was told."""
        if name in self._unconfirmed:
            self._unconfirmed.discard(name)
            if not self._unconfirmed:
                self._root.has_taken_over()

    def note_end(self, name: str, status: int) -> None:
        """A helper has ended. If it was to speak, this version cannot go on."""
        if name in self._unconfirmed:
            self._give_way(f"its {name} ended ({process.how(status)})")

    def _give_way(self, why: str) -> None:
        """To the version before: this one has not taken over, so root goes back to that when this process ends."""
        log.error("this version cannot go on: %s", why)
        self._record()
        os._exit(os.EX_SOFTWARE)


class Look:
    """Two processes that say what their versions have in common. Nothing waits for them."""

    def __init__(self, id: str, python: str, model: ModelSource, now: float) -> None:
        self.id = id  # of the question
        self.python = python
        self.version = ""
        self._until_s = now + _LOOK_S
        self._asked = msgspec.json.encode(model).decode()
        self._said = [_Said(python, self._asked) for python in (self.python, sys.executable)]

    def refusal(self, now: float) -> str | None:
        """Why it does not fit; empty if it does; None: not known yet."""
        if any(said.process is not None and said.process.poll() is None for said in self._said):
            return None if now < self._until_s else f"{self.python} has said nothing for {_LOOK_S:g} s"
        theirs, ours = (said.answer() for said in self._said)
        if isinstance(theirs, str):
            return f"{self.python}: {theirs}"
        if isinstance(ours, str):
            return f"this version: {ours}"
        different = sorted(name for name in ours if name != "version" and ours[name] != theirs.get(name))
        if different:
            return f"version {theirs['version']} cannot run beside {ours['version']}: other {' and '.join(different)}"
        self.version = theirs["version"]
        return ""

    def close(self) -> None:
        for said in self._said:
            said.close()


class _Said:
    """One version's answer."""

    def __init__(self, python: str, model: str) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
        try:
            self.process = subprocess.Popen(
                [python, "-m", _MODULE, model], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
            )
        except OSError as error:
            self._failure = error.strerror or str(error)

    def answer(self) -> dict[str, str] | str:
        """The answer, or why there is none, in a line."""
        if self.process is None:
            return self._failure
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines() or [""]
        if self.process.returncode:
            return lines[-1] or f"exit status {self.process.returncode}"
        try:
            said: dict[str, str] = json.loads(lines[-1])
        except ValueError:
            return f"not an answer: {lines[-1][:200]}"
        return said

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()
