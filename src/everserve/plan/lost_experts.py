"""What to do while experts have no place: the steps that come after shadows and repair, as `--on-lost-expert` allows.

    wait           streams that need a lost expert wait until a survivor has loaded it, or its worker is back
    mask           lost experts are excluded before top-k, if that leaves enough of every layer; repair goes on, and the
                   mask is lifted when all of them have a place again
    switch-role    where the remaining expert workers have fewer slots than there are experts, because devices are gone,
                   an attention worker becomes an expert worker; it goes back when they have returned

Masks and switches may go on at the same time. Pure functions; each returns its reason.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everserve.tables.ids import Rank, Role
from everserve.words import agree, count

LayerExpert = tuple[int, int]  # index of the layer, expert


@dataclass(frozen=True, kw_only=True)
class LostExpertPolicy:
    """What may be done, besides waiting."""

    max_masked: int = 0  # of a layer; 0: none
    may_switch: bool = False

    @classmethod
    def of(cls, on_lost_expert: str, max_masked_experts: float, num_experts: int, top_k: int) -> "LostExpertPolicy":
        """`max_masked_experts`: a number, or below 1 a share of a layer's experts. As many as a token needs are always
        left."""
        allowed = {"wait": (), "mask": ("mask",), "switch-role": ("switch",)}.get(on_lost_expert, ("mask", "switch"))
        wanted = max_masked_experts if max_masked_experts >= 1 else max(1, int(max_masked_experts * num_experts))
        most = max(0, min(int(wanted), num_experts - top_k)) if max_masked_experts > 0 else 0
        return cls(max_masked=most if "mask" in allowed else 0, may_switch="switch" in allowed)


# -- masks ---------------------------------------------------------------------------------------


class MaskChoice(NamedTuple):
    """Which experts to mask, and why these. `reason` is empty if there is nothing to say."""

    experts: tuple[LayerExpert, ...]
    reason: str = ""


def choose_mask(lost: Collection[LayerExpert], masked: Sequence[LayerExpert], policy: LostExpertPolicy) -> MaskChoice:
    """`lost`: experts without a place, `masked`: those that are masked now.

    Every change of the mask costs streams a part of their KV. So it changes only if another expert is lost, or if all
    masked ones have a place again: then it is lifted.
    """
    missing = tuple(sorted(lost))
    if not missing:
        return MaskChoice((), "every masked expert has a place again" if masked else "")
    if masked and set(missing) <= set(masked):
        still = f"{len(missing)} of {count(len(masked), 'masked expert')}"
        return MaskChoice(tuple(masked), f"still without a place: {still}")
    num_lost = max(Counter(layer for layer, _ in missing).values())
    if num_lost <= policy.max_masked:
        are = agree("are", len(missing))
        return MaskChoice(missing, f"{count(len(missing), 'expert')} without a place {are} masked")
    why = f"{count(num_lost, 'expert')} of one layer {agree('have', num_lost)} no place"
    why = f"{why}, more than the {policy.max_masked} that may be masked"
    return MaskChoice((), f"{why}: streams that need them wait")


# -- roles ---------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A worker that could become an expert worker."""

    rank: Rank
    num_streams: int  # -1: it is an expert worker still, and about to go back
    refusal: str = ""  # why it cannot


@dataclass(frozen=True, kw_only=True)
class Staff:
    """The expert workers that there are or soon will be, and those that could be."""

    num_experts: int  # of a layer
    slots_per_layer: int  # of each expert worker
    num_present: int  # expert workers on devices that are not gone, and attention workers that become one
    num_away: int  # expert workers whose device is gone, but for those that stand in for others
    num_attention: int  # attention workers that are ready: one of them must stay
    stand_ins: tuple[Rank, ...] = ()  # of those present: attention workers before, the first to go back last
    candidates: tuple[Candidate, ...] = ()

    @property
    def num_needed(self) -> int:
        """Expert workers that have a slot for every expert."""
        return -(-self.num_experts // max(self.slots_per_layer, 1))


class RoleChoice(NamedTuple):
    """Which worker changes its role, to which; none, if `rank` is None."""

    rank: Rank | None
    role: Role
    reason: str


def choose_role(staff: Staff, policy: LostExpertPolicy) -> RoleChoice:
    """One change at a time: asked again, it chooses the next."""
    num_lacking = staff.num_needed - staff.num_present
    if num_lacking <= 0:
        if staff.stand_ins and staff.num_away < len(staff.stand_ins) and num_lacking < 0:
            reason = f"{count(staff.num_present - 1, 'expert worker', 'have')} room for all experts without it"
            return RoleChoice(staff.stand_ins[-1], Role.ATTENTION, reason)
        return RoleChoice(None, Role.EXPERT, "every expert has a slot")
    slots = count(staff.slots_per_layer, "slot") + (" each" if staff.num_present != 1 else "")
    why = f"{count(staff.num_present, 'expert worker', 'have')} {slots} for {staff.num_experts} experts"
    if not policy.may_switch:
        return RoleChoice(None, Role.EXPERT, f"{why}; no worker may change its role for that")
    able = [one for one in staff.candidates if not one.refusal]
    num_still = sum(one.num_streams < 0 for one in able)
    num_able = num_still + min(len(able) - num_still, max(staff.num_attention - 1, 0))
    if num_able < num_lacking:
        refusals = "; ".join(one.refusal for one in staff.candidates if one.refusal)
        able_to = count(num_able, "attention worker")
        short = f"{num_lacking} more {agree('are', num_lacking)} needed, and {able_to} can become one"
        return RoleChoice(None, Role.EXPERT, "; ".join(filter(None, [why, short, refusals])))
    best = min(able, key=lambda one: (one.num_streams, one.rank))
    return RoleChoice(best.rank, Role.EXPERT, f"{why}; it has the fewest streams ({max(best.num_streams, 0)})")
