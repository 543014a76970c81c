"""The grid of the scaling benchmark: numbers of streams by context lengths, chosen and checked before anything runs."""

from dataclasses import dataclass, field

from everserve_bench.incident import Round
from everserve_bench.subject import is_for_gpu

FAULTS = ("expert", "attention")


@dataclass(frozen=True)
class Scale:
    """Two properties of the server."""

    block_size: int  # told to the server, so that its blocks can be counted as tokens
    prompt_tokens_per_step: int  # that a worker computes while others decode, by default


_SMALL = Scale(16, 64)
_LARGE = Scale(64, 512)


def scale_of(shape: str) -> Scale:
    return _LARGE if is_for_gpu(shape) else _SMALL


@dataclass(frozen=True)
class GridPoint:
    """So many streams with prompts of such a length."""

    num_streams: int
    context: int
    max_tokens: int  # of each stream

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt tokens of all streams."""
        return self.num_streams * self.context

    @property
    def length(self) -> int:
        """The length of a stream at its end."""
        return self.context + self.max_tokens

    def kv_tokens(self, block_size: int) -> int:
        """What all streams need at their ends."""
        return self.num_streams * -(-self.length // block_size) * block_size


@dataclass
class PointResult:
    """The result at one point. A kind of fault has rounds, or a reason for having none, or both if one went wrong."""

    cell: GridPoint
    rounds: list[Round] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)  # fault -> why it does not fit
    failures: dict[str, str] = field(default_factory=dict)  # fault -> what went wrong


def choose(
    streams: tuple[int, ...], contexts: tuple[int, ...], max_tokens: int, prompt_tokens_per_step: int
) -> list[GridPoint]:
    """All combinations, small ones first.

    While prompts are computed, streams whose prompts are ready decode already: a token in each step. They get as many
    tokens more as there are such steps, so that the first stream still runs when the last one has begun.
    """
    cells = [
        GridPoint(num_streams, context, max_tokens + -(-num_streams * context // prompt_tokens_per_step))
        for num_streams in sorted(set(streams))
        for context in sorted(set(contexts))
    ]
    return sorted(cells, key=lambda cell: cell.num_prompt_tokens)


def weigh(cell: GridPoint, block_size: int, kv_tokens: int, num_attention: int) -> dict[str, str]:
    """Faults that cannot be measured, and why, if each attention worker has KV for `kv_tokens`.

    All workers together must have room for the streams. When an attention worker dies the remaining ones must have it;
    a single worker's streams wait for its successor.
    """
    needed = cell.kv_tokens(block_size)
    room, left = kv_tokens * num_attention, kv_tokens * max(num_attention - 1, 1)
    if needed > room:
        return dict.fromkeys(FAULTS, f"KV for {needed} tokens is needed, there is room for {room}")
    if needed > left:
        return {"attention": f"KV for {needed} tokens is needed, survivors have room for {left}"}
    return {}
