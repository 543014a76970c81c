"""`everserve bench prefill --alone`: one engine with everything, prompts and nothing else, no server.

Tokens per second by length and number of prompts, and by how many tokens a step has at most, against what arithmetic
and the reading of weights allow (prefill_engine.py). With `--profile` also where the time of a full step goes; with
`--beside` also prompts beside streams that decode (prefill_beside.py).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve_bench import prefill_engine, prefill_report, report
from everserve_bench.subject import check_gpu, is_for_gpu, subject


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    shape: str
    points: tuple[tuple[int, int], ...]  # tokens of a prompt, and prompts at once
    step_tokens: tuple[int, ...] = ()  # that a step has at most; none: as a server's has by default
    repeats: int = 3
    profiled: bool = False
    beside: bool = False
    num_layers: int | None = None


def run(settings: Settings, out: Path | None) -> None:
    is_gpu = is_for_gpu(settings.shape)
    check_gpu(settings.shape)
    if settings.profiled and not is_gpu:
        raise ConfigError("--profile shows the kernels of a GPU: choose a --shape for one")
    with subject(settings.shape, settings.num_layers) as served:
        found = prefill_engine.measure_apart(
            str(DEMO_MODEL) if served.model == "demo" else served.model,
            "cuda" if is_gpu else "cpu",
            [point for point in settings.points if point[0] < served.max_context],
            settings.repeats,
            settings.step_tokens,
            settings.profiled,
            settings.beside,
        )
    result: dict[str, Any] = {"model": served.title, "settings": asdict(settings), "engine": found}
    prefill_report.show_alone(result, report.write("prompts", result, out))
