"""A shortage of memory is an error that the user can fix: reported in one line with its purpose and advice."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from everserve.errors import ConfigError
from everserve.memory.names import lack
from everserve.tables.ids import Rank

_TORCH_SAYS = ("can't allocate memory", "not enough memory")  # its CPU allocator, in a RuntimeError


@contextmanager
def memory_for(rank: Rank, kind: str, num_bytes: int) -> Iterator[None]:
    """Turns a shortage inside into a ConfigError that names the purpose. `kind` is one of memory/names.py."""
    try:
        yield
    except Exception as error:
        if is_shortage(error):
            raise ConfigError(lack(rank, kind, f"{_gib(num_bytes)} wanted{_limit()}")) from error
        raise


def is_shortage(error: BaseException) -> bool:
    """Whether this error means that host memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in _TORCH_SAYS)
    return isinstance(error, MemoryError) or says_so


def last_words(rank: Rank, error: BaseException) -> tuple[str, bool]:
    """The reason of a failure in one line, and whether the user can fix it."""
    reason = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
    if is_shortage(error):
        return f"worker {rank} has no memory ({reason}{_limit()}); use fewer workers or a smaller KV cache", True
    return reason, False


def _limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if soft == resource.RLIM_INFINITY else f", and this process may have {_gib(soft)} in all (ulimit -v)"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
