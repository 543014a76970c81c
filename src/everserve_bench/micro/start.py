"""How long does a server take from `everserve serve` to its first token, and what takes that long?

Each round starts a new server and asks it for one token as soon as it serves. Its events divide the time:

    command   until its processes are started (but for the zygote, which is there already): the interpreter, imports,
              flags, the model's config, devices
    imports   until the last worker is forked: the zygote imports what workers need, from the very beginning, and memory
              is allocated meanwhile
    ...       phases of the worker that was ready last, as it tells them: context, weights, kernels, graphs, rehearsal
    rest      what that worker does besides
    serving   until the server says that it serves
    token     until the token is there

With an empty cache of compiled kernels (the first start on a machine) and with a full one. A CPU has no such cache.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import report
from everserve_bench.instance import flags_for
from everserve_bench.load import Ask, make_asks, send_all
from everserve_bench.micro import start_report
from everserve_bench.subject import BUNDLED, Subject, check_gpu, is_for_gpu, subject

Event = dict[str, Any]

_KERNEL_CACHE = "TRITON_CACHE_DIR"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    rounds: int
    num_attention: int
    num_expert: int
    num_streams: int  # that it has room for
    num_prompt: int
    is_cold: bool  # the first start on a machine too, where that is different
    shape: str = BUNDLED
    num_layers: int | None = None
    serve: tuple[str, ...] = ()

    def flags(self, served: Subject) -> tuple[str, ...]:
        flags = flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + 1,
        )
        return (*flags, *self.serve)


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark."""
    check_gpu(settings.shape)
    with (
        subject(settings.shape, settings.num_layers) as served,
        _kernel_cache(settings) as cache,
        Progress() as progress,
    ):
        names = ["cold"] * (settings.is_cold and is_for_gpu(settings.shape)) + ["warm"] * settings.rounds
        progress.begin("start", total=len(names))
        starts: dict[str, list[dict[str, float]]] = {}
        for name in names:
            starts.setdefault(name, []).append(_start(settings, served, cache))
            progress.advance(name)
    medians = {name: _medians(found) for name, found in starts.items()}
    result = {"model": served.title, "settings": asdict(settings), "starts": starts, "medians": medians}
    start_report.show(result, report.write("start", result, out))
    return True


@contextlib.contextmanager
def _kernel_cache(settings: Settings) -> Iterator[Mapping[str, str]]:
    """The environment of all servers: an empty cache of their own, or what this machine has."""
    if not settings.is_cold:
        yield os.environ
        return
    with tempfile.TemporaryDirectory(prefix="everserve-kernels-") as directory:
        yield os.environ | {_KERNEL_CACHE: directory}


def _start(settings: Settings, served: Subject, environment: Mapping[str, str]) -> dict[str, float]:
    (ask,) = make_asks(1, settings.num_prompt, 1, served.vocab_size)
    began_s = time.monotonic()
    with LocalServer(served.model, *settings.flags(served), environment=environment) as server:
        _first_token(server, ask)
        return phases(server.events(), began_s, time.monotonic())


def _first_token(server: LocalServer, ask: Ask) -> None:
    (stream,) = asyncio.run(send_all(server, [ask]))
    if stream.error:
        raise EverserveError(f"the first request failed: {stream.error}")


def phases(events: list[Event], began_s: float, token_s: float) -> dict[str, float]:
    """Seconds of each, one after the other, and `total`."""
    (serving,) = (event for event in events if event["event"] == "serving")
    before = [event for event in events if event["at_s"] <= serving["at_s"]]
    last = max((e for e in before if e["event"] == "worker_became_ready"), key=lambda event: event["at_s"])
    first_s = next(event["at_s"] for event in before if event["event"] == "process_started")
    forked_s = last["at_s"] - last["load_s"]
    return {
        "command": first_s - began_s,
        "imports": forked_s - first_s,
        **last["phases"],
        "rest": last["load_s"] - sum(last["phases"].values()),
        "serving": serving["at_s"] - last["at_s"],
        "token": token_s - serving["at_s"],
        "total": token_s - began_s,
    }


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(times[name] for times in found) for name in found[0]}
