"""Exchange: rows go out to shards in other processes, which may die, hang or come back at any moment.

A shard is an expert or a head, and a call asks shards of one kind. It goes out in parts, one per shard worker, and is
complete when every row has an answer. In the ordinary case that is one call into C and one wake-up (csrc/exchange.c).
Otherwise, until all rows have an answer:

    something happened          what is done about it
    the alarm rang              peers that died or fell silent are suspected
    the control word changed    the orchestrator's messages are read: peers and routes may change
    no answer for detect_ms     a peer that is idle despite a request missed the ring: ring again, then suspect it
    an answer says no           its sender is suspected
    an answer says moved        a slot holds another expert than our routes say: no suspicion, the next candidate
    then                        the rows of suspects that have no answer yet go to the next candidates, as replays
    a shard has no candidate    StepAbandoned: the step is rolled back and repeated later
    a head's KV is elsewhere    or its pool is another one than before: KvLost, it has to be fetched first

What the rows are computed from does not change, and shards are pure functions (of their KV, too): so answers are the
same, bit for bit, whatever happened. An answer that comes after its rows were sent elsewhere is not
looked at; its box is used again only once it has come.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everserve.backends.cpu.lane import MAX_EXPERTS, LaneLayout, load, moved_place
from everserve.backends.cpu.peers import ExpertPeers
from everserve.errors import KvLost, StepAbandoned
from everserve.memory.tables import Memory
from everserve.seam.outcomes import SYMPTOMS, Outcome, Status
from everserve.seam.trust import Suspicion
from everserve.tables.ids import MAX_RANKS, Incarnation, Rank
from everserve.tables.routes import Symptom

_MAX_PARTS, _MAX_MISSING = 512, 16  # csrc/exchange.c
_OPEN, _ARRIVED, _LOST, _REFUSED = range(4)
_RING_AGAIN, _GIVE_UP = 2, 3  # after so many looks, detect_ms apart, at a peer that is idle although we asked
_int64 = ctypes.c_int64
_call_fields = Struct("13q").pack_into
_fetch_args = Struct("8q").pack
_FETCHED_AT = 64  # in struct fetch


class _Part(ctypes.Structure):
    """struct part in csrc/exchange.c."""

    _fields_ = [(name, _int64) for name in ("lane", "rank", "box", "seq", "num_rows", "state", "status", "sent_ns")]
    lane: int
    rank: Rank
    box: int
    num_rows: int
    state: int
    status: int


class StepPage(ctypes.Structure):
    """struct step in csrc/exchange.c."""

    _fields_ = [
        (name, _int64)
        for name in (
            *("page", "num_sequences", "table_width"),
            *("positions", "kv_slots", "query_starts", "block_tables", "chains", "pools"),
        )
    ]
    page: int
    num_sequences: int
    table_width: int
    positions: int
    kv_slots: int
    query_starts: int
    block_tables: int
    chains: int
    pools: int


class Fetch(NamedTuple):
    """Tokens of a stream that a worker shall have, for some of its heads (memory/pieces/sources.py)."""

    calls: NDArray[np.int32]  # of these heads
    words: NDArray[np.int32]  # of these heads: slot and number (lane.py: row_word)
    sources: NDArray[np.int32]  # the blocks that the tokens are in
    blocks: NDArray[np.int32]  # the blocks that they shall be in
    chains: NDArray[np.uint64]  # one for each token


class Fetched(ctypes.Structure):
    """What a worker has answered: the second line of struct fetch in csrc/lane.h."""

    _fields_ = [(name, _int64) for name in ("answer", "status", "num_right", "num_bytes", "pool")]
    status: int
    num_right: int
    num_bytes: int
    pool: int


class _Exchange(ctypes.Structure):
    """struct exchange in csrc/exchange.c."""

    _fields_ = [
        ("layout", LaneLayout),
        *((name, _int64) for name in ("own", "alarm", "ends", "row_part", "row_at", "spill")),
        *((name, _int64) for name in ("timeout_ns", "spin_ns")),
        *((name, _int64) for name in ("alarm_seen", "control_seen", "meanwhile", "meanwhile_arg")),
        ("step", StepPage),
        *((name, _int64) for name in ("fresh", "call", "next_call", "epoch", "num_tokens", "top_k")),
        *((name, _int64) for name in ("width", "num_shards")),
        *((name, _int64) for name in ("ids", "x", "owner", "slot_of", "kv_at")),
        *((name, _int64) for name in ("num_parts", "num_missing", "num_blocked")),
        ("missing", _int64 * _MAX_MISSING),
        ("blocked", _int64 * MAX_RANKS),
        ("parts", _Part * _MAX_PARTS),
    ]
    layout: LaneLayout
    step: "StepPage"
    kv_at: int
    alarm_seen: int
    control_seen: int
    meanwhile: int
    meanwhile_arg: int
    epoch: int
    num_parts: int
    num_missing: int
    num_blocked: int


class _Crossing(ctypes.Structure):
    """struct crossing in csrc/exchange.c."""

    _fields_ = [(name, _int64) for name in ("call", "next_call", "owner", "slot_of")]


class Seam(ctypes.Structure):
    """The calls of all layers, for C that computes whole layers: struct seam in csrc/exchange.c."""

    _fields_ = [(name, _int64) for name in ("exchange", "crossings", "epoch", "width", "num_shards")]
    epoch: int


class Exchange:
    """All calls of an attention worker to its shard workers, over lanes.

    on_control()                              read the control socket; may call any method of `peers`
    on_suspect(rank, incarnation, reason)     a peer is routed around from now on
    on_replay(suspect, layer, num_rows)       its rows were sent to other peers

    The last two are called after the rows were sent: reports can wait, rows cannot. The lease is renewed with the
    warden while answers are awaited, for `lease_s` (None: as long as the step's). `spin_us`: how long to spin for an
    answer before sleeping; 0 where processes outnumber cores. `others_turn`, for peers in this very process, lets them
    work and says whether they did; when they did not, time passes. `layer_of`: the layer of each call; None: its
    number.
    """

    def __init__(
        self,
        peers: ExpertPeers,
        *,
        detect_ms: float,
        lease_s: float | None = None,
        on_control: Callable[[], None],
        on_suspect: Callable[[Rank, Incarnation, Symptom], None],
        on_replay: Callable[[Rank, int, int], None],
        spin_us: float = 0.0,
        others_turn: Callable[[], bool] | None = None,
        layer_of: Mapping[int, int] | None = None,
    ) -> None:
        self.num_replayed_rows = 0
        self.num_moved_rows = 0  # of requests that were answered "moved"
        self.peers = peers
        self._lease_s = lease_s
        self._on_control = on_control
        self._on_suspect = on_suspect
        self._on_replay = on_replay
        self._others_turn = others_turn
        self._layer_of = layer_of if layer_of is not None else {call: call for call in peers.moe_layers}
        self._next_call = dict(zip(peers.moe_layers, (*peers.moe_layers[1:], -1), strict=True))
        assert peers.num_experts <= MAX_EXPERTS
        shape = peers.shape
        self._tables = [Memory(4 * shape.max_rows), Memory(8 * shape.max_rows), Memory(4 * shape.y_floats)]
        self.row_at = self._tables[1].address  # of the last call: where the answer to each row lies
        self._exchange = _Exchange(
            shape.layout(),
            peers.cell.address,
            peers.warden.alarm_address,
            ctypes.addressof(peers.ends),
            *(table.address for table in self._tables),
            0 if others_turn is not None else round(detect_ms * 1e6),
            round(spin_us * 1e3),
        )
        self._call_at = _Exchange.fresh.offset
        self._bytes = memoryview(self._exchange).cast("B")
        self._address = ctypes.addressof(self._exchange)
        self._library = load()
        self._run = self._library.blocking.es_lane_exchange

    @property
    def step(self) -> StepPage:
        """What requests about heads say of the step at hand; C reads it in every call."""
        return self._exchange.step

    def do_meanwhile(self, function: int, argument: int) -> None:
        """Call void function(argument, call), without the interpreter's lock, when a call's rows are on their way and
        all there is to do is wait. (Not in a call that begins with something to attend to.) 0: call nothing.

        The caller must keep both alive.
        """
        self._exchange.meanwhile, self._exchange.meanwhile_arg = function, argument

    def begin_step(self) -> None:
        """Tell shard workers that we are on our way to the first call."""
        self.peers.cell.position = self.peers.moe_layers[0]

    def end_step(self) -> None:
        """Tell them not to wait for us."""
        self.peers.cell.position = -1
        self.peers.sweep()

    def call(self, call: int, ids_TK: Tensor, x_TD: Tensor, num_shards: int, width: int, kv_at: int = 0) -> None:
        """Send each row to its shards; when this returns, `row_at` says where the answers are, `width` floats each.

        `kv_at`: in a call about heads, the address of int32, by head: the rank where its KV is, or -1.
        """
        shape = self.peers.shape
        num_tokens, top_k = ids_TK.shape
        assert x_TD.shape == (num_tokens, shape.hidden_size) and num_tokens <= shape.max_tokens
        assert top_k <= shape.top_k and num_tokens * top_k * width <= shape.y_floats
        assert ids_TK.dtype is torch.int32 and x_TD.dtype is torch.float32
        assert ids_TK.is_contiguous() and x_TD.is_contiguous()
        _call_fields(
            self._bytes, self._call_at,
            1, call, self._next_call[call], self.peers.epoch, num_tokens, top_k, width, num_shards,
            ids_TK.data_ptr(), x_TD.data_ptr(), *self.peers.owners_at[call], kv_at,
        )  # fmt: skip
        outcome = self._run(self._address)
        if outcome:
            self.heal(outcome, call)

    def seam(self, call_of: Mapping[int, int], num_shards: int, width: int) -> tuple[Seam, object]:
        """What es_lane_cross needs to make the call of each layer. And what the caller must keep alive beside it. The
        epoch is the caller's to set, and outcomes are to be healed."""
        crossings = (_Crossing * (max(call_of) + 1))()
        for layer, call in call_of.items():
            crossings[layer] = _Crossing(call, self._next_call[call], *self.peers.owners_at[call])
        return Seam(self._address, ctypes.addressof(crossings), 0, width, num_shards), crossings

    def collect(self, out: Tensor) -> None:
        """Copy the answers of the last call, in the order of tokens and shards."""
        self._library.brief.es_lane_collect(self._address, out.data_ptr())

    def fetch(self, asked: Mapping[Rank, Fetch]) -> dict[Rank, Fetched] | None:
        """Between two steps: have these workers get KV, all at once, and wait. None if one of them is not there, or
        will not: then some may have done it."""
        self.peers.warden.renew(self._lease_s)
        self._await_fetches()  # one that we did not wait for
        if not self.begin_fetch(asked):
            return None
        self._await_fetches()
        return self.fetched(asked)

    def begin_fetch(self, asked: Mapping[Rank, Fetch]) -> bool:
        """The same without waiting. False if one of them is not there, or has not answered the request before."""
        if self.is_fetching or any(self.peers.trusted(rank) is None for rank in asked):
            return False
        for rank, (calls, words, sources, blocks, chains) in asked.items():
            arrays = (chains, calls, words, sources, blocks)
            args = _fetch_args(len(calls), len(blocks), len(chains), *(array.ctypes.data for array in arrays))
            if self._library.brief.es_lane_send_fetch(self._address, rank, args):
                return False
        return True

    @property
    def is_fetching(self) -> bool:
        """Whether a request for KV that was sent to a worker which is trusted has no answer yet."""
        return bool(self._library.brief.es_lane_num_fetching(self._address))

    def fetched(self, asked: Iterable[Rank]) -> dict[Rank, Fetched] | None:
        """What these workers have answered last. None if one of them is not there, or has not answered."""
        fetch_at = self._exchange.layout.fetch_at
        answers: dict[Rank, Fetched] = {}
        for rank in asked:
            peer = self.peers.trusted(rank)
            if peer is None or self.peers.ends[rank].is_fetching:
                return None
            answers[rank] = Fetched.from_buffer_copy(Fetched.from_address(peer.lane + fetch_at + _FETCHED_AT))
        return answers

    def _await_fetches(self) -> None:
        """Of peers that are trusted."""
        num_looks: dict[Rank, int] = {}
        while (outcome := self._library.blocking.es_lane_wait_fetches(self._address)) != Outcome.DONE:
            if outcome == Outcome.ATTEND:
                suspicions = self._attend()
            else:
                fetching = [Rank(rank) for rank in range(MAX_RANKS) if self.peers.ends[rank].is_fetching]
                suspicions = self._look_at_the_idle(num_looks, fetching)
            for suspicion in suspicions:
                self._on_suspect(*suspicion)

    def heal(self, outcome: int, call: int) -> None:
        """Something happened in this call: decide, send again what needs it, wait, until the call is complete."""
        num_looks: dict[Rank, int] = {}
        told: set[int] = set()  # the parts with a reported failure
        while outcome != Outcome.DONE:
            suspicions: list[Suspicion] = []
            if outcome == Outcome.ATTEND:
                suspicions = self._attend()
            elif outcome == Outcome.TIMEOUT:
                suspicions = self._look_at_the_idle(num_looks, self._awaited())
            elif outcome == Outcome.REFUSAL:
                if self._has_lost_kv():
                    raise self._kv_lost(call, "a worker has not the KV that streams were computed with")
                suspicions = self._suspect_the_unwilling()
            elif outcome == Outcome.KV_ELSEWHERE:
                raise self._kv_lost(call, "heads have to be computed elsewhere than where their KV is")
            elif outcome != Outcome.UNBLOCKED:
                raise self._abandoned(call)
            self._exchange.epoch = self.peers.epoch
            self._library.brief.es_lane_settle(self._address)
            suspicions += self._note_moved(call)
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
                    self._on_replay(part.rank, self._layer_of[call], part.num_rows)
                outcome = self._library.blocking.es_lane_wait(self._address)

    def _attend(self) -> list[Suspicion]:
        """The alarm rang, or the orchestrator wrote. The words are read first: what comes later rings again."""
        self._exchange.alarm_seen = self.peers.warden.alarm
        self._exchange.control_seen = self.peers.cell.control
        suspicions = self.peers.look()
        self._on_control()
        return suspicions

    def _awaited(self) -> set[Rank]:
        """The ranks without which the call cannot go on."""
        blocked = self._exchange.blocked[: self._exchange.num_blocked]
        return {part.rank for part in self._parts(_OPEN).values()}.union(map(Rank, blocked))

    def _look_at_the_idle(self, num_looks: dict[Rank, int], awaited: Iterable[Rank]) -> list[Suspicion]:
        """Nothing came for detect_ms. A peer that computes is busy; one that waits for work did not hear us."""
        if self._others_turn is not None and self._others_turn():
            return []
        self.peers.warden.renew(self._lease_s)
        self._on_control()  # the ringing process may have died before it rang
        suspicions: list[Suspicion] = []
        for rank in awaited:
            peer = self.peers.trusted(rank)
            if peer is not None:
                num_looks[rank] = num_looks.get(rank, 0) + 1 if peer.cell.idle else 0
                if num_looks[rank] == _RING_AGAIN:
                    peer.cell.ring()
                elif num_looks[rank] >= _GIVE_UP:
                    suspicions.append(self.peers.suspect(peer, Symptom.DEAF))
        return suspicions

    def _suspect_the_unwilling(self) -> list[Suspicion]:
        """The peer could not compute the request. The next routes resolve that, or the peer is replaced."""
        refused = [part for part in self._parts(_REFUSED).values() if part.status != Status.MOVED]
        return self._suspect(refused)

    def _note_moved(self, call: int) -> list[Suspicion]:
        """Slots that hold something else than our routes say. A part is looked at once, before its box is used again;
        then its rows need another place, as those of a part that was lost do."""
        unclear: list[_Part] = []
        for part in self._parts(_REFUSED).values():
            if part.status == Status.MOVED:
                part.state = _LOST
                places = self._moved_places(part)
                self.peers.note_moved(part.rank, call, places)
                if not places:
                    unclear.append(part)
        return self._suspect(unclear)

    def _moved_places(self, part: _Part) -> set[tuple[int, int]]:
        """The (slot, expert) that its server has marked."""
        layout = self._exchange.layout
        words_at = part.lane + layout.first_box + part.box * layout.box_bytes + layout.slots_at
        places = set(map(moved_place, (ctypes.c_int32 * part.num_rows).from_address(words_at)))
        return {place for place in places if place is not None and place[1] < self.peers.num_experts}

    def _suspect(self, parts: list[_Part]) -> list[Suspicion]:
        suspicions: list[Suspicion] = []
        for part in parts:
            peer = self.peers.trusted(part.rank)
            if peer is not None and peer.lane == part.lane:  # and not a successor
                suspicions.append(self.peers.suspect(peer, SYMPTOMS.get(part.status, Symptom.REFUSED)))
        return suspicions

    def _parts(self, *states: int) -> dict[int, _Part]:
        parts = self._exchange.parts[: self._exchange.num_parts]
        return {i: part for i, part in enumerate(parts) if part.state in states}

    def _has_lost_kv(self) -> bool:
        return any(part.status == Status.POOL_CHANGED for part in self._parts(_REFUSED).values())

    def _kv_lost(self, call: int, why: str) -> KvLost:
        """As where a step is abandoned."""
        self._leave_step()
        return KvLost(self._layer_of[call], why)

    def _leave_step(self) -> None:
        self.peers.reconsider()
        self.peers.cell.position = -1

    def _abandoned(self, call: int) -> StepAbandoned:
        """Parts that are still out will be counted as stale when they come. The repetition may ask suspects again."""
        missing = sorted(self._exchange.missing[: self._exchange.num_missing])
        assert all(0 <= expert < self.peers.num_experts for expert in missing), f"no such experts: {missing}"
        self._leave_step()
        return StepAbandoned(self._layer_of[call], tuple(missing))
