"""Results that are kept for as long as the same objects are asked about.

Tables are frozen values that are replaced as a whole, and made of parts that mostly stay the same objects: what a
worker holds, what is planned for it. To compute something of each part again, or even to compare parts, takes longer
than all else where there are hundreds of workers with dozens of layers.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Result = TypeVar("Result")
_MOST = 1 << 14  # results of one function


def remembered(compute: Callable[..., Result]) -> Callable[..., Result]:
    """The function, which is not called twice for the same (not only equal) frozen objects in a row. Numbers are
    compared by their values."""
    found: OrderedDict[tuple[Any, ...], tuple[tuple[Any, ...], Result]] = OrderedDict()

    @wraps(compute)
    def asked(*args: Any) -> Result:
        key = tuple(map(_key, args))
        known = found.get(key)
        if known is not None:
            return known[1]
        if len(found) >= _MOST:
            found.popitem(last=False)
        result = compute(*args)
        found[key] = args, result  # the arguments are kept alive: an address is not used again
        return result

    return asked


def _key(arg: Any) -> Any:
    return arg if isinstance(arg, int) else id(arg)
