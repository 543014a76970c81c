"""RemoteExperts: the experts are in other processes, which may die, hang or come back at any moment.

A layer goes out in parts, one per expert worker, and is complete when every row has an answer. In the ordinary case
that is one call into C and one wake-up (csrc/exchange.c). Otherwise, until all rows have an answer:

    something happened          what is done about it
    the alarm rang              peers that died or fell silent are suspected
    the control word changed    the orchestrator's messages are read: peers and routes may change
    no answer for detect_ms     a peer that is idle despite a request missed the ring: ring again, then suspect it
    an answer says no           its sender is suspected
    an answer says moved        a slot holds another expert than our routes say: no suspicion, the next candidate
    then                        the rows of suspects that have no answer yet go to the next candidates, as replays
    an expert has no candidate  StepAbandoned: the step is rolled back and repeated later

What the rows are computed from does not change, experts are pure functions and sums are in the order of k: so the
result is the same, bit for bit, whatever happened. An answer that comes after its rows were sent elsewhere is not
looked at; its box is used again only once it has come.
"""

import ctypes
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor

from everserve.backends.cpu.lane import MAX_EXPERTS, LaneLayout, load, moved_place
from everserve.backends.cpu.peers import ExpertPeers
from everserve.errors import StepAbandoned
from everserve.memory.tables import Memory
from everserve.model.ops import ExpertOps
from everserve.seam.outcomes import SYMPTOMS, Outcome, Status
from everserve.seam.trust import Suspicion
from everserve.tables.ids import MAX_RANKS, Incarnation, Rank
from everserve.tables.routes import Symptom

_MAX_PARTS, _MAX_MISSING = 512, 16  # csrc/exchange.c
_OPEN, _ARRIVED, _LOST, _REFUSED = range(4)
_RING_AGAIN, _GIVE_UP = 2, 3  # after so many looks, detect_ms apart, at a peer that is idle although we asked
_int64 = ctypes.c_int64
_layer_fields = Struct("10q").pack_into


class _Part(ctypes.Structure):
    """struct part in csrc/exchange.c."""

    _fields_ = [(name, _int64) for name in ("lane", "rank", "box", "seq", "num_rows", "state", "status")]
    lane: int
    rank: Rank
    box: int
    num_rows: int
    state: int
    status: int


class _Exchange(ctypes.Structure):
    """struct exchange in csrc/exchange.c."""

    _fields_ = [
        ("layout", LaneLayout),
        *((name, _int64) for name in ("own", "alarm", "ends", "row_part", "row_at", "spill")),
        *((name, _int64) for name in ("num_experts", "timeout_ns", "spin_ns")),
        *((name, _int64) for name in ("alarm_seen", "control_seen", "meanwhile", "meanwhile_arg")),
        *((name, _int64) for name in ("fresh", "layer", "next_layer", "epoch", "num_tokens", "top_k")),
        *((name, _int64) for name in ("ids", "x", "owner", "slot_of")),
        *((name, _int64) for name in ("num_parts", "num_missing", "num_blocked")),
        ("missing", _int64 * _MAX_MISSING),
        ("blocked", _int64 * MAX_RANKS),
        ("parts", _Part * _MAX_PARTS),
    ]
    layout: LaneLayout
    alarm_seen: int
    control_seen: int
    meanwhile: int
    meanwhile_arg: int
    epoch: int
    num_parts: int
    num_missing: int
    num_blocked: int


