"""What does a model cost on 8, 7, 6, ... 1 devices, and what is it worth?

    measured    `-tp N` for each N, streams side by side: tokens/s, time between tokens and core time against `-tp 1`,
                one process that has everything itself; core time of the busiest shard worker over the mean. All sizes
                get the same prompts, and every token must be the same.
    planned     work and memory of the busiest device, and the KV tokens that fit, beside other ways to use N devices
                (degree_plan.py): for the shapes that are measured, and for those of the paper

On CPUs the process that is compared with stays alive, and takes turns with each size: a slow moment of the machine hits
both. On a GPU, which has room for one server, it is measured as the last size.
"""

import contextlib
import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from everserve.errors import ConfigError, EverserveError
from everserve.model.config import ModelConfig
from everserve.progress import Progress
from everserve_bench import analysis, degree_plan, degree_report, processes, report
from everserve_bench.load import random_prompts
from everserve_bench.slices import Server, Slice, running
from everserve_bench.subject import Subject, check_gpu, is_for_gpu, subject

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SMALL_CACHE = ("--kv-cache-memory-bytes", str(64 << 20))
_BLOCK = 64
# The paper's models, on its devices.
_PAPER_BYTES = 80e9
_LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rope_theta": 5e5,
}  # fmt: skip
_MIXTRAL_8X22B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32768, "hidden_size": 6144,
    "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "sliding_window": None,
    "rope_theta": 1e6,
}  # fmt: skip
PAPER = {"Llama-3.1-70B": _LLAMA_70B, "Mixtral-8x22B": _MIXTRAL_8X22B}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    shapes: tuple[str, ...]
    sizes: tuple[int, ...]
    num_streams: int
    prompt: int
    max_tokens: int
    slices: int  # of each size, after one that warms it up
    num_layers: int | None = None
    room: float = 1.5  # of a device, in the plan: times the whole model


