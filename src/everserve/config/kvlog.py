"""Where KV outlives its worker, and its device.

    --kv-log       where a stream's KV is when its worker's process has ended
    --kv-shadow    with -tp on CPUs: what there is of heads' KV besides, in case a device is lost with all memory on it

With -tp KV outlives processes in any case but `--kv-log off`, so there the mirror of `--kv-log mirror` is the shadow.
"""

from typing import Annotated

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError


class LogConfig(Config, frozen=True, kw_only=True):
    """The KV log of every attention worker."""

    mode: Annotated[  # the way from a device to the memory of its host is long: no mirror there
        str,
        Flag(
            "Where KV outlives its worker. mirror: a copy; anchor: the cache itself is memory that survives; off:"
            " nowhere, streams of a dead worker are computed again",
            name="kv_log",
            choices=("mirror", "anchor", "off"),
            on_device={"cpu": "mirror", "cuda": "anchor"},
        ),
    ]
    shadow: Annotated[
        str | None,
        Flag(
            "With -tp on CPUs: what the KV of a lost device is fetched from. mirror: a copy in host memory; parity:"
            " memory of other devices, from which that of any one is rebuilt; off: nothing, it is computed again."
            " Default: as --kv-log",
            name="kv_shadow",
            choices=("off", "mirror", "parity"),
        ),
    ] = None

    def check(self) -> None:
        if self.mode == "off" and self.shadow in ("mirror", "parity"):
            raise ConfigError(
                f"--kv-shadow {self.shadow} with --kv-log off: without a log no process can tell what KV is right; use"
                " --kv-log anchor, or leave it out"
            )
        if self.mode == "anchor" and self.shadow == "mirror":
            raise ConfigError("--kv-shadow mirror with --kv-log anchor: say --kv-log mirror, it is the same mirror")

    @property
    def kv_shadow(self) -> str:
        """The kind of shadow of heads' KV."""
        return self.shadow or ("mirror" if self.mode == "mirror" else "off")