class RemoteExperts:
    """`Experts` over lanes.

    on_control()                              read the control socket; may call any method of `peers`
    on_suspect(rank, incarnation, reason)     a peer is routed around from now on
    on_replay(suspect, layer, num_rows)       its rows were sent to other peers

    The last two are called after the rows were sent: reports can wait, rows cannot. `lease_s` is renewed with the
    warden while answers are awaited. `spin_us`: how long to spin for an answer before sleeping; 0 where processes
    outnumber cores. `others_turn`, for peers in this very process, lets them work and says whether they did; when they
    did not, time passes.
    """

    def __init__(
        self,
        peers: ExpertPeers,
        ops: ExpertOps,
        *,
        detect_ms: float,
        lease_s: float,
        on_control: Callable[[], None],
        on_suspect: Callable[[Rank, Incarnation, Symptom], None],
        on_replay: Callable[[Rank, int, int], None],
        spin_us: float = 0.0,
        others_turn: Callable[[], bool] | None = None,
    ) -> None:
        self.num_replayed_rows = 0
        self.num_moved_rows = 0  # of requests that were answered "moved"
        self._peers = peers
        self._ops = ops
        self._lease_s = lease_s
        self._on_control = on_control
        self._on_suspect = on_suspect
        self._on_replay = on_replay
        self._others_turn = others_turn
        self._next_layer = dict(zip(peers.moe_layers, (*peers.moe_layers[1:], -1), strict=True))
        assert peers.num_experts <= MAX_EXPERTS
        shape = peers.shape
        self._tables = [
            Memory(4 * shape.max_rows),
            Memory(8 * shape.max_rows),
            Memory(shape.max_rows * shape.row_bytes),
        ]
        self._row_at = self._tables[1].address
        self._exchange = _Exchange(
            shape.layout(),
            peers.cell.address,
            peers.warden.alarm_address,
            ctypes.addressof(peers.ends),
            *(table.address for table in self._tables),
            peers.num_experts,
            0 if others_turn is not None else round(detect_ms * 1e6),
            round(spin_us * 1e3),
        )
        self._layer_at = _Exchange.fresh.offset
        self._bytes = memoryview(self._exchange).cast("B")
        self._address = ctypes.addressof(self._exchange)
        self._library = load()
        self._run = self._library.blocking.es_lane_exchange

    def do_meanwhile(self, function: int, argument: int) -> None:
        """Call void function(argument, layer), without the interpreter's lock, when a layer's rows are on their way and
        all there is to do is wait. (Not in a layer that begins with something to attend to.) 0: call nothing.

        The caller must keep both alive.
        """
        self._exchange.meanwhile, self._exchange.meanwhile_arg = function, argument

    def begin_step(self, num_rows: int) -> None:
        """Tell expert workers that we are on our way to the first layer."""
        self._peers.cell.position = self._peers.moe_layers[0]

    def end_step(self) -> None:
        """Tell them not to wait for us."""
        self._peers.cell.position = -1
        self._peers.sweep()

    def rest(self) -> None:
        """Nothing to do: between steps no expert worker waits for us."""

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        shape = self._peers.shape
        num_tokens, top_k = ids_TK.shape
        assert top_k <= shape.top_k and hidden_TD.shape == (num_tokens, shape.hidden_size)
        assert num_tokens <= shape.max_tokens and ids_TK.dtype is torch.int32 and hidden_TD.dtype is torch.float32
        assert ids_TK.is_contiguous() and hidden_TD.is_contiguous()
        _layer_fields(
            self._bytes, self._layer_at,
            1, layer, self._next_layer[layer], self._peers.epoch, num_tokens, top_k,
            ids_TK.data_ptr(), hidden_TD.data_ptr(), *self._peers.owners_at[layer],
        )  # fmt: skip
        outcome = self._run(self._address)
        if outcome:
            self._heal(outcome, layer)
        return self._ops.combine_at(self._row_at, weights_TK, residual_TD)

    def _heal(self, outcome: int, layer: int) -> None:
        """Something happened: decide, send again what needs it, wait, until the layer is complete."""
        num_looks: dict[Rank, int] = {}
        told: set[int] = set()  # the parts with a reported failure
        while outcome != Outcome.DONE:
            suspicions: list[Suspicion] = []
            if outcome == Outcome.ATTEND:
                suspicions = self._attend()
            elif outcome == Outcome.TIMEOUT:
                suspicions = self._look_at_the_idle(num_looks)
            elif outcome == Outcome.REFUSAL:
                suspicions = self._suspect_the_unwilling()
            elif outcome != Outcome.UNBLOCKED:
                raise self._abandoned(layer)
            self._exchange.epoch = self._peers.epoch
            self._library.brief.es_lane_settle(self._address)
            suspicions += self._note_moved(layer)
            failed = {i: part for i, part in self._parts(_LOST, _REFUSED).items() if i not in told}
            outcome = self._library.brief.es_lane_send(self._address)
            for suspicion in suspicions:
                self._on_suspect(*suspicion)
            if outcome == Outcome.DONE:
                told |= failed.keys()
                for part in failed.values():
                    if part.status == Status.MOVED:
                        self.num_moved_rows += part.num_rows
                        continue
                    self.num_replayed_rows += part.num_rows
                    self._on_replay(part.rank, layer, part.num_rows)
                outcome = self._library.blocking.es_lane_wait(self._address)

    def _attend(self) -> list[Suspicion]:
        """The alarm rang, or the orchestrator wrote. The words are read first: what comes later rings again."""
        self._exchange.alarm_seen = self._peers.warden.alarm
        self._exchange.control_seen = self._peers.cell.control
        suspicions = self._peers.look()
        self._on_control()
        return suspicions

    def _look_at_the_idle(self, num_looks: dict[Rank, int]) -> list[Suspicion]:
        """Nothing came for detect_ms. A peer that computes is busy; one that waits for work did not hear us."""
        if self._others_turn is not None and self._others_turn():
            return []
        self._peers.warden.renew(self._lease_s)
        self._on_control()  # the ringing process may have died before it rang
        suspicions: list[Suspicion] = []
        blocked = self._exchange.blocked[: self._exchange.num_blocked]
        for rank in {part.rank for part in self._parts(_OPEN).values()}.union(map(Rank, blocked)):
            peer = self._peers.trusted(rank)
            if peer is not None:
                num_looks[rank] = num_looks.get(rank, 0) + 1 if peer.cell.idle else 0
                if num_looks[rank] == _RING_AGAIN:
                    peer.cell.ring()
                elif num_looks[rank] >= _GIVE_UP:
                    suspicions.append(self._peers.suspect(peer, Symptom.DEAF))
        return suspicions

    def _suspect_the_unwilling(self) -> list[Suspicion]:
        """The peer could not compute the request. The next routes resolve that, or the peer is replaced."""
        refused = [part for part in self._parts(_REFUSED).values() if part.status != Status.MOVED]
        return self._suspect(refused)

    def _note_moved(self, layer: int) -> list[Suspicion]:
        """Slots that hold something else than our routes say. A part is looked at once, before its box is used again;
        then its rows need another place, as those of a part that was lost do."""
        unclear: list[_Part] = []
        for part in self._parts(_REFUSED).values():
            if part.status == Status.MOVED:
                part.state = _LOST
                places = self._moved_places(part)
                self._peers.note_moved(part.rank, layer, places)
                if not places:
                    unclear.append(part)
        return self._suspect(unclear)

    def _moved_places(self, part: _Part) -> set[tuple[int, int]]:
        """The (slot, expert) that its server has marked."""
        layout = self._exchange.layout
        words_at = part.lane + layout.first_box + part.box * layout.box_bytes + layout.slots_at
        places = set(map(moved_place, (ctypes.c_int32 * part.num_rows).from_address(words_at)))
        return {place for place in places if place is not None and place[1] < self._peers.num_experts}

    def _suspect(self, parts: list[_Part]) -> list[Suspicion]:
        suspicions: list[Suspicion] = []
        for part in parts:
            peer = self._peers.trusted(part.rank)
            if peer is not None and peer.lane == part.lane:  # and not a successor
                suspicions.append(self._peers.suspect(peer, SYMPTOMS.get(part.status, Symptom.REFUSED)))
        return suspicions

    def _parts(self, *states: int) -> dict[int, _Part]:
        parts = self._exchange.parts[: self._exchange.num_parts]
        return {i: part for i, part in enumerate(parts) if part.state in states}

    def _abandoned(self, layer: int) -> StepAbandoned:
        """Parts that are still out will be counted as stale when they come. The repetition may ask suspects again."""
        missing = sorted(self._exchange.missing[: self._exchange.num_missing])
        assert all(0 <= expert < self._peers.num_experts for expert in missing), f"no such experts: {missing}"
        self._peers.reconsider()
        self._peers.cell.position = -1
        return StepAbandoned(layer, tuple(missing))
