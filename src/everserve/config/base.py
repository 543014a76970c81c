"""What a config is, and the flag of a field: `name: Annotated[int, Flag("What it does.", min=1)] = 8`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What one component is told."""

    def check(self) -> None:
        """Raise ConfigError if the values cannot be right, whatever is served. Choices and ranges are in the flags."""


@dataclass(frozen=True)
class Flag:
    """How the command line sets a field. The flag is named like the field if `name` is empty.

    A field without a default of its own either has one for each kind of device (`on_device`), or is filled in by
    `everserve serve` where the command line says nothing.
    """

    help: str
    name: str = ""
    short: str = ""  # another spelling, with its dash
    min: float | None = None
    max: float | None = None
    choices: tuple[Any, ...] = ()
    on_device: Mapping[str, Any] | None = None  # "cpu", "cuda"
    envvar: str | None = None
    parse: Callable[[Any], Any] | None = None  # from what the command line says to what the field holds
