"""How many workers an instance has, and when one of them counts as dead."""

from typing import Annotated

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError

MAX_RANKS = 64  # of an instance: C and kernels keep sets of ranks in one word (backends/cpu/csrc/lanes/lane.h)

_MIN_DETECT_MS, _MAX_DETECT_MS = 20, 60_000  # below that, busy machines make live workers look dead


class ClusterConfig(Config, frozen=True, kw_only=True):
    """Attention workers are the first ranks, expert workers follow."""

    attention_workers: Annotated[int, Flag("Workers that own requests and their KV cache.", min=1, max=MAX_RANKS)] = 1
    expert_workers: Annotated[
        int, Flag("Workers that own experts. 0: each attention worker has all experts itself.", min=0, max=MAX_RANKS)
    ] = 0
    shadow_experts: Annotated[
        int | None,
        Flag("Inactive copies per expert worker and layer. Default: enough to survive the death of any one.", min=0),
    ] = None
    spares: Annotated[
        int, Flag("Processes per device that wait to become workers: replacements start sooner.", min=0, max=8)
    ] = 0
    detect_ms: Annotated[
        float,
        Flag("A worker that shows no sign of life for this long counts as dead. 0: only those whose process ended."),
    ] = 50.0

    def check(self) -> None:
        if self.num_workers > MAX_RANKS:
            raise ConfigError(f"{self.num_workers} workers: an instance has at most {MAX_RANKS}")
        if self.detect_ms and not _MIN_DETECT_MS <= self.detect_ms <= _MAX_DETECT_MS:
            raise ConfigError(f"--detect-ms {self.detect_ms:g}: choose 0 or {_MIN_DETECT_MS} to {_MAX_DETECT_MS}")

    @property
    def num_workers(self) -> int:
        return self.attention_workers + self.expert_workers
