"""What do streams see when an instance that is divided over devices (`-tp N`) loses one, by how much is done again?

    recompute      no KV log: survivors load the lost weights, all KV is computed again
    successor      KV in host memory; the device restarts at once, and its worker loads alone all that the device had
    parts          KV in host memory; the device is gone: survivors load and restore a part each of what it had. Ours
    process        the same server; only the shard worker's process is killed: survivors find what it had in its memory
    oracle         no KV log; the process is killed, its memory is kept: the next process has nothing to load
    restart        everything is killed and started again; clients ask once more. The baseline

Beside it, for the same loss, what four planners would move (plan/reshard.py). Streams, weights and KV are real; every
token is compared with the same request undisturbed.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from everserve.bench import decline, divided, kill, link, lose, processes, report, reshard_report, restart
from everserve.bench.instance import Instance
from everserve.bench.load import Ask, make_asks
from everserve.bench.on_gpu import check_gpu, is_for_gpu
from everserve.bench.repair_cases import Case
from everserve.bench.resharded import Loss, counted, planned
from everserve.bench.subject import Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve.tables.survival import Kv


@dataclass(frozen=True)
class Variant:
    """On which server, and what happens to it."""

    kv_log: str
    fault: str  # gone, device (repair_cases.py), process or restart


VARIANTS = {
    "recompute": Variant("off", "gone"),
    "oracle": Variant("off", "process"),
    "restart": Variant("off", "restart"),
    "successor": Variant("mirror", "device"),
    "parts": Variant("mirror", "gone"),
    "process": Variant("mirror", "process"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(divided.Load):
    """What is measured; all of it goes into the JSON. Variants have the kinds of KV log."""

    degrees: tuple[int, ...]
    variants: tuple[str, ...]
    rounds: int
    warm_s: float


@dataclass
class Found:
    """So far."""

    losses: list[Loss] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # what, and why it could not be measured
    skipped: list[str] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)  # tokens of each stream: they do not depend on the degree


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact and every loss was measured."""
    check_gpu(settings.shape)
    unknown = set(settings.variants) - set(VARIANTS)
    if unknown:
        raise ConfigError(f"--variant {min(unknown)}: choose from {', '.join(VARIANTS)}")
    speed = link.bytes_per_s("cuda" if is_for_gpu(settings.shape) else "cpu")
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(f"--tokens {settings.max_tokens}: the context is {served.max_context}, prompt included")
        kv_tokens = settings.num_streams * (settings.num_prompt + settings.max_tokens // 2)
        model = divided.model_of(served)
        result: dict[str, Any] = {
            "model": served.title,
            "settings": asdict(settings),
            "link_bytes_per_s": speed,
            "planners": {num: planned(divided.rows(model, num, kv_tokens), num) for num in settings.degrees},
        }
        for found in _measure(settings, served):
            result |= reshard_report.summarize(found.losses, found.failures, found.skipped, speed)
            report.keep("reshard", result, out)
    reshard_report.show(result, report.write("reshard", result, out))
    return bool(result["is_exact"]) and not found.failures


def _measure(settings: Settings, served: Subject) -> Iterator[Found]:
    """Yields after each loss. Variants with the same log share a server."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
    found = Found()
    with Progress() as progress:
        progress.begin("reshard", total=len(settings.degrees) * len(settings.variants) * settings.rounds)
        for num_devices, kv_log in itertools.product(settings.degrees, ("off", "mirror")):
            names = [name for name in settings.variants if VARIANTS[name].kv_log == kv_log]
            if not names:
                continue
            flags = replace(settings, kv_log=kv_log).flags(served, num_devices, num_devices - 1)
            with contextlib.closing(Instance(served.model, flags)) as instance:
                if kv_log == "mirror" and not keeps_kv(instance.server):
                    found.skipped.append(f"{num_devices} devices: {', '.join(names)}: this server has no KV mirror")
                    progress.advance("skipped")
                    yield found
                    continue
                found.expected = found.expected or kill.undisturbed(instance.server, asks)
                for i, name in itertools.product(range(settings.rounds), names):
                    _lose(settings, instance, name, num_devices, i, asks, found)
                    progress.advance(f"{num_devices} devices, {name}")
                    yield found


def keeps_kv(server: LocalServer) -> bool:
    """Whether KV outlives the loss of a device, by the server's own words."""
    told = {one["failure"]: one["kv"] for one in processes.cluster(server)["survives"]}
    return told.get("any one device") == Kv.KEPT


def _lose(
    settings: Settings, instance: Instance, name: str, num_devices: int, round_: int, asks: list[Ask], found: Found
) -> None:
    """A failure is a finding about this variant; the next begins with a new server."""
    device = round_ % num_devices
    try:
        found.losses.append(_one(settings, instance, name, num_devices, device, asks, found.expected))
    except (EverserveError, OSError) as error:
        found.failures.append((f"{num_devices} devices, {name}", str(error)))
        instance.restart()


def _one(
    settings: Settings,
    instance: Instance,
    name: str,
    num_devices: int,
    device: int,
    asks: list[Ask],
    expected: Sequence[list[int]],
) -> Loss:
    fault, right = VARIANTS[name].fault, list(expected)
    kill.run(decline.wait_settled(instance.server, num_devices))  # what came back with the last device has its places
    if fault == "restart":
        return Loss.of_kill(name, num_devices, restart.kill_everything(instance, asks, right, settings.warm_s), {})
    before = processes.counters(instance.server)
    if fault == "process":
        rank = num_devices + device  # the shard workers come after the homes
        round_ = kill.kill_worker(instance.server, "expert", rank, asks, right, settings.warm_s)
        return Loss.of_kill(name, num_devices, round_, counted(before, processes.counters(instance.server)))
    case = Case(1, fault, "enough", 0)
    after: dict[str, float] = {}
    lost = lose.lose_devices(
        *(instance.server, case, [device], asks, right, settings.warm_s),
        when_repaired=lambda: after.update(processes.counters(instance.server)),
    )
    return Loss.of_device(name, num_devices, lost, counted(before, after))
