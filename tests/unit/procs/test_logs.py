"""How lines look, and that everything a process says about itself becomes one."""

import json
import os
import re
import subprocess
import sys

PROCESS = """
import gc, logging, sys, threading, warnings
from everserve.procs import logs
logs.configure("worker-3")
log = logging.getLogger("everserve.here")
log.debug("details")
log.info("ready in %.1f s, %s", 0.5, "\\u201cquoted\\u201d\\nsecond line")
warnings.warn("old", stacklevel=1)
logging.getLogger("uvicorn.error").critical("a library's line")
logs.configure("worker-3")  # as a spare does, with another name: lines do not come twice
log.warning("once")

class Bad:
    def __del__(self):
        raise ValueError("in a destructor")

def fail():
    raise LookupError("in a thread")

Bad()
thread = threading.Thread(target=fail, name="poll")
thread.start()
thread.join()
log.error("%s", "x" * 100_000)
raise RuntimeError("nobody catches it")
"""


def lines_of(code: str = PROCESS, **environment: str) -> tuple[int, list[str]]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("EVERSERVE_LOG")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=known | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_every_line_is_one_json_object():
    status, lines = lines_of(EVERSERVE_LOG_FORMAT="json")
    told = [json.loads(line) for line in lines]
    assert status == 1
    assert [one["level"] for one in told] == [
        *("info", "warning", "critical", "warning", "error", "error", "error", "critical")
    ]
    assert {one["process"] for one in told} == {"worker-3"} and len({one["pid"] for one in told}) == 1
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"]) for one in told)
    messages = [one["message"] for one in told]
    assert messages[0] == "ready in 0.5 s, \u201cquoted\u201d\nsecond line" and told[0]["logger"] == "everserve.here"
    assert "UserWarning: old" in messages[1] and messages[2] == "a library's line" and messages[3] == "once"
    assert "Bad.__del__" in messages[4] and messages[5] == "the thread poll ends"
    assert messages[6] == "x" * 100_000 and "RuntimeError" in messages[7]
    causes = ("ValueError: in a destructor", "LookupError: in a thread", "RuntimeError: nobody catches it")
    traces = [one["traceback"] for one in told if "traceback" in one]
    for trace, cause in zip(traces, causes, strict=True):
        assert trace.startswith("Traceback") and trace.endswith(cause)


def test_text_and_levels():
    _, lines = lines_of()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ worker-3 INFO ready in 0\.5 s, \u201cquoted\u201d", lines[0])
    assert lines[-1] == "RuntimeError: nobody catches it" and "details" not in "".join(lines)
    _, lines = lines_of(EVERSERVE_LOG_LEVEL="error")
    assert "once" not in "".join(lines) and "a library's line" in "".join(lines)
    _, lines = lines_of(EVERSERVE_LOG_LEVEL="debug")
    assert "worker-3 DEBUG details" in "".join(lines)


def test_what_the_command_itself_says():
    code = "from everserve.procs import logs\nlogs.refuse('early')\nlogs.begin('{}', 'info')\nlogs.refuse('late')"
    assert lines_of(code.format("text"))[1] == ["everserve: early", "everserve: late"]
    early, late = lines_of(code.format("json"))[1]
    assert early == "everserve: early" and json.loads(late)["message"] == "late"
    assert json.loads(late)["process"] == "supervisor"


def test_a_terminal_that_is_closed_costs_the_line_only():
    code = "import os, sys\nfrom everserve.procs import logs\nlogs.configure('x')\nos.close(2)\nlogs.log.error('y')"
    assert lines_of(code) == (0, [])
