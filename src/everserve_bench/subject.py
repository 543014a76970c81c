"""What the servers of a benchmark serve: the bundled model, or a shape with random weights: a small one, or on a GPU a
large one."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everserve.errors import ConfigError
from everserve.memory.device import is_available
from everserve.model.bundled import DEMO_MODEL
from everserve_bench import report
from everserve_bench.device_shapes import SHAPES, write_shape

BUNDLED = "bundled"
_SMALL = "small-"  # prefix


@dataclass(frozen=True)
class Subject:
    """A model, and how a server is told to serve it."""

    title: str  # in tables and in the JSON
    model: str  # as `everserve serve` takes it
    vocab_size: int
    max_context: int
    flags: tuple[str, ...] = ()
    num_experts: int = 0  # per layer


def is_for_gpu(shape: str) -> bool:
    return shape != BUNDLED and not shape.startswith(_SMALL)


def check_gpu(shape: str) -> None:
    """Say at once what would otherwise only show when something is started."""
    if is_for_gpu(shape) and not is_available():
        raise ConfigError(f"--shape {shape} needs an NVIDIA GPU, and there is none here")


@contextlib.contextmanager
def subject(shape: str = BUNDLED, num_layers: int | None = None) -> Iterator[Subject]:
    """For as long as its files are needed."""
    if shape == BUNDLED:
        if num_layers is not None:
            raise ConfigError("--layers: the bundled model has those that it has; choose a --shape")
        config = report.read_json(DEMO_MODEL / "config.json")
        yield Subject(
            "bundled model",
            "demo",
            config["vocab_size"],
            config["max_position_embeddings"],
            num_experts=_num_experts(config),
        )
        return
    from everserve_bench.shapes import SMALL, write_random_model  # noqa: PLC0415 (torch)

    small_shapes = {f"{_SMALL}{name}": config for name, config in SMALL.items()}
    if shape not in SHAPES and shape not in small_shapes:
        raise ConfigError(f"--shape {shape}: choose {', '.join((BUNDLED, *small_shapes, *SHAPES))}")
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        is_small = shape in small_shapes
        if is_small:
            config = small_shapes[shape] | ({"num_hidden_layers": num_layers} if num_layers else {})
            write_random_model(Path(directory), config)
        else:
            config = report.read_json(write_shape(Path(directory), shape, num_layers) / "config.json")
        yield Subject(
            f"{shape}, {config['num_hidden_layers']} layers",
            directory,
            config["vocab_size"],
            config["max_position_embeddings"],
            () if is_small else ("--device", "cuda", "--load-format", "dummy"),
            _num_experts(config),
        )


def _num_experts(config: dict[str, Any]) -> int:
    """Qwen3 and Mixtral call it differently; a dense model has none."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)
