"""What do streams see when an instance that is divided over devices (`-tp N`) loses one, by how much is done again?

    recompute      no KV log: survivors load the lost weights, all KV is computed again
    successor      KV in host memory; the device restarts at once, and its worker loads alone all that the device had
    parts          KV in host memory; the device is gone: survivors load and restore a part each of what it had. Ours
    process        the same server; only the shard worker's process is killed: survivors find what it had in its memory
    oracle         no KV log; the process is killed, its memory is kept: the next process has nothing to load
    restart        everything is killed and started again; clients ask once more. The baseline

Beside it, for the same loss, what four planners would move (planners/reshard.py). Streams, weights and KV are real;
every token is compared with the same request undisturbed.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from everserve.client import percentile
from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve.tables.survival import Kv
from everserve_bench import divided, kill, kill_rounds, lose, options, processes, report, restart
from everserve_bench.divided import Divided
from everserve_bench.instance import Instance
from everserve_bench.load import Ask
from everserve_bench.micro import link
from everserve_bench.repair_cases import Case
from everserve_bench.resharded import Loss, counted, planned
from everserve_bench.scenario import Result
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Table, medians, text

_SHARES = (0.5, 0.9, 0.99, 1.0)
_KV_BYTES = "kv_regained_bytes"  # in the name of the counter of KV that was copied
_PLANNED = {
    "reloaded": "reload_bytes",
    "from peers": "peer_bytes",
    "kept": "kept_bytes",
    "fewest possible": "fewest_bytes",
}
_LOSSES = [
    ("devices, variant", text("case")),
    *(
        (title, text(f"p{share * 100:g}", ",.1f"))
        for title, share in zip(("pause ms: p50", "p90", "p99", "worst"), _SHARES, strict=True)
    ),
    ("p99 before", medians("normal_p99_ms")),
    ("copied MB", text("copied")),
    ("link ms", lambda row: f"{row['link_ms']:.1f}" if row["bytes_by_source"] else "-"),
    ("tokens again", lambda row: _sum(row["counted"], "tokens_recomputed", "kv_lost_tokens")),
    ("restored", lambda row: _sum(row["counted"], "tokens_restored", "kv_regained_tokens")),
    ("inexact", text("num_inexact")),
]
_PLANNERS = [
    ("devices, planner", text("case")),
    *((title, text(figure, ",.2f")) for title, figure in _PLANNED.items()),
    ("busiest link ms", text("link_ms", ".2f")),
]
_LEGEND = """\
pause: of each stream the longest time between two tokens around the loss; over all streams of all rounds.
recompute: no KV log. successor: KV in host memory, the device restarts at once and loads alone all that it had. parts:
  KV in host memory, survivors load and restore a part each (ours). process: there, only a process dies.
  oracle: a process dies, its memory is kept, streams wait for the next process. restart: everything.
  Only lost weights are loaded in all of them but a restart; `full reload` below is what a system would load that
  shards anew.
