"""Which subjects are for a GPU, and whether there is one."""

from everserve.bench.subject import BUNDLED, SMALL_SHAPES
from everserve.errors import ConfigError
from everserve.memory.device import is_available


def is_for_gpu(shape: str) -> bool:
    return shape != BUNDLED and shape not in SMALL_SHAPES


def check_gpu(shape: str) -> None:
    """Say at once what would otherwise only show when something is started."""
    if is_for_gpu(shape) and not is_available():
        raise ConfigError(f"--shape {shape} needs an NVIDIA GPU, and there is none here")
