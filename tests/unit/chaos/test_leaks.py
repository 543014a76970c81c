"""What processes hold, looked at from outside; and the verdict that all figures come together in."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from rich.console import Console

from everserve.chaos import leaks
from everserve.chaos.faults import InjectedFault
from everserve.chaos.findings import Findings
from everserve.chaos.leaks import Holding, Snapshot
from everserve.chaos.tally import Tally
from everserve.chaos.target import View
from everserve.chaos.verdict import Verdict

# A root with one child. Both have the same memory of 2 pages, of which one was written; the child has another one
# of one page whose descriptor is closed. What it reads makes it hold more.
TREE = """
import mmap, os, sys, time
shared = os.memfd_create("everserve-lane"); os.ftruncate(shared, 2 * mmap.PAGESIZE)
lane = mmap.mmap(shared, 2 * mmap.PAGESIZE); lane[0] = 1
child = os.fork()
if not child:
    fd = os.memfd_create("everserve-cell"); os.ftruncate(fd, mmap.PAGESIZE)
    cell = mmap.mmap(fd, mmap.PAGESIZE); os.close(fd)
    kept = []
    print(os.getpid(), mmap.PAGESIZE, flush=True)
    for line in sys.stdin:
        if line == "fd\\n":
            kept.append(os.open("/dev/null", os.O_RDONLY))
        if line == "memory\\n":
            kept.append(os.memfd_create("everserve-more")); os.ftruncate(kept[-1], mmap.PAGESIZE)
        if line == "map\\n":
            kept.append(mmap.mmap(shared, mmap.PAGESIZE))
        if line == "stray\\n" and not os.fork():
            time.sleep(600)
        if line == "zombie\\n" and not os.fork():
            os._exit(0)
        print(flush=True)
    os._exit(0)
