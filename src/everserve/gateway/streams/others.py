"""What this gateway must know of the others at its address when it gives streams to workers.

    room     a worker's places are taken by the streams of all gateways, and so are those of an API key
    order    the stream that is next of all gets the place: a gateway whose own one is behind another's waits a moment
    poison   streams that may end their workers are counted over all gateways

All of it is in a table in shared memory (ledger/shared.py). Where there is one gateway, there is nothing to know.
"""

from collections.abc import Sequence

from everserve.ledger.shared import NUM_KEYS, SharedTable, Turn
from everserve.plan.fairness import Places
from everserve.tables.ids import WorkerId
from everserve.tables.requests import Flow

LOOK_AGAIN_S = (
    0.01  # while streams wait: a place that another gateway's stream gives back is announced to that one only
)
_PATIENCE_S = 0.05  # for another gateway to take a place that its stream should have


class Others:
    """There are none."""

    looks_again = False  # whether places may come that this gateway is not told of

    def given(self, worker: WorkerId) -> int:
        """Streams that the others have at this worker."""
        return 0

    def requests_at(self, worker: WorkerId) -> int:
        """The number of requests that these streams are of."""
        return 0

    def note_given(self, worker: WorkerId, num_streams: int, num_requests: int) -> None:
        """So many has this one."""

    def streams_of(self, key: str) -> int:
        """Streams of this key at the others."""
        return 0

    def places_of(self, key: str) -> int:
        """Those of them that have a worker."""
        return 0

    def note_key(self, key: str, num_streams: int, num_places: int) -> None:
        """So many has this one."""

    @property
    def num_poison(self) -> int:
        """Streams of the others that run and may be poison."""
        return 0

    def note_poison(self, num: int) -> None:
        """So many has this one."""

    def note_streams(self, num: int) -> None:
        """Running and waiting."""

    def must_wait(self, turn: Turn, now_s: float) -> bool:
        """Whether another gateway's stream comes before this one, which is next here."""
        return False

    def note_turn(self, turn: Turn | None) -> None:
        """This one waits here for room."""


class SharedOthers(Others):
    """They are in the table."""

    looks_again = True

    def __init__(self, table: SharedTable, keys: Sequence[str]) -> None:
        self._table = table
        self._keys = {key: index for index, key in enumerate(keys[:NUM_KEYS])}
        self._waiting_since_s: float | None = None

    def given(self, worker: WorkerId) -> int:
        return self._table.given(*worker)[0]

    def requests_at(self, worker: WorkerId) -> int:
        return self._table.given(*worker)[1]

    def note_given(self, worker: WorkerId, num_streams: int, num_requests: int) -> None:
        self._table.note_given(*worker, num_streams, num_requests)

    def streams_of(self, key: str) -> int:
        return self._table.streams_of(self._keys[key]) if key in self._keys else 0

    def places_of(self, key: str) -> int:
        return self._table.places_of(self._keys[key]) if key in self._keys else 0

    def note_key(self, key: str, num_streams: int, num_places: int) -> None:
        if key in self._keys:
            self._table.note_key(self._keys[key], num_streams, num_places)

    @property
    def num_poison(self) -> int:
        return self._table.num_poison

    def note_poison(self, num: int) -> None:
        self._table.note_poison(num)

    def note_streams(self, num: int) -> None:
        self._table.note_streams(num)

    def must_wait(self, turn: Turn, now_s: float) -> bool:
        """Not for long: another one may be stopped, or find that its stream cannot have the place."""
        if not any(other.is_before(turn) for other in self._table.turns()):
            self._waiting_since_s = None
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        elif now_s - self._waiting_since_s > _PATIENCE_S:
            self._waiting_since_s = None
            return False
        return True

    def note_turn(self, turn: Turn | None) -> None:
        self._table.note_turn(turn)


class SharedPlaces(Places):
    """The places of this gateway's streams, beside those of the others."""

    def __init__(self, others: Others) -> None:
        super().__init__()
        self._others = others

    def share(self, flow: Flow, more: int = 0) -> float:
        return super().share(flow, more) + self._others.places_of(flow.key) / flow.weight
