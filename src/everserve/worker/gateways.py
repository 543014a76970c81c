"""The attention worker's channels to the gateways, and which of them each stream belongs to.

    Submit from gateway g --> its stream --> outputs to gateway g
    the end of g's channel --> its streams end here; those of the others go on
    TokensAttached --> the next gateway g submits again what goes on

Each gateway has a number, and its successors have the same. Where there is only one, nothing is remembered: every
stream is its.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from everserve.tables.outputs import EngineStats, Output
from everserve.wire.channel import Channel
from everserve.wire.messages import GivenBack, Rejected, StepOutput, WorkerReady

_STATS_EVERY_S = 0.05  # to a gateway that no output of a step is for


@dataclass
class _End:
    """The channel to the gateway of one number."""

    channel: Channel
    is_open: bool = True  # it has not closed its end
    num_received: int = 0  # Submits, of this process
    told_s: float = 0.0  # when it was last sent stats


class Gateways:
    """All of them, by number."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._ends = [_End(channel) for channel in channels]
        self._owners: dict[str, int] = {}  # of each stream; empty where there is one gateway
        self._is_one = len(channels) == 1

    @property
    def channels(self) -> list[Channel]:
        """All channels, also those that have ended: what is sent there is dropped."""
        return [end.channel for end in self._ends]

    def is_open(self, number: int) -> bool:
        return self._ends[number].is_open

    def flush(self) -> None:
        for end in self._ends:
            end.channel.flush()

    # -- streams ---------------------------------------------------------------------------------

    def note_submit(self, number: int, id: str) -> None:
        self._ends[number].num_received += 1
        if not self._is_one:
            self._owners[id] = number

    def forget(self, id: str) -> None:
        """This stream has ended."""
        self._owners.pop(id, None)

    def lose(self, number: int) -> list[str] | None:
        """It has closed its end. Returns its streams, which no client can be told of any more; None: all are."""
        self._ends[number].is_open = False
        if self._is_one:
            return None
        ids = [id for id, owner in self._owners.items() if owner == number]
        for id in ids:
            del self._owners[id]
        return ids

    def replace(self, number: int, channel: Channel, hello: WorkerReady, stats: EngineStats) -> None:
        """The next gateway of this number, which knows nothing of this worker."""
        self._ends[number].channel.close()
        self._ends[number] = _End(channel)
        channel.send(hello)
        channel.send(StepOutput(outputs=[], stats=stats))

    # -- what they are told ----------------------------------------------------------------------

    def reject(self, rejected: Rejected) -> None:
        number = 0 if self._is_one else self._owners.pop(rejected.id, None)
        if number is not None:
            self._ends[number].channel.send(rejected)

    def give_back(self, ids: list[str]) -> None:
        for number, end in enumerate(self._ends):
            own = ids if self._is_one else [id for id in ids if self._owners.get(id) == number]
            end.channel.send(GivenBack(ids=own))

    def send_step(self, outputs: list[Output], make_stats: Callable[[int], EngineStats]) -> None:
        """What a step has produced. `make_stats` is told how many streams the receiver has submitted."""
        first = self._ends[0]
        stats = make_stats(first.num_received)
        if self._is_one:
            first.channel.send(StepOutput(outputs=outputs, stats=stats))
            return
        now_s = time.monotonic()
        for end, own in zip(self._ends, self._divide(outputs), strict=True):
            if end.is_open and (own or not outputs or now_s - end.told_s >= _STATS_EVERY_S):
                end.told_s = now_s
                own_stats = msgspec.structs.replace(stats, num_received=end.num_received)
                end.channel.send(StepOutput(outputs=own, stats=own_stats))

    def _divide(self, outputs: list[Output]) -> list[list[Output]]:
        """By gateway. A stream that was cancelled while its step was computed has none."""
        parts: list[list[Output]] = [[] for _ in self._ends]
        for output in outputs:
            number = self._owners.get(output.id)
            if number is not None:
                parts[number].append(output)
                if output.finish_reason is not None:
                    del self._owners[output.id]
        return parts
