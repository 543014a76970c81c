"""A stream loses its worker: how long until its next token, and at what price?

    log         its KV is copied from the log of the lost worker, verified on arrival, into another worker's pool
    parallel    one prefill over prompt and tokens
    sequential  prompt and tokens one after the other, as they were computed before

Engines in this process, with all experts, on one thread (a restoring worker shares its machine with others): what is
measured is the worker's own part, from the moment it is given the stream to the next token. The lost worker is real as
far as anybody can tell from its log. All three must give the same next token.

Bytes moved: KV that is read from the log, or what the experts' rows would be on the wire between workers (each token's
row to at least one expert worker, and top-k rows back, in each layer).
"""

import gc
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from everserve.anchor.memory import create_memory
from everserve.bench import report
from everserve.bench.engine import random_prompts
from everserve.datapath.local import LocalExperts
from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve.runtime.messages import StartWorker, WorkerSettings
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.requests import RequestSpec, SamplingParams
from everserve.worker.build import EngineBuilder, Opened, load_experts, open_model

POINTS = (64, 128, 256, 512, 1024, 2048, 4096)
WAYS = ("log", "parallel", "sequential")
NUM_PROMPT = 32
_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    points: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class Sample:
    """One restored stream."""

    point: int
    way: str
    time_ms: float
    compute_ms: float  # core time
    bytes_moved: int
    token: int


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all ways gave the same next token."""
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        stage = Stage(_longer_context(Path(directory)))
        samples = _measure(stage, settings)
    result = {
        "model": f"bundled model, context {_CONTEXT}",
        "settings": asdict(settings) | {"prompt": NUM_PROMPT},
        "bytes_per_token": stage.bytes_per_token,
        **summarize(samples),
    }
    _show(result, report.write("restore", result, out))
    return bool(result["is_exact"])


def _measure(stage: "Stage", settings: Settings) -> list[Sample]:
    samples: list[Sample] = []
    total = (settings.rounds + 1) * len(settings.points) * len(WAYS)
    with Progress().begin("restore", total) as progress:
        for round_ in range(settings.rounds + 1):  # round 0 warms everything up and is thrown away
            for point in settings.points:
                lost = stage.lose(point, seed=round_)
                for way in random.Random(f"{round_}/{point}").sample(WAYS, len(WAYS)):
                    sample = stage.restore(lost, way)
                    samples += [sample] if round_ else []
                    progress.advance()
                lost.close()
    return samples


@dataclass
class Lost:
    """A stream whose worker is gone: what its client has, and the log."""

    spec: RequestSpec
    log: Log
    release: Callable[[], None]

    def close(self) -> None:
        self.release()
        self.log.close()


class Stage:
    """The workers in question."""

    def __init__(self, model: Path) -> None:
        self._start = _start(model)
        self._opened: Opened = open_model(self._start)
        self._experts = LocalExperts(load_experts(self._opened, "auto", slots=None))
        shape = self._opened.sizes.log
        self.bytes_per_token = shape.block_bytes // shape.block_size
        self._survivors = {
            "log": self._build(max_batched=512),
            "parallel": self._build(max_batched=_CONTEXT),
            "sequential": self._build(max_batched=1),
        }

    def _build(self, max_batched: int) -> tuple[Engine, EngineBuilder, int]:
        start = _start(Path(self._start.settings.model), max_batched)
        fd = create_memory("log", self._opened.sizes.log.num_bytes)
        builder = EngineBuilder(start, self._opened, os.dup(fd))
        return builder.build(self._experts), builder, fd

    def lose(self, point: int, seed: int) -> Lost:
        """A stream that has come so far: `point` tokens in all, each but the last in the log."""
        tokens = random_prompts(self._opened.model.vocab_size, 1, point, seed)[0]
        engine, builder, fd = self._build(max_batched=512)
        id = f"stream-{point}-{seed}"
        engine.add(RequestSpec(id=id, prompt=tokens[:-1], params=SamplingParams(max_tokens=2, temperature=0.0)))
        while not engine.step().outputs:
            engine.log_step()
        engine.log_step()
        log = Log(fd, self._opened.sizes.log)
        os.close(fd)
        params = SamplingParams(max_tokens=point + 1, temperature=0.0)
        spec = RequestSpec(id=id, prompt=tokens[:NUM_PROMPT], known=tokens[NUM_PROMPT:], params=params)

        def release() -> None:
            engine.cancel_all()
            assert builder.log is not None
            builder.log.close()

        return Lost(spec, log, release)

    def restore(self, lost: Lost, way: str) -> Sample:
        """From the moment that the stream is given to a worker to its next token."""
        engine, builder, _ = self._survivors[way]
        num_tokens = len(lost.spec.prompt) + len(lost.spec.known)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        saved = None
        if way == "log":
            record = lost.log.find(key_of(lost.spec.id))
            assert record is not None and record.num_tokens == num_tokens - 1, "all of it is in the log"
            saved = Saved.of(lost.log, record, builder.log)
        engine.add(lost.spec, saved)
        while not (outputs := engine.step().outputs):
            pass
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        engine.log_step()
        engine.cancel_all()
        token = outputs[0].token
        assert token is not None
        return Sample(num_tokens, way, 1e3 * took_s, 1e3 * cpu_s, self._bytes_moved(way, num_tokens), token)

    def _bytes_moved(self, way: str, num_tokens: int) -> int:
        model = self._opened.model
        rows = num_tokens * len(model.moe_layers) * (1 + model.experts_per_token) * model.hidden_size * 4
        return num_tokens * self.bytes_per_token if way == "log" else rows


def _start(model: Path, max_batched: int = 512) -> StartWorker:
    settings = WorkerSettings(
        model=str(model),
        dtype="auto",
        max_model_len=_CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=max_batched,
        max_prefill_while_decoding=max_batched,
        block_size=16,
        kv_cache_bytes=1 << 30,
        kv_log="mirror",
        enable_prefix_caching=False,
        batch_invariant=False,
        num_threads=1,
        fixed_routes=(0, 0),
        event_log=None,
    )
    return StartWorker(
        rank=Rank(0),
        incarnation=Incarnation(1),
        roles=(Role.ATTENTION, Role.EXPERT),
        settings=settings,
        num_workers=1,
        slots=None,
        detect_ms=0.0,
        memory=("log-0.1",),
    )


def _longer_context(directory: Path) -> Path:
    """The bundled model with room for longer streams: rotary embeddings have no end of their own."""
    shutil.copytree(DEMO_MODEL, directory, dirs_exist_ok=True)
    config = report.read_json(directory / "config.json") | {"max_position_embeddings": _CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# -- what was found ------------------------------------------------------------------------------


def summarize(samples: list[Sample]) -> dict[str, Any]:
    """Medians and spreads by length and way, and how many times faster the log is."""
    rows = []
    for point in sorted({sample.point for sample in samples}):
        row: dict[str, Any] = {"tokens": point}
        for way in WAYS:
            found = [sample for sample in samples if (sample.point, sample.way) == (point, way)]
            row[way] = {
                "time_ms": report.spread([sample.time_ms for sample in found]),
                "compute_ms": report.spread([sample.compute_ms for sample in found]),
                "bytes_moved": found[0].bytes_moved,
            }
        for way in WAYS[1:]:
            row[f"{way}_is_slower"] = row[way]["time_ms"]["median"] / row["log"]["time_ms"]["median"]
        rows.append(row)
    by_stream: dict[tuple[int, int], set[int]] = {}
    for i, sample in enumerate(samples):
        by_stream.setdefault((sample.point, i // len(WAYS)), set()).add(sample.token)
    return {"points": rows, "is_exact": all(len(tokens) == 1 for tokens in by_stream.values())}


def _show(result: dict[str, Any], path: Path) -> None:
    columns = ["tokens", "log ms", "parallel ms", "sequential ms", "parallel / log", "sequential / log"]
    report.print_table(
        f"From the loss of a stream to its next token: medians of {result['settings']['rounds']} (worst)",
        columns,
        [
            [
                str(row["tokens"]),
                *(f"{row[way]['time_ms']['median']:.1f} ({row[way]['time_ms']['max']:.1f})" for way in WAYS),
                f"{row['parallel_is_slower']:.1f}x",
                f"{row['sequential_is_slower']:.0f}x",
            ]
            for row in result["points"]
        ],
    )
    report.print_table(
        "Its price",
        ["tokens", *(f"{way} core ms" for way in WAYS), *(f"{way} MB" for way in WAYS)],
        [
            [
                str(row["tokens"]),
                *(f"{row[way]['compute_ms']['median']:.1f}" for way in WAYS),
                *(f"{row[way]['bytes_moved'] / 1e6:.2f}" for way in WAYS),
            ]
            for row in result["points"]
        ],
    )
    flat = [row["log"]["time_ms"]["median"] for row in result["points"]]
    print(f"from the log: {min(flat):.1f} to {max(flat):.1f} ms over all lengths (median {median(flat):.1f})")
    print("the next token is the same in all ways" if result["is_exact"] else "FAILED: the ways disagree")
    print(f"written to {path}")
