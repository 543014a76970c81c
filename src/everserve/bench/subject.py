"""What a benchmark serves: the bundled model, or random weights: of a small shape, or of a large one on a GPU."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everserve.bench import report
from everserve.bench.device_shapes import SHAPES, write_shape
from everserve.bench.shapes import SMALL, write_random_model
from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL

BUNDLED = "bundled"
ON_CPUS = "small-"  # shapes for CPUs begin with it


@dataclass(frozen=True)
class Subject:
    """A model, and how a server is told to serve it."""

    title: str  # in tables and in the JSON
    model: str  # as `everserve serve` takes it
    vocab_size: int
    max_context: int
    flags: tuple[str, ...] = ()
    num_experts: int = 0  # per layer


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
    small = SMALL.get(shape.removeprefix(ON_CPUS)) if shape.startswith(ON_CPUS) else None
    if shape not in SHAPES and small is None:
        names = (BUNDLED, *SHAPES, *(f"{ON_CPUS}{name}" for name in SMALL))
        raise ConfigError(f"--shape {shape}: choose {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        if small is not None:
            yield _small(shape, Path(directory), small | ({"num_hidden_layers": num_layers} if num_layers else {}))
            return
        config = report.read_json(write_shape(Path(directory), shape, num_layers) / "config.json")
        yield Subject(
            f"{shape}, {config['num_hidden_layers']} layers",
            directory,
            config["vocab_size"],
            config["max_position_embeddings"],
            ("--device", "cuda", "--load-format", "dummy"),
            _num_experts(config),
        )


def _small(shape: str, directory: Path, config: dict[str, Any]) -> Subject:
    """Of the size of the bundled model's relatives, for CPUs."""
    write_random_model(directory, config)
    title = f"{shape}, {config['num_hidden_layers']} layers"
    context = config["max_position_embeddings"]
    return Subject(title, str(directory), config["vocab_size"], context, num_experts=_num_experts(config))


def _num_experts(config: dict[str, Any]) -> int:
    """Qwen3 and Mixtral call it differently; a dense model has none."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)