link: bytes that were copied over the speed of one copy from the memory of the host, measured in the same run. Weights
  that CPUs read where files are mapped are not copied. again: tokens whose KV was computed once more."""


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


@dataclass
class Found:
    """So far."""

    losses: list[Loss] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # what, and why it could not be measured
    skipped: list[str] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)  # tokens of each stream: they do not depend on the degree


class Reshard(Divided, frozen=True, kw_only=True):
    """One of N devices is lost. Pauses and bytes by how much is done again, beside a restart, and four planners.

    Exit status 1 if a stream lost a token or got a different one, or if a loss could not be measured.
    """

    NAME: ClassVar[str] = "reshard"

    degrees: Annotated[
        tuple[int, ...],
        Flag("Devices before the loss; repeatable.", name="devices", min=2, max=MAX_RANKS // 2),
    ] = (8, 4, 3)
    variants: Annotated[tuple[str, ...], Flag("Only these; repeatable.", name="variant")] = tuple(VARIANTS)
    num_prompt: Annotated[int, options.PROMPT] = 128
    max_tokens: Annotated[int, options.TOKENS] = 600
    rounds: Annotated[int, Flag("Losses of each kind.", min=1)] = 3
    warm_s: Annotated[float, options.WARM_S] = 3.0

    def check(self) -> None:
        unknown = set(self.variants) - set(VARIANTS)
        if unknown:
            raise ConfigError(f"--variant {min(unknown)}: choose from {', '.join(VARIANTS)}")

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        asks = self.asks(served)
        speed = link.bytes_per_s("cuda" if is_for_gpu(self.shape) else "cpu")
        kv_tokens = self.num_streams * (self.num_prompt + self.max_tokens // 2)
        model = divided.model_of(served)
        planners = {num: planned(divided.rows(model, num, kv_tokens), num) for num in self.degrees}
        for found in self._losses(served, asks, progress):
            losses = summarize(found.losses, found.failures, found.skipped, speed)
            yield {"link_bytes_per_s": speed, "planners": planners, **losses}

    def _losses(self, served: Subject, asks: list[Ask], progress: Progress) -> Iterator[Found]:
        """Variants with the same log share a server."""
        found = Found()
        progress.begin(self.NAME, total=len(self.degrees) * len(self.variants) * self.rounds)
        for num_devices, kv_log in itertools.product(self.degrees, ("off", "mirror")):
            names = [name for name in self.variants if VARIANTS[name].kv_log == kv_log]
            if not names:
                continue
            flags = self.flags(served, num_devices, num_devices - 1, kv_log)
            with contextlib.closing(Instance(served.model, flags)) as instance:
                if kv_log == "mirror" and not keeps_kv(instance.server):
                    found.skipped.append(f"{num_devices} devices: {', '.join(names)}: this server has no KV mirror")
                    progress.advance("skipped")
                    yield found
                    continue
                found.expected = found.expected or kill.undisturbed(instance.server, asks)
                for i, name in itertools.product(range(self.rounds), names):
                    _lose(self, instance, name, num_devices, i, asks, found)
                    progress.advance(f"{num_devices} devices, {name}")
                    yield found

    @staticmethod
    def is_passed(result: Result) -> bool:
        return bool(result["is_exact"]) and not result["failures"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings, speed = result["settings"], result["link_bytes_per_s"]
        title = f"{result['model']}: one of N devices is lost under {settings['num_streams']} streams"
        rows = [_row(name, found) for name, found in result["cases"].items()]
        yield Table(f"{title}; rounds: {settings['rounds']}", _LOSSES, rows)
        planners = [
            _planner_row(f"{num} {name}", found, speed)
            for num, by_name in result["planners"].items()
            for name, found in by_name.items()
        ]
        how = f"MB (mean over the devices); a link carries {speed / 1e9:.1f} GB/s"
        yield Table(f"What planners move for the same loss, {how}", _PLANNERS, planners)
        yield _LEGEND
        yield from (f"{failure['case']}: FAILED: {failure['why']}" for failure in result["failures"])
        yield from (f"skipped: {what}" for what in result["skipped"])
        yield kill_rounds.exactness(result, f"{result['num_missing']} lost, {result['num_different']} different: ")


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    copied = [f"{source} {num / 1e6:,.1f}" for source, num in found["bytes_by_source"].items()]
    return {**found, **found["pause_ms"], "case": name, "copied": ", ".join(copied) or "-"}


def _planner_row(case: str, found: dict[str, float], speed: float) -> dict[str, Any]:
    moved = {figure: found[figure] / 1e6 for figure in _PLANNED.values()}
    return {**moved, "case": case, "link_ms": 1e3 * found["most_reload_bytes"] / speed}


def _sum(counted: dict[str, float], *parts: str) -> str:
    """Per loss, of counters with such names."""
    found = [num for name, num in counted.items() if any(part in name for part in parts)]
    return f"{sum(found):,.0f}" if found else "-"


def summarize(
    losses: Sequence[Loss], failures: Sequence[tuple[str, str]], skipped: Sequence[str], speed: float
) -> Result:
    """Per degree and variant."""
    cases: dict[str, dict[str, Any]] = {}
    for num_devices, variant in dict.fromkeys((loss.num_devices, loss.variant) for loss in losses):
        same = [loss for loss in losses if (loss.num_devices, loss.variant) == (num_devices, variant)]
        cases[f"{num_devices} {variant}"] = _case(same, speed)
    return {
        "cases": cases,
        "failures": [{"case": case, "why": why} for case, why in failures],
        "skipped": list(skipped),
        "num_streams_compared": sum(loss.num_streams for loss in losses),
        "num_tokens_compared": sum(loss.num_tokens for loss in losses),
        "num_missing": sum(loss.num_missing for loss in losses),
        "num_different": sum(loss.num_different for loss in losses),
        "is_exact": not any(loss.num_missing or loss.num_different for loss in losses),
        "losses": [asdict(loss) for loss in losses],
    }


def _case(losses: Sequence[Loss], speed: float) -> dict[str, Any]:
    pauses = sorted(pause for loss in losses for pause in loss.pauses_ms)
    copied: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for loss in losses:
        copied.update(loss.bytes_by_source)
        copied["KV"] += round(sum(num for name, num in loss.counted.items() if _KV_BYTES in name))
        counted.update(loss.counted)
    per_loss = {source: num / len(losses) for source, num in copied.items() if num or source != "KV"}
    return {
        "num_devices": losses[0].num_devices,
        "variant": losses[0].variant,
        "rounds": len(losses),
        "pause_ms": {f"p{share * 100:g}": percentile(pauses, share) for share in _SHARES},
        "cdf_ms": pauses,
        "normal_p99_ms": report.spread([loss.normal_p99_ms for loss in losses]),
        "whole_s": report.spread([loss.whole_s for loss in losses]),
        "bytes_by_source": per_loss,
        "link_ms": 1e3 * sum(per_loss.values()) / speed,
        "counted": {name: num / len(losses) for name, num in counted.items()},
        "num_inexact": sum(loss.num_missing + loss.num_different for loss in losses),
    }


# -- one loss ------------------------------------------------------------------------------------


def keeps_kv(server: LocalServer) -> bool:
    """Whether KV outlives the loss of a device, by the server's own words."""
    told = {one["failure"]: one["kv"] for one in processes.cluster(server)["survives"]}
    return told.get("any one device") == Kv.KEPT


def _lose(
    settings: "Reshard", instance: Instance, name: str, num_devices: int, round_: int, asks: list[Ask], found: Found
) -> None:
    """A failure is a finding about this variant; the next begins with a new server."""
    device = round_ % num_devices
    try:
        found.losses.append(_one(settings, instance, name, num_devices, device, asks, found.expected))
    except (EverserveError, OSError) as error:
        found.failures.append((f"{num_devices} devices, {name}", str(error)))
        instance.restart()


def _one(
    settings: "Reshard",
    instance: Instance,
    name: str,
    num_devices: int,
    device: int,
    asks: list[Ask],
    expected: Sequence[list[int]],
) -> Loss:
    fault, right = VARIANTS[name].fault, list(expected)
    kill.run(divided.wait_settled(instance.server, num_devices))  # what came back with the last device has its places
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