@dataclass(frozen=True)
class Sample:
    """One slice, and the core time of each shard worker in it."""

    slice: Slice
    shard_cpu_s: list[float]


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every token was the same at every size."""
    if 1 not in settings.sizes:
        raise ConfigError("--sizes: 1 must be among them: all others are compared with it")
    for shape in settings.shapes:
        check_gpu(shape)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    steal = report.Steal()
    result: dict[str, Any] = {"settings": asdict(settings), "shapes": [], "paper": _paper(settings)}
    for shape in settings.shapes:
        with subject(shape, settings.num_layers) as served:
            result["shapes"].append(_measure_shape(settings, shape, served))
        report.keep("degree", result, out)
    result["stolen"] = steal.share()
    degree_report.show(result, report.write("degree", result, out))
    return not any(row["num_different"] or row.get("error") for found in result["shapes"] for row in found["rows"])


def _paper(settings: Settings) -> list[dict[str, Any]]:
    found = []
    for name, config in PAPER.items():
        model = degree_plan.model_of(config)
        found.append({"model": name, "divisions": _plan(settings, model, 2, _PAPER_BYTES)})
    return found


def _plan(settings: Settings, model: ModelConfig, item_bytes: int, device_bytes: float) -> list[dict[str, Any]]:
    parts = degree_plan.Parts.of(model, item_bytes, settings.prompt + settings.max_tokens // 2)
    return [
        asdict(degree_plan.divide(model, parts, size, variant, device_bytes or settings.room * parts.whole))
        for size in settings.sizes
        for variant in degree_plan.VARIANTS
    ]


def _measure_shape(settings: Settings, shape: str, served: Subject) -> dict[str, Any]:
    directory = ModelConfig.from_directory(served.model)
    if settings.prompt + settings.max_tokens > served.max_context:
        raise ConfigError(f"--prompt and --tokens: {served.title} has room for {served.max_context} tokens in all")
    plan = _plan(settings, degree_plan.divided(directory), _ITEM_BYTES[directory.dtype], 0.0)
    samples: dict[int, list[Sample]] = {size: [] for size in settings.sizes}
    beside: dict[int, list[Sample]] = {size: [] for size in settings.sizes}  # one process, in the same moments
    answers: dict[int, list[list[int]]] = {}
    errors: dict[int, str] = {}
    with _one_process(settings, shape, served) as one, Progress() as progress:
        progress.begin(served.title, total=len(settings.sizes) * (1 + settings.slices))
        for size in settings.sizes:
            try:
                with _server(settings, shape, served, size, one) as server:
                    turns = [(server, samples[size])]
                    turns += [(one, beside[size])] if one is not None and size > 1 else []
                    answers[size] = _take_turns(settings, served, turns, progress)
            except EverserveError as error:
                errors[size] = str(error)
    rows = [_row(size, samples, beside, answers, errors.get(size)) for size in settings.sizes]
    return {"shape": shape, "model": served.title, "rows": rows, "divisions": plan}


def _flags(settings: Settings, shape: str, served: Subject, size: int) -> tuple[str, ...]:
    length = min(-(-(settings.prompt + settings.max_tokens) // _BLOCK) * _BLOCK, served.max_context)
    flags = (*served.flags, "-tp", str(size), "--no-enable-prefix-caching", "--max-model-len", str(length))
    if not is_for_gpu(shape):
        return (*flags, *_SMALL_CACHE)
    told = ["--max-lost-devices", "0"] if size > 1 else []  # 1/N of everything
    return (*flags, *told, "--max-num-seqs", str(settings.num_streams), "--kv-log", "off")


@contextlib.contextmanager
def _one_process(settings: Settings, shape: str, served: Subject) -> Iterator[Server | None]:
    if is_for_gpu(shape):
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running(served, _flags(settings, shape, served, 1)))
        except EverserveError as error:
            raise ConfigError(f"one process, with which all others are compared, {error}") from error
        yield server


@contextlib.contextmanager
def _server(settings: Settings, shape: str, served: Subject, size: int, one: Server | None) -> Iterator[Server]:
    if size == 1 and one is not None:
        yield one
        return
    with running(served, _flags(settings, shape, served, size)) as server:
        yield server


def _take_turns(
    settings: Settings, served: Subject, turns: Sequence[tuple[Server, list[Sample]]], progress: Progress
) -> list[list[int]]:
    """Slices of each of these servers with the same prompts, one after the other. Returns all tokens of the first."""
    found: list[list[int]] = []
    for slice_ in range(1 + settings.slices):  # slice 0 warms it up
        prompts = random_prompts(served.vocab_size, settings.num_streams, settings.prompt, seed=slice_)
        for server, samples in random.Random(slice_).sample(turns, len(turns)):
            sample, tokens = _slice(server, prompts, settings.max_tokens)
            if slice_ > 0:
                samples.append(sample)
            if server is turns[0][0]:
                found += tokens
        progress.advance()
    return found


def _slice(server: Server, prompts: list[list[int]], max_tokens: int) -> tuple[Sample, list[list[int]]]:
    pids = _shard_pids(server)
    before = [processes.cpu_s([pid]) for pid in pids]
    found, tokens = server.measure(prompts, max_tokens)
    after = [processes.cpu_s([pid]) for pid in pids] if pids == _shard_pids(server) else before
    return Sample(found, [end - begin for begin, end in zip(before, after, strict=True)]), tokens


def _shard_pids(server: Server) -> list[int]:
    """The pids of the workers that have shards and no streams."""
    workers = processes.cluster(server.server)["workers"]
    return [worker["pid"] for worker in workers if worker["roles"] == ["expert"]]


def _row(
    size: int,
    samples: dict[int, list[Sample]],
    beside: dict[int, list[Sample]],
    answers: dict[int, list[list[int]]],
    error: str | None,
) -> dict[str, Any]:
    """What was measured of one size, and the ratios to one process: slice by slice, if it ran at the same time."""
    row: dict[str, Any] = {"size": size, "error": error, "num_different": 0}
    found, reference = samples[size], beside[size] or samples[1]
    if error is not None or not found:
        return row
    row["num_different"] = num_different(answers[size], answers.get(1, []))
    for figure in ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "cpu_ms_per_token"):
        values = [getattr(sample.slice, figure) for sample in found]
        row[figure] = report.spread(values)
        if size > 1 and len(reference) == len(found):
            theirs = [getattr(sample.slice, figure) for sample in reference]
            row[f"{figure}_to_one"] = report.spread(analysis.ratios(values, theirs))
    shards = [sample.shard_cpu_s for sample in found if sum(sample.shard_cpu_s) > 0]
    if shards:
        row["shard_work_max_over_mean"] = median(max(one) * len(one) / sum(one) for one in shards)
    return row


def num_different(answers: list[list[int]], expected: list[list[int]]) -> int:
    """Tokens, over all streams; a stream that the other one has not got counts whole."""
    differences = sum(
        verdict.num_different + verdict.num_lost
        for verdict in (analysis.compare(ours, theirs) for ours, theirs in zip(answers, expected, strict=False))
    )
    return differences + sum(map(len, answers[len(expected) :]))