os.wait()
"""
NOTHING: Counter[str] = Counter()


class Tree(NamedTuple):
    popen: subprocess.Popen
    view: View
    page: int

    def do(self, what: str) -> None:
        self.popen.stdin.write(f"{what}\n")
        self.popen.stdin.flush()
        self.popen.stdout.readline()

    def take(self) -> Snapshot:
        return leaks.take(self.view, self.popen.pid)


@pytest.fixture
def tree() -> Iterator[Tree]:
    popen = subprocess.Popen(
        [sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    child, page = map(int, popen.stdout.readline().split())
    named = [{"name": "root", "pid": popen.pid}]
    worker = {"rank": 0, "pid": child, "roles": ["attention"], "state": "ready"}
    yield Tree(popen, View({"processes": named, "workers": [worker]}), page)
    subprocess.run(["kill", "-KILL", "--", f"-{popen.pid}"], check=True)
    popen.communicate()


def test_what_is_held(tree):
    taken = tree.take()
    assert not taken.strays and set(taken.holdings) == {"root", "attention worker 0"}
    assert taken.holdings["root"].mappings == {"lane": 1} and taken.holdings["attention worker 0"].mappings == {
        "lane": 1,
        "cell": 1,
    }
    assert taken.num_memories == 2, "the one that both have counts once, the one without a descriptor counts too"
    assert taken.memory_bytes == 3 * tree.page and taken.resident_bytes == tree.page
    assert leaks.compare(taken, tree.take()) == []


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fd", "descriptors"),
        ("memory", "pieces of shared memory"),
        ("map", "mappings"),
        ("stray", "should not be there"),
        ("zombie", "should not be there"),
    ],
)
def test_every_leak_is_seen(tree, what, says):
    before = tree.take()
    tree.do(what)
    deadline = time.monotonic() + 10
    while what == "zombie" and "state Z" not in str(tree.take().strays) and time.monotonic() < deadline:
        pass  # it is about to end
    assert any(says in line for line in leaks.compare(before, tree.take()))


def test_a_process_that_is_missing():
    before = Snapshot({"a": Holding(3, NOTHING), "gateway": Holding(30, NOTHING)}, (), 0, 0, 0)
    assert leaks.compare(before, replace(before, holdings={"gateway": Holding(31, NOTHING)})) != []
    connected = replace(before, holdings={**before.holdings, "gateway": Holding(31, NOTHING)})
    assert leaks.compare(before, connected) == [], "clients may be connected"


@pytest.mark.parametrize("name", ["gateway", "gateway-1", "keeper", "keeper-2"])
def test_gateways_and_keepers_have_the_same_clients(name: str):
    before = Snapshot({name: Holding(30, NOTHING)}, (), 0, 0, 0)
    assert leaks.compare(before, replace(before, holdings={name: Holding(31, NOTHING)})) == []
    assert leaks.compare(before, replace(before, holdings={name: Holding(33, NOTHING)})) != []


def test_device_memory(tree, tmp_path, monkeypatch):
    """Asked for only if somebody has a device; here that is /dev/null, and a script knows how much is in use."""
    monkeypatch.setattr(leaks, "_DEVICE_FILE", re.compile("/dev/null"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert tree.take().device_bytes is None, "nobody uses one"
    tree.do("fd")
    in_use, smi = tmp_path / "in_use", tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {in_use}\n")
    smi.chmod(0o755)
    in_use.write_text("4096\n100\n")
    before = tree.take()
    assert before.num_device_users == 1 and before.device_bytes == before.totals["device_bytes"] == 4196 << 20
    for more, is_leak in ((64, False), (65, True)):
        in_use.write_text(f"4096\n{100 + more}\n")
        assert any("device memory" in line for line in leaks.compare(before, tree.take())) is is_leak
    in_use.write_text("[N/A]\n")
    assert tree.take().device_bytes is None and leaks.compare(before, tree.take()) == []


# -- the verdict ---------------------------------------------------------------------------------


def make_verdict(**changes) -> Verdict:
    tally = Tally()
    tally.manners["streamed"] = 3
    tally.num_tokens = 120
    tally.gaps_s.extend([0.01, 0.02, 1.5])
    snapshot = Snapshot({"gateway": Holding(30, NOTHING)}, (), 4, 4096, 4096)
    faults = [
        InjectedFault(1.0, "kill a worker", ("KILL to expert 1 (pid 7)",), ()),
        InjectedFault(2.0, "kill a worker", (), ("there is no such process",)),
    ]
    verdict = Verdict(
        seed=5,
        settings={"seconds": 10},
        seconds=10.0,
        faults=faults,
        tally=tally,
        num_undisturbed=8,
        findings=[],
        before=snapshot,
        after=snapshot,
        whole_after_s=0.5,
        notes=["a note"],
    )
    return replace(verdict, **changes)


def shown(verdict: Verdict) -> str:
    out = io.StringIO()
    verdict.show(Console(file=out, width=140))
    return out.getvalue()


def test_a_good_verdict():
    verdict = make_verdict()
    text = shown(verdict)
    assert verdict.is_good and "every stream is exact: 1 fault, 3 requests, 120 tokens" in text
    assert "note: a note" in text and "1500.0 ms" in text
    data = json.loads(json.dumps(verdict.as_json()))
    assert data["faults"] == {"kill a worker": {"injected": 1, "missed": 1}}
    assert data["is_good"] and data["seed"] == 5 and len(data["every_fault"]) == 2
    assert data["gaps_between_events_ms"]["max"] == 1500.0


def test_a_bad_verdict():
    findings = Findings(recent_faults=lambda: ["1.00 s kill a worker: KILL to expert 1 (pid 7)"])
    findings.add("gap", "request 3", "choice 0, token 4: expected [1, 2], got [2]")
    verdict = make_verdict(findings=findings.all, kept="/some/where", after=None, whole_after_s=None)
    text = shown(verdict)
    assert not verdict.is_good and "FAILED with 1 finding:" in text and "/some/where" in text
    assert "request 3" in text and "got [2]" in text and "before it: 1.00 s kill a worker" in text
    assert json.loads(json.dumps(verdict.as_json()))["findings_by_kind"] == {"gap": 1}


def test_too_many_findings_end_a_run():
    findings = Findings()
    while not findings.too_many.is_set():
        findings.add("error", "somewhere", "something")
    assert len(findings.all) == 20
