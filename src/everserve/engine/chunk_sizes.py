"""ChunkSizes: how many prompt tokens go into a step while other streams decode.

Steps are counted in classes: by how many streams decode, and by the size of the prompts, both in powers of two. What a
class takes is the median of its last few steps: a step that was held up by a fault says nothing. Old steps are
forgotten, since contexts grow and other workers come and go. plan/chunks.py decides.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import TypeVar

from everserve.plan.chunks import affordable
from everserve.plan.prefill import TokenCost

_T = TypeVar("_T")
_NUM_MIXED, _NUM_ALIKE = 48, 9  # steps with prompts that are remembered, and of these, steps of one class
_FIRST = 512  # tokens, before anything was measured


class ChunkSizes:
    """`slowdown`: how many times as long as without prompts a step may take; 0: any time."""

    def __init__(self, slowdown: float, cost: TokenCost) -> None:
        self._slowdown = slowdown
        self._cost = cost
        self._decoding: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_ALIKE))
        self._mixed: dict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_NUM_MIXED))

    def add(self, num_decoding: int, prompt_cost: int, seconds: float) -> None:
        """A step has ended in which so many streams decoded. `prompt_cost`: of the prompt tokens in it."""
        if not self._slowdown or not num_decoding:
            return
        if prompt_cost:
            self._mixed[num_decoding.bit_length()].append((prompt_cost / self._cost.constant, seconds))
        else:
            self._decoding[num_decoding.bit_length()].append(seconds)

    def limit(self, num_decoding: int, position: int, most: int) -> int:
        """How many prompt tokens, from this position of a prompt on, a step may have beside so many decoding streams.
        `most`: never more than these."""
        if not self._slowdown:
            return most
        decoding, mixed = _nearest(self._decoding, num_decoding), _nearest(self._mixed, num_decoding)
        if not decoding or not mixed:
            return min(most, _FIRST)
        size = affordable(_by_size(mixed), median(decoding), self._slowdown)
        return max(1, min(most, int(size * self._cost.constant / (self._cost.constant + position))))


def _nearest(by_class: Mapping[int, _T], num_decoding: int) -> _T | None:
    """The entry of so many streams, or of the nearest number of which there is something."""
    wanted = num_decoding.bit_length()
    return by_class[min(by_class, key=lambda num: (abs(num - wanted), num))] if by_class else None


def _by_size(steps: deque[tuple[float, float]]) -> dict[float, float]:
    """Seconds by size, for each class of sizes."""
    classes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        classes[round(step[0]).bit_length()].append(step)
    latest = [alike[-_NUM_ALIKE:] for alike in classes.values()]
    return {median(size for size, _ in alike): median(seconds for _, seconds in alike) for alike in latest}
