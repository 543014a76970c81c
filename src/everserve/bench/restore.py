"""A stream loses its worker: how long until its next token, and at what price?

    log         its KV is copied from the log of the lost worker, verified on arrival, into another worker's pool
    parallel    one prefill over prompt and tokens
    sequential  prompt and tokens one after the other, as they were computed before

On a GPU there are two logs: `anchor`, the lost worker's pool itself, copied device to device, and `mirror`, in host
memory. One token after the other takes long there: only short streams, and each only once.

Engines in this process, with all experts, on a CPU on one thread (a restoring worker shares its machine with others):
what is measured is the worker's own part, from the moment it is given the stream to the next token. The lost worker is
indistinguishable from a real one by its log. All ways must give the same next token.

Bytes moved: KV that is read from the log, or what the experts' rows would be on the wire between workers (each token's
row to at least one expert worker, and top-k rows back, in each layer).
"""

import contextlib
import gc
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from everserve.bench import report, restore_report
from everserve.bench.on_gpu import check_gpu, is_for_gpu
from everserve.bench.restore_cpu import CpuWorkers
from everserve.bench.restore_stage import NUM_PROMPT, Sample, Stage, Way, Workers
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress

POINTS = (64, 128, 256, 512, 1024, 2048, 4096)
GPU_POINTS = (*POINTS, 8192)
GPU_MOST_SEQUENTIAL = 2048
SEQUENTIAL = "sequential"
_BLOCK = 64  # tokens: a whole number of blocks on any device


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    points: tuple[int, ...]
    rounds: int
    shape: str = BUNDLED
    num_layers: int | None = None
    most_sequential: int | None = None  # longer streams are not computed again token by token

    @property
    def context(self) -> int:
        """Room for the longest stream and its next token."""
        return -(-(max(self.points) + 1) // _BLOCK) * _BLOCK

    def includes(self, way: str, point: int, round_: int) -> bool:
        """Round 0 is a warm-up."""
        if way != SEQUENTIAL:
            return True
        is_short = self.most_sequential is None or point <= self.most_sequential
        return is_short and (not is_for_gpu(self.shape) or round_ == 1)


def ways_of(settings: Settings) -> dict[str, Way]:
    """The first one is the baseline of the comparison."""
    again = {"parallel": Way("off", max(settings.points)), SEQUENTIAL: Way("off", 1)}
    if is_for_gpu(settings.shape):
        return {"anchor": Way("anchor", 2048), "mirror": Way("mirror", 2048), **again}
    return {"log": Way("mirror", 512), **again}


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all ways gave the same next token."""
    gc.collect()
    gc.freeze()
    ways = ways_of(settings)
    with subject(settings.shape, settings.num_layers) as served, _open(served, settings) as workers:
        stage = Stage(workers, ways)
        samples = measure(stage, settings)
    result = {
        "model": f"{served.title}, context {settings.context}",
        "settings": asdict(settings) | {"prompt": NUM_PROMPT},
        "bytes_per_token": stage.bytes_per_token,
        **restore_report.summarize(samples, tuple(ways)),
    }
    restore_report.show(result, report.write("restore", result, out))
    return bool(result["is_exact"])


def measure(stage: Stage, settings: Settings) -> list[Sample]:
    """All rounds, in another order each time."""
    samples: list[Sample] = []
    plan = [
        (round_, point, [way for way in stage.ways if settings.includes(way, point, round_)])
        for round_ in range(settings.rounds + 1)
        for point in settings.points
    ]
    with Progress().begin("restore", sum(len(ways) for _, _, ways in plan)) as progress:
        for round_, point, ways in plan:
            with stage.lost(point, seed=round_) as spec:
                for way in random.Random(f"{round_}/{point}").sample(ways, len(ways)):
                    sample = stage.restore(spec, way, round_)
                    samples += [sample] if round_ else []  # round 0 warms everything up and is thrown away
                    progress.advance()
    return samples


@contextlib.contextmanager
def _open(served: Subject, settings: Settings) -> Iterator[Workers]:
    check_gpu(settings.shape)
    if is_for_gpu(settings.shape):
        from everserve.bench.restore_gpu import GpuWorkers  # noqa: PLC0415 (kernels)

        yield GpuWorkers(served.model, settings.context)
        return
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        yield CpuWorkers(longer_context(Path(directory), settings.context), settings.context)


def longer_context(directory: Path, context: int) -> str:
    """The bundled model with room for longer streams: rotary embeddings have no end of their own."""
    shutil.copytree(DEMO_MODEL, directory, dirs_exist_ok=True)
    config = report.read_json(directory / "config.json") | {"max_position_embeddings": context}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
