"""How long until the next token when hardware fails and does not come back, by what is done about it?

A device is gone under running streams, with its one worker: SIGKILL, and the server is told that nothing may start
there.
Redundant experts, repair from a source, a mask, a role switch that streams wait for and one behind a mask; and an
attention worker whose streams others continue. (revive_variants.py: which variant on which server.) Each is broken into
the phases that the paper's Table 1 has, taken from the server's events (revived.py).

The baseline, in the same run and under the same load, is a restart of everything. Every stream is compared, token by
token, with the same request undisturbed, up to the first token that is marked as computed under a mask.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everserve.bench import kill, report, restart, revive_loss, revive_report
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, make_asks
from everserve.bench.on_gpu import check_gpu, is_for_gpu
from everserve.bench.revive_variants import NUM_ATTENTION, NUM_EXPERT, Variant, choose, flags_of
from everserve.bench.revived import Round
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    variants: tuple[str, ...] = ()  # none: all
    num_streams: int = 8
    num_prompt: int = 32
    max_tokens: int = 256
    rounds: int = 8
    baseline_rounds: int = 3
    warm_s: float = 1.0
    shape: str = BUNDLED
    num_layers: int | None = None
    spares: int | None = None  # None, here and below: as the server does by itself
    kv_log: str | None = "mirror"  # in host memory, which outlives devices
    serve: tuple[str, ...] = ()  # more flags of the server

    def flags(self, served: Subject, variant: Variant) -> tuple[str, ...]:
        flags = flags_for(
            served,
            num_attention=NUM_ATTENTION,
            num_expert=NUM_EXPERT,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )
        alone = ("--devices", str(NUM_ATTENTION + NUM_EXPERT)) if is_for_gpu(self.shape) else ()  # on CPUs each is
        lost = ("--map-experts", "off")  # with the device, which is gone a moment after the process that is killed
        return (*flags, *flags_of(variant, served.num_experts), *alone, *lost, "--enable-chaos", *self.serve)


@dataclass
class Found:
    """So far."""

    rounds: list[Round] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # variant, and why it could not be measured


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was as it should be, everything was measured, and on a GPU no
    survivor was harmed. The JSON is written after each round: a run that is cut short leaves what it has."""
    check_gpu(settings.shape)
    variants = choose(settings.variants)
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(f"--tokens {settings.max_tokens}: the context is {served.max_context}, prompt included")
        if served.num_experts < NUM_EXPERT:
            raise ConfigError(f"--shape {settings.shape}: it has {served.num_experts} experts per layer")
        result: dict[str, Any] = {"model": served.title, "settings": asdict(settings)}
        result |= {"num_attention": NUM_ATTENTION, "num_expert": NUM_EXPERT}
        for found in _measure(settings, served, variants):
            result |= revive_report.summarize(found.rounds, found.failures)
            report.keep("revive", result, out)
    revive_report.show(result, report.write("revive", result, out))
    return revive_report.is_passed(result)


def _measure(settings: Settings, served: Subject, variants: tuple[Variant, ...]) -> Iterator[Found]:
    """Yields after each round. Variants with the same flags share a server, in turn; the first one is also restarted.
    The right answers are those of the first server: they do not depend on where experts are."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
    expected: list[list[int]] = []
    found = Found()
    num_baseline = settings.baseline_rounds
    with Progress() as progress:
        progress.begin("revive", total=1 + len(variants) * settings.rounds + num_baseline)
        servers = itertools.groupby(variants, key=lambda variant: settings.flags(served, variant))
        for flags, same in servers:
            with contextlib.closing(Instance(served.model, flags)) as instance:
                if not expected:
                    expected = kill.undisturbed(instance.server, asks)
                    progress.advance()
                for i, variant in itertools.product(range(settings.rounds), tuple(same)):
                    if i > 0 and variant.needs_new_server:
                        instance.restart()
                    _lose(settings, instance, variant, i, asks, expected, found)
                    progress.advance(variant.title)
                    yield found
                for _ in range(num_baseline):
                    again = restart.restart_under_load(instance, asks, expected, settings.warm_s)
                    found.rounds.append(revive_loss.judge_restart(again, instance.server.events()))
                    progress.advance("restart")
                    yield found
                num_baseline = 0


def _lose(
    settings: Settings,
    instance: Instance,
    variant: Variant,
    nth: int,
    asks: list[Ask],
    expected: list[list[int]],
    found: Found,
) -> None:
    """A failure is a finding about this variant; the next round begins with a new server."""
    try:
        found.rounds.append(revive_loss.lose(instance.server, variant, nth, asks, expected, settings.warm_s))
    except (EverserveError, OSError) as error:
        found.failures.append((variant.name, str(error)))
        instance.restart()
