"""Exchange: rows go out to shards in other processes, which may die, hang or come back at any moment.

A shard is an expert or a head, and a call asks shards of one kind. It goes out in parts, one per shard worker, and is
complete when every row has an answer. In the ordinary case that is one call into C and one wake-up
(csrc/lanes/exchange.c). Otherwise C says what happened, until all rows have an answer, and it is decided here what is
done about it (seam/healing.py).

A peer that is idle despite a request missed the ring: it is rung again, then suspected. One that was woken, and waits
for a core, did not. An answer that comes after its rows were sent elsewhere is not looked at; its box is used again
only once it has come.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everserve.backends.cpu.lane import MAX_EXPERTS, LaneLayout, load, moved_place
from everserve.backends.cpu.peers import ExpertPeers
from everserve.errors import StepAbandoned
from everserve.memory.tables import Memory
from everserve.native.structs import source
from everserve.seam.healing import Healing, Reports
from everserve.seam.outcomes import Outcome, Status
from everserve.seam.trust import Suspicion
from everserve.tables.ids import MAX_RANKS, Rank

_c = source("lanes", "exchange.c")
_OPEN, _ARRIVED, _LOST, _REFUSED = range(4)
_RING_AGAIN, _GIVE_UP = 2, 3  # after so many looks, detect_ms apart, at a peer that is idle although we asked
_call_fields = _c.packer("exchange", "fresh", "kv_at").pack_into
_fetch_args = _c.packer("fetch_args").pack
_FETCHED_AT = _c.offset("fetch", "answer")


class _Part(ctypes.Structure):
    """struct part."""

    _fields_ = _c.fields("part")
    lane: int
    rank: Rank
    box: int
    num_rows: int
    state: int
    status: int


class StepPage(ctypes.Structure):
    """struct step."""

    _fields_ = _c.fields("step")
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
    """What a worker has answered: struct fetch in csrc/lanes/lane.h, from `answer` on."""

    _fields_ = _c.fields("fetch", first="answer")
    status: int
    num_right: int
    num_bytes: int
    pool: int


class _Exchange(ctypes.Structure):
    """struct exchange."""

    _fields_ = _c.fields(
        "exchange", {"layout": LaneLayout, "step": StepPage, "parts": _Part * _c.constants["MAX_PARTS"]}
    )
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
    """struct crossing."""

    _fields_ = _c.fields("crossing")


class Seam(ctypes.Structure):
    """The calls of all layers, for C that computes whole layers: struct seam."""

    _fields_ = _c.fields("seam")
    epoch: int


class Exchange:
    """All calls of an attention worker to its shard workers, over lanes.

    `spin_us`: how long to spin for an answer before sleeping; 0 where processes outnumber cores. `others_turn`, for
    peers in this very process, lets them work and says whether they did; when they did not, time passes. `layer_of`:
    the layer of each call; None: its number.
    """

    def __init__(
        self,
        peers: ExpertPeers,
        reports: Reports,
        *,
        detect_ms: float,
        lease_s: float | None = None,
        spin_us: float = 0.0,
        others_turn: Callable[[], bool] | None = None,
        layer_of: Mapping[int, int] | None = None,
    ) -> None:
        self.peers = peers
        layer_of = layer_of if layer_of is not None else {call: call for call in peers.calls}
        self.healing = Healing(peers, reports, _GIVE_UP, lease_s, layer_of)
        self._others_turn = others_turn
        self._next_call = dict(zip(peers.calls, (*peers.calls[1:], -1), strict=True))
        assert peers.num_shards <= MAX_EXPERTS
        shape = peers.shape
        row_part, row_at, spill = Memory(4 * shape.max_rows), Memory(8 * shape.max_rows), Memory(4 * shape.y_floats)
        self._tables = [row_part, row_at, spill]  # kept alive
        self.row_at = row_at.address  # of the last call: where the answer to each row lies
        self._exchange = _Exchange(
            layout=shape.layout(),
            own=peers.cell.address,
            alarm=peers.warden.alarm_address,
            ends=ctypes.addressof(peers.ends),
            row_part=row_part.address,
            row_at=row_at.address,
            spill=spill.address,
            timeout_ns=0 if others_turn is not None else round(detect_ms * 1e6),
            spin_ns=round(spin_us * 1e3),
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
        self.peers.cell.position = self.peers.calls[0]

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
        self.healing.renew_lease()
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
        """Waits for the fetches of peers that are trusted."""
        self.healing.begin_looks()
        while (outcome := self._library.blocking.es_lane_wait_fetches(self._address)) != Outcome.DONE:
            if outcome == Outcome.ATTEND:
                suspicions = self._attend()
            else:
                fetching = [Rank(rank) for rank in range(MAX_RANKS) if self.peers.ends[rank].is_fetching]
                suspicions = self._look_at_the_idle(fetching)
            self.healing.tell(suspicions)

    def heal(self, outcome: int, call: int) -> None:
        """Something happened in this call: decide, send again what needs it, wait, until the call is complete."""
        told: set[int] = set()  # the parts with a reported failure
        self.healing.begin_looks()
        while outcome != Outcome.DONE:
            suspicions = self._decide(outcome, call)
            self._exchange.epoch = self.peers.epoch
            self._library.brief.es_lane_settle(self._address)
            suspicions += self._note_moved(call)
            failed = {i: part for i, part in self._parts(_LOST, _REFUSED).items() if i not in told}
            outcome = self._library.brief.es_lane_send(self._address)
            self.healing.tell(suspicions)
            if outcome == Outcome.DONE:
                told |= failed.keys()
                self._tell_failed(failed.values(), call)
                outcome = self._library.blocking.es_lane_wait(self._address)

    def _decide(self, outcome: int, call: int) -> list[Suspicion]:
        if outcome == Outcome.ATTEND:
            return self._attend()
        if outcome == Outcome.TIMEOUT:
            return self._look_at_the_idle(self._awaited())
        if outcome == Outcome.REFUSAL:
            refused = self._parts(_REFUSED).values()
            if any(part.status == Status.POOL_CHANGED for part in refused):
                raise self._leaving_step(self.healing.kv_is_lost(call))
            return self._suspect(part for part in refused if part.status != Status.MOVED)
        if outcome == Outcome.KV_ELSEWHERE:
            raise self._leaving_step(self.healing.kv_is_elsewhere(call))
        if outcome != Outcome.UNBLOCKED:
            missing = sorted(self._exchange.missing[: self._exchange.num_missing])
            assert all(0 <= shard < self.peers.num_shards for shard in missing), f"no such shards: {missing}"
            raise self._leaving_step(self.healing.abandoned(call, missing))
        return []

    def _attend(self) -> list[Suspicion]:
        self._exchange.alarm_seen, self._exchange.control_seen = self.healing.words()
        return self.healing.attend()

    def _awaited(self) -> set[Rank]:
        """The ranks without which the call cannot go on."""
        blocked = self._exchange.blocked[: self._exchange.num_blocked]
        return {part.rank for part in self._parts(_OPEN).values()}.union(map(Rank, blocked))

    def _look_at_the_idle(self, awaited: Iterable[Rank]) -> list[Suspicion]:
        """Nothing came for detect_ms. A peer that computes is busy; one that waits for work did not hear us."""
        if self._others_turn is not None and self._others_turn():
            return []
        self.healing.renew_lease()
        self.healing.read_control()  # the ringing process may have died before it rang
        peers = [peer for rank in awaited if (peer := self.peers.trusted(rank)) is not None]
        for peer in peers:
            is_deaf = bool(peer.cell.idle and not peer.cell.is_starved)
            if self.healing.look(peer, is_deaf) == _RING_AGAIN:
                peer.cell.ring()
        return self.healing.suspect_the_deaf(peers)

    def _note_moved(self, call: int) -> list[Suspicion]:
        """Slots that hold something else than our routes say. A part is looked at once, before its box is used again;
        then its rows need another place, as those of a part that was lost do."""
        unclear: list[_Part] = []
        for part in self._parts(_REFUSED).values():
            if part.status == Status.MOVED:
                part.state = _LOST
                if not self.healing.note_moved(part.rank, call, self._moved_places(part)):
                    unclear.append(part)
        return self._suspect(unclear)

    def _moved_places(self, part: _Part) -> set[tuple[int, int]]:
        """The (slot, expert) that its server has marked."""
        layout = self._exchange.layout
        words_at = part.lane + layout.first_box + part.box * layout.box_bytes + layout.slots_at
        places = set(map(moved_place, (ctypes.c_int32 * part.num_rows).from_address(words_at)))
        return {place for place in places if place is not None and place[1] < self.peers.num_shards}

    def _suspect(self, parts: Iterable[_Part]) -> list[Suspicion]:
        suspicions: list[Suspicion] = []
        for part in parts:
            peer = self.peers.trusted(part.rank)
            if peer is not None and peer.lane == part.lane:  # and not a successor
                suspicions.append(self.healing.suspect(peer, part.status))
        return suspicions

    def _tell_failed(self, parts: Iterable[_Part], call: int) -> None:
        for part in parts:
            if part.status == Status.MOVED:
                self.healing.num_moved_rows += part.num_rows
            else:
                self.healing.num_replayed_rows += part.num_rows
                self.healing.tell_replay(part.rank, call, part.num_rows)

    def _parts(self, *states: int) -> dict[int, _Part]:
        parts = self._exchange.parts[: self._exchange.num_parts]
        return {i: part for i, part in enumerate(parts) if part.state in states}

    def _leaving_step(self, error: StepAbandoned) -> StepAbandoned:
        """The repetition may ask suspects again."""
        self.peers.reconsider()
        self.peers.cell.position = -1
        return error
