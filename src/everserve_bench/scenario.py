"""What a benchmark is: a question, with its flags, its load, its faults, its baseline, and what counts as passed.

Its fields are the flags of `everserve bench NAME`, and stand in the JSON as `settings`; its docstring is the help of
that command. runner.py runs it, tables.py prints what it found, options.py has flags that several of them have.

`measure` yields all that is known so far, after each step: as much is in the file of a run that is cut short. A result
is JSON from the beginning; `show` reads nothing else, so `everserve bench show` prints the tables of any earlier run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from everserve.config.base import Config
from everserve.errors import ConfigError
from everserve.progress import Progress
from everserve_bench import options
from everserve_bench.subject import BUNDLED, Subject
from everserve_bench.tables import Table

Result = dict[str, Any]


class Scenario(Config, frozen=True, kw_only=True):
    """A benchmark of what a server does, or a part of it."""

    NAME: ClassVar[str]  # of the command, and of the JSON file

    shape: Annotated[str, options.SHAPE] = BUNDLED
    num_layers: Annotated[int | None, options.LAYERS] = None

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        """What is known after each step. Raises ConfigError at once if the subject has no room for the load."""
        raise NotImplementedError

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        """Tables and lines, in order."""
        raise NotImplementedError

    @staticmethod
    def is_passed(result: Result) -> bool:
        """Whether what was measured works; else the exit status is 1."""
        raise NotImplementedError

    @staticmethod
    def plot(result: Result, path: Path) -> Path | None:
        """A picture beside the JSON, if there is matplotlib."""
        return None

    HAS_PLOT: ClassVar[bool] = False

    def told(self) -> Result:
        """The settings as the JSON has them."""
        return msgspec.structs.asdict(self)


def check_context(served: Subject, num_tokens: int, flag: str) -> None:
    """`flag`: what says how long a stream is."""
    if num_tokens > served.max_context:
        raise ConfigError(f"{flag}: the context of the {served.title} is {served.max_context}, prompt included")
