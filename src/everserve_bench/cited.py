"""What documents cite of a result: expressions over its JSON, and the result without what none of them reads.

faults.expert.gap_ms.median             attributes and ["keys"]
worst(gap_ms), interval(ratio)          several figures: median and max; median, low and high. A list of numbers, too
medians(phases_ms), worst(phases_ms)    those of each part, in order
ms(detected_s), less(ratio)             worst() of seconds in ms; interval() as what is missing of 100 %; more(ratio)
points(tokens=64).log.time_ms.median    the one element of a list that has these values
rounds.every(fault="gone")[0].gap_ms    all that have them; an attribute of a list is that of each element
it["1-gone-few"].gap_ms                 `it` is the scope, where a name cannot be said otherwise
max(found.demoted_s)                    also min, median, sum, len, round, abs, and arithmetic
"""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

ALWAYS_KEPT = ("environment", "model", "settings")
Path = tuple[str | int, ...]  # from the top of a JSON document to a value in it


class Part:
    """An object or a list of a result. Values that are read through it are noted."""

    def __init__(self, value: Any, read: set[Path], path: Path = ()) -> None:
        self._value, self._read, self._path = value, read, path

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(self._value, list) and isinstance(key, str):
            return self.every()[key]
        return self._at(key)

    def __contains__(self, key: str) -> bool:
        return isinstance(self._value, dict) and key in self._value

    def __call__(self, **having: Any) -> Any:
        found = self.every(**having)
        if len(found) != 1:
            raise LookupError(f"{len(found)} elements have {having}")
        return found.parts[0]

    def each(self) -> Any:
        """The values of an object."""
        return _together([self._at(key) for key in self._value])

    def every(self, **having: Any) -> "Parts":
        parts = [self._at(index) for index in range(len(self._value))]
        return Parts([part for part in parts if part._has(having)])

    def _has(self, having: dict[str, Any]) -> bool:
        fits = all(self._value.get(key) == value for key, value in having.items())
        if fits:
            self._read.update((*self._path, key) for key in having)
        return fits

    def _at(self, key: str | int) -> Any:
        value, path = self._value[key], (*self._path, key)
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value)):
            return Part(value, self._read, path)
        self._read.add(path)  # lists of numbers are kept whole
        return value


class Parts:
    """Some elements of a list."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

    def __contains__(self, key: str) -> bool:
        return any(key in part for part in self.parts)

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self.parts[key]
        return _together([part[key] for part in self.parts])


def _together(values: list[Any]) -> Any:
    return Parts(values) if values and isinstance(values[0], Part) else values


class NoFigure:
    """A number of a document that is no figure: how many streams, say. Written `_`."""


class _Names(dict[str, Any]):
    """What an expression may name: what its scope has, else a function."""

    def __init__(self, scope: Part | Parts) -> None:
        super().__init__(_FUNCTIONS, it=scope)
        self._scope = scope

    def __getitem__(self, key: str) -> Any:
        return self._scope[key] if key in self._scope else super().__getitem__(key)


def _worst(spread: Part) -> tuple[Any, ...]:
    """Median and worst of an object; where it has no median, those of each of its parts, in order."""
    if "median" in spread:
        return (spread.median, spread.max)
    return tuple(value for part in spread.each() for value in _worst(part))


_FUNCTIONS: dict[str, Any] = {
    "worst": _worst,
    "medians": lambda spreads: tuple(spread.median for spread in spreads.each()),
    "ms": lambda spread: (1000 * spread.median, 1000 * spread.max),
    "less": lambda ratio: tuple(100 * (1 - value) for value in (ratio.median, ratio.high, ratio.low)),
    "more": lambda ratio: tuple(100 * (value - 1) for value in (ratio.median, ratio.low, ratio.high)),
    "interval": lambda ratio: (ratio.median, ratio.low, ratio.high),
    "median": statistics.median,
    **{function.__name__: function for function in (max, min, sum, len, round, abs)},
    "_": NoFigure(),
}


def evaluate(result: dict[str, Any], read: set[Path], scope: str, expressions: str) -> list[Any]:
    """The values of expressions that are separated by commas, in order. Names are looked up in the scope, which is an
    expression itself, or empty."""
    whole = Part(result, read)
    values = _eval(f"({expressions},)", _eval(scope, whole) if scope else whole)
    return [each for value in values for each in (value if isinstance(value, tuple | list) else (value,))]


def _eval(expression: str, scope: Part | Parts) -> Any:
    return eval(expression, {"__builtins__": {}}, _Names(scope))


def shorten(result: dict[str, Any], read: Iterable[Path]) -> dict[str, Any]:
    """Only what was read, and where and with what it was measured."""
    kept = {*read, *((key,) for key in ALWAYS_KEPT if key in result)}
    tree: dict[str | int, Any] = {}
    for path in kept:
        node = tree
        for key in path:
            node = node.setdefault(key, {})
    shortened: dict[str, Any] = _only(result, tree)
    return shortened


def _only(value: Any, tree: dict[str | int, Any]) -> Any:
    """Elements of lists are dropped too: nothing names them by their number."""
    if not tree:
        return value
    if isinstance(value, dict):
        return {key: _only(each, tree[key]) for key, each in value.items() if key in tree}
    return [_only(each, tree[index]) for index, each in enumerate(value) if index in tree]
