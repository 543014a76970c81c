"""What do the protections cost when nothing fails, and what does splitting the model over processes cost?

Each variant is compared with 2+2 (attention + expert workers) of the same round, and its time between tokens with one
process too; variants.py says how.

On a GPU all variants but those without a log have one: the pool itself, in memory that outlives its worker.

Slots for what others left in memory (`--map-experts`) exist only where workers do not hold all experts. So 2+2 with
them is to be compared with 2+2 without shadows, on CPUs with experts in memory.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.errors import ConfigError
from everserve_bench import options
from everserve_bench.scenario import Result
from everserve_bench.scenarios.comparison import FIGURES, Comparison, Flags, compared
from everserve_bench.subject import is_for_gpu
from everserve_bench.tables import ratio
from everserve_bench.variants import Samples

REFERENCE = "2+2"
ONE_PROCESS = "one process"
ALL_OFF = "2+2, all off"
_TO_ONE_PROCESS = f"itl_p50_ms_to_{ONE_PROCESS}"


def _split(num: int) -> tuple[str, ...]:
    return "--attention-workers", str(num), "--expert-workers", str(num)


_NO_DETECTION, _NO_SHADOWS = ("--detect-ms", "0"), ("--shadow-experts", "0")
_IN_MEMORY, _MAPPED = ("--weights", "memory", "--map-experts", "off"), ("--map-experts", "on")
_NO_LOG, _GPU_LOG, _NO_SPARES = ("--kv-log", "off"), ("--kv-log", "anchor"), ("--spares", "0")
VARIANTS: dict[str, tuple[str, ...]] = {
    ONE_PROCESS: (),
    "one process, 1 thread": ("--threads", "1"),
    "1+1": _split(1),
    REFERENCE: _split(2),
    "2+2, no detection": (*_split(2), *_NO_DETECTION),
    "2+2, no shadows": (*_split(2), *_NO_SHADOWS),
    "in memory, no shadows": (*_split(2), *_NO_SHADOWS, *_IN_MEMORY),
    "in memory, no shadows, mapped slots": (*_split(2), *_NO_SHADOWS, *_IN_MEMORY[:2], *_MAPPED),
    "2+2, no log": (*_split(2), *_NO_LOG),
    ALL_OFF: (*_split(2), *_NO_DETECTION, *_NO_SHADOWS, *_NO_LOG),
}
GPU_VARIANTS: dict[str, tuple[str, ...]] = {
    ONE_PROCESS: _GPU_LOG,
    "1+1": (*_split(1), *_GPU_LOG),
    REFERENCE: (*_split(2), *_GPU_LOG),
    "4+4": (*_split(4), *_GPU_LOG),
    "8+8": (*_split(8), *_GPU_LOG),
    "2+2, no detection": (*_split(2), *_GPU_LOG, *_NO_DETECTION),
    "2+2, no shadows": (*_split(2), *_GPU_LOG, *_NO_SHADOWS),
    "no shadows, mapped slots": (*_split(2), *_GPU_LOG, *_NO_SHADOWS, *_MAPPED),
    "2+2, no log": (*_split(2), *_NO_LOG),
    ALL_OFF: (*_split(2), *_NO_DETECTION, *_NO_SHADOWS, *_NO_LOG, *_NO_SPARES),
}


class Overhead(Comparison, frozen=True, kw_only=True):
    """What each protection costs when nothing fails. One process, 1+1, 2+2, and 2+2 without each of them.

    Exit status 1 if variants answered different tokens.
    """

    NAME: ClassVar[str] = "overhead"
    REFERENCE: ClassVar[str] = REFERENCE

    streams: Annotated[tuple[int, ...], options.on_device("Concurrent streams; repeatable.", (8, 1), (64,), min=1)]
    max_tokens: Annotated[int, options.FIXED_TOKENS] = 192
    rounds: Annotated[int, options.on_device("Rounds, each with all variants in random order.", 15, 3, min=1)]
    variants: Annotated[
        tuple[str, ...],
        Flag("Only these variants; repeatable. Default: all. Names as in the table.", name="variant"),
    ] = ()

    def check(self) -> None:
        known = self._known()
        unknown = [name for name in self.variants if name not in known]
        if unknown:
            raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(map(repr, known))}")
        if self.variants and REFERENCE not in self.variants:
            raise ConfigError(f"--variant: {REFERENCE!r} must be among them: all variants are compared with it")

    def _known(self) -> Flags:
        return GPU_VARIANTS if is_for_gpu(self.shape) else VARIANTS

    def variants_told(self) -> Flags:
        known = self._known()
        return {name: known[name] for name in self.variants or known}

    def told(self) -> Result:
        return super().told() | {"variants": list(self.variants_told())}

    @classmethod
    def summarize(cls, samples: Samples) -> Result:
        """Adds the price of dividing the model, time between tokens next to one process; and of all protections
        together, 2+2 with them next to 2+2 without."""
        result = super().summarize(samples)
        for row in result["variants"]:
            key, undivided = (row["variant"], row["streams"]), (ONE_PROCESS, row["streams"])
            if undivided in samples:
                row[_TO_ONE_PROCESS] = compared(samples[key], samples[undivided], "itl_p50_ms")
        result["protections"] = [
            {"streams": num, **{figure: compared(samples[REFERENCE, num], slices, figure) for figure in FIGURES}}
            for (name, num), slices in samples.items()
            if name == ALL_OFF
        ]
        return result

    @classmethod
    def remarks(cls, title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
        for row in rows:
            if _TO_ONE_PROCESS in row and row["variant"] != ONE_PROCESS:
                yield f"{title}: between tokens p50, {row['variant']} / {ONE_PROCESS}: {ratio(row[_TO_ONE_PROCESS])}"

    @classmethod
    def verdicts(cls, result: Result) -> Iterator[str]:
        for cost in result["protections"]:
            yield (
                f"{cost['streams']} streams: all protections together ({REFERENCE} / all off): tokens/s"
                f" {ratio(cost['tokens_per_s'])}, between tokens p50 {ratio(cost['itl_p50_ms'])}, core time"
                f" {ratio(cost['cpu_ms_per_token'])}"
            )
