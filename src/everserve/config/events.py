"""Where events are written, and how many are kept."""

from typing import Annotated

from everserve.config.base import Config, Flag
from everserve.errors import ConfigError

_FEWEST_BYTES = 1 << 20


class EventLogConfig(Config, frozen=True, kw_only=True):
    """The files of all processes of an instance."""

    directory: Annotated[str | None, Flag("Directory for typed events, a file per process.", name="event_log")] = None
    max_bytes: Annotated[
        int,
        Flag("Most bytes of all files in --event-log; the oldest events go first. 0: no limit.",
             name="event_log_bytes", min=0),
    ] = 256 << 20  # fmt: skip

    def check(self) -> None:
        if 0 < self.max_bytes < _FEWEST_BYTES:
            raise ConfigError(f"--event-log-bytes {self.max_bytes}: choose 0 or at least {_FEWEST_BYTES}")
