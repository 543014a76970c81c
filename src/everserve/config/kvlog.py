"""Where KV outlives its worker."""

from typing import Annotated

from everserve.config.base import Config, Flag


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
