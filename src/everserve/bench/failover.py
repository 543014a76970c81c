"""What does a client see when a worker is killed, next to restarting everything?

Streams run side by side on a cluster of the bundled model, or of a large shape on a GPU. After a warm stretch one
worker gets SIGKILL: an expert worker, an attention worker, turn by turn. The baseline, in the same run and under the
same load, is what servers without failover do: everything is killed, everything is started again, and clients ask again
from the prompt. It is a generous one: the restart begins as soon as the last process is dead, without any detection.

Every stream is compared, token by token, with the same request undisturbed: a benchmark that loses tokens has failed.
On a GPU it has also failed if a death took another worker along.
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.bench import failover_report, kill, plot, report, restart
from everserve.bench.incident import Round
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, make_asks
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError
from everserve.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_attention: int
    num_expert: int
    num_streams: int
    max_tokens: int
    rounds: int
    baseline_rounds: int
    warm_s: float
    shape: str = BUNDLED
    num_layers: int | None = None
    num_prompt: int = 32
    spares: int | None = None  # None, here and below: as the server does by itself
    kv_log: str | None = None

    def flags(self, served: Subject) -> tuple[str, ...]:
        return flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, and on a GPU no survivor was harmed."""
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(
                f"--tokens {settings.max_tokens}: the context of the {served.title} is {served.max_context}, prompt"
                " included"
            )
        asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
        rounds, result = list[Round](), dict[str, Any]()
        for round_ in _measure(settings, served, asks):
            rounds.append(round_)
            result = {"model": served.title, "settings": asdict(settings), **failover_report.summarize(rounds)}
            result["rounds"] = [asdict(one) for one in rounds]
            report.keep("failover", result, out)
    path = report.write("failover", result, out)
    failover_report.show(result, path, plot.write(result, path.with_suffix(".png")))
    return failover_report.is_passed(result)


def _measure(settings: Settings, served: Subject, asks: list[Ask]) -> Iterator[Round]:
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(contextlib.closing(Instance(served.model, settings.flags(served))))
        progress = stack.enter_context(Progress())
        progress.begin("failover", total=1 + 2 * settings.rounds + settings.baseline_rounds)
        expected = kill.undisturbed(instance.server, asks)
        progress.advance()
        for measured in _schedule(settings, instance, asks, expected):
            progress.advance()
            yield measured


def _schedule(settings: Settings, instance: Instance, asks: list[Ask], expected: list[list[int]]) -> Iterator[Round]:
    """Kinds of faults in turn, so that a slow minute of the machine does not hit one of them alone."""
    for i in range(max(settings.rounds, settings.baseline_rounds)):
        if i < settings.rounds:
            for fault, rank in kill.victims(i, settings.num_attention, settings.num_expert).items():
                yield kill.kill_worker(instance.server, fault, rank, asks, expected, settings.warm_s)
        if i < settings.baseline_rounds:
            yield restart.kill_everything(instance, asks, expected, settings.warm_s)
