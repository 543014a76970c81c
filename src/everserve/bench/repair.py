"""What do clients see when devices are lost, with their workers, their KV and their experts, next to restarting
everything?

One server has an attention and an expert worker on each of N devices. Under running streams k of them are lost at once:
their processes die, or they are lost with everything in their memory, and then they return at once, or are gone until
all experts have new places on the survivors. Each with enough shadow experts that every expert keeps a place, and with
so few that streams have to wait for the repair. (repair_cases.py: which cases, and on which server.)

The baseline, in the same run and under the same load, is a restart of everything. Every stream is compared, token by
token, with the same request undisturbed.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everserve.bench import incident, kill, lose, repair_cases, repair_report, repaired, report, restart
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, make_asks
from everserve.bench.on_gpu import check_gpu, is_for_gpu
from everserve.bench.repair_cases import Case
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_devices: int
    lost: tuple[int, ...]
    num_streams: int
    max_tokens: int
    rounds: int
    baseline_rounds: int
    warm_s: float
    cases: tuple[str, ...] = ()  # parts of their names; none: all
    shape: str = BUNDLED
    num_layers: int | None = None
    num_prompt: int = 32
    spares: int | None = None  # None: as the server does by itself
    kv_log: str | None = "mirror"  # in host memory, which outlives devices
    serve: tuple[str, ...] = ()  # more flags of the server

    def flags(self, served: Subject, num_shadows: int) -> tuple[str, ...]:
        """The same as --data-parallel-size N --enable-expert-parallel."""
        return (
            *flags_for(
                served,
                num_attention=self.num_devices,
                num_expert=self.num_devices,
                num_streams=self.num_streams,
                longest=self.num_prompt + self.max_tokens,
                spares=self.spares,
                kv_log=self.kv_log,
            ),
            *("--devices", str(self.num_devices), "--shadow-experts", str(num_shadows), "--enable-chaos"),
            *(() if is_for_gpu(self.shape) else ("--weights", "memory")),  # as on a GPU: it has to come from somewhere
            *("--map-experts", "on"),
            *self.serve,
        )


@dataclass
class Found:
    """So far."""

    rounds: list[repaired.Round] = field(default_factory=list)
    restarts: list[incident.Round] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # case, and why it could not be measured


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, every case was measured, and on a GPU no survivor
    was harmed. The JSON is written after each round: a run that is cut short leaves what it has."""
    check_gpu(settings.shape)
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(
                f"--tokens {settings.max_tokens}: the context of the {served.title} is {served.max_context}, prompt"
                " included"
            )
        cases, missing = repair_cases.choose(served.num_experts, settings.num_devices, settings.lost, settings.cases)
        result: dict[str, Any] = {"model": served.title, "settings": asdict(settings)}
        result["left_out"] = [str(case) for case in missing]
        for found in _measure(settings, served, cases):
            result |= repair_report.summarize(found.rounds, found.restarts, found.failures)
            report.keep("repair", result, out)
    repair_report.show(result, report.write("repair", result, out))
    return repair_report.is_passed(result)


def _measure(settings: Settings, served: Subject, cases: list[Case]) -> Iterator[Found]:
    """Yields after each round. Cases with as many shadows share a server; the first one is restarted for the baseline.
    The right answers are those of the first server: they do not depend on where experts are. A later one has more
    shadows, and there may be no room for them: that is a finding about its cases.

    After a repair experts are elsewhere, and the next loss may find copies of all. So cases with few shadows begin with
    a server that has lost nothing yet."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
    expected: list[list[int]] = []
    found = Found()
    servers = [(num, list(same)) for num, same in itertools.groupby(cases, key=lambda case: case.num_shadows)]
    with Progress() as progress:
        progress.begin("repair", total=1 + len(cases) * settings.rounds + settings.baseline_rounds)
        for num_shadows, same in servers:
            try:
                started = Instance(served.model, settings.flags(served, num_shadows))
            except ConfigError as error:
                if not expected:
                    raise
                found.failures += [(str(case), str(error)) for case in same]
                yield found
                continue
            with contextlib.closing(started) as instance:
                if not expected:
                    expected = kill.undisturbed(instance.server, asks)
                    progress.advance()
                is_new = True
                for i, case in itertools.product(range(settings.rounds), same):
                    if case.shadows == "few" and not is_new:
                        instance.restart()
                    is_new = False
                    _lose(settings, instance, case, i, asks, expected, found)
                    progress.advance(str(case))
                    yield found
                for _ in range(settings.baseline_rounds if num_shadows == servers[0][0] else 0):
                    found.restarts.append(restart.kill_everything(instance, asks, expected, settings.warm_s))
                    progress.advance("restart")
                    yield found


def _lose(
    settings: Settings,
    instance: Instance,
    case: Case,
    round_: int,
    asks: list[Ask],
    expected: list[list[int]],
    found: Found,
) -> None:
    """A failure is a finding about this case; the next begins with a new server."""
    devices = repair_cases.devices_to_lose(round_, case.num_lost, settings.num_devices)
    try:
        found.rounds.append(lose.lose_devices(instance.server, case, devices, asks, expected, settings.warm_s))
    except (EverserveError, OSError) as error:
        found.failures.append((str(case), str(error)))
        instance.restart()
