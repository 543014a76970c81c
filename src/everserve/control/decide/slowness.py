"""Which workers answer, but slowly. A pure decision: reports and the time in, verdicts with their reasons out.

Attention workers report how long work took: their own steps, and the answers of each expert worker (tables/work.py).
A worker is compared with those of its role that did the same kind of work at the same time, so a busy host, which is
slow for all of them, accuses none; and by the kind of unit that is kindest to it, so neither does more work. Expert
workers are compared as one attention worker sees them: it may itself be slow, and is so for all of them alike.

Each report moves a *score* (a CUSUM test): up by ln(ratio / factor) for each second of evidence, never below 0. The
ratio that counts is the median over the peers (the lower one: a majority that is slow together is the host). So a
little slowness must last, a lot is believed soon, and a neighbour that takes a core for three seconds is neither.
An expert worker is slow if half of the attention workers that ask it find so. With a single peer there is no majority:
there the ratio to what its role was used to counts too, if that is less. A role is used to what all of its workers did
at about the same pace; a pace far slower than that counts little, or a time in which all are slow would hide one that
stays slow after it.

The ratio is a bound from below. That it is small shows that a worker is fast only if the bound from above is small too:
peers with other work (streams that are much longer, say) say little either way. And where streams come in batches a
slow worker is the last one that works: it is compared with what its peers did before they fell idle, which counts less.

                score full                              no evidence for `trial_s`
      fine ─────────────────> demoted ─────────────────────────────────────────────> trial
        ^                       │ │ ^                                                │ │ │
        │  not slow any more    │ │ │        slow again, and it was drained before   │ │ │
        ├───────────────────────┘ │ └────────────────────────────────────────────────┘ │ │
        │                         │ still slow                                         │ │
        │                         v                      slow again                    │ │
        ├──────────────────── drained <────────────────────────────────────────────────┘ │
        │   the next incarnation is ready                                                │
        └────────────────────────────────────────────────────────────────────────────────┘
                                    not slow any more

A *demoted* worker comes last in the routes and gets no new streams. Without work there is no evidence, so it gets a
*trial*: it is treated as any other for a moment, and half a score is enough. A worker is drained once; if its next
incarnation is slow too, the place is, and not the process: it stays demoted, and trials become rare. Levels are
forgotten when a worker was fine for `memory_s`, and with the orchestrator.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low

from everserve.tables.ids import Rank, Role
from everserve.tables.work import Work, slowdown, slowdown_at_most

_SMOOTH_S = 5.0  # of the ratio that operators see


@dataclass(frozen=True, kw_only=True)
class SlowPolicy:
    """Chosen with duty cycles of SIGSTOP on a host with six times as many busy threads as cores. There a healthy worker
    has ratios of 2 to 3.5 for up to four seconds (its core is shared with a neighbour); one that is stopped half of the
    time 2.2 to 3.3 for good, and one that is stopped for 80 % of it 5 to 9."""

    factor: float = 2.0  # slower than this times its peers counts against a worker; 0: no verdicts
    full: float = 3.0  # the score at which it is slow: 2 s at ten times its peers' time, 7 s at three times
    steepest: float = 1.6  # the most that one second counts: no verdict within two seconds
    trial_s: float = 5.0  # without evidence, until a trial; doubled with each further verdict
    longest_trial_s: float = 300.0
    proof_s: float = 2.0  # of evidence that it is not slow any more
    memory_s: float = 600.0
    fresh_s: float = 2.0  # older work of peers counts a quarter in comparisons, and nothing after `stale_s`
    stale_s: float = 6.0
    forget: float = 0.2  # that a score falls in each second that shows nothing
    usual_s: float = 60.0  # over which a role's usual pace is taken


# How many operations in one report are evidence for the whole of its time: answers, or steps.
_ENOUGH = {Role.EXPERT: 20.0, Role.ATTENTION: 4.0}


class Standing(StrEnum):
    FINE = "fine"
    DEMOTED = "demoted"
    TRIAL = "trial"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A worker's new level, and why."""

    rank: Rank
    level: Standing
    ratio: float
    reason: str


@dataclass(slots=True)
class _Score:
    """The score of one worker, as one observer sees it."""

    value: float = 0.0
    evidence_s: float = 0.0  # since the last verdict
    at: float = -math.inf  # of the last report

    def add(self, bounds: tuple[float, float], weight_s: float, policy: SlowPolicy, now: float) -> None:
        """The ratio lies between the bounds: above the factor for certain, or most likely in the middle."""
        lower, upper = bounds
        slope = math.log(max(lower, 1e-3) / policy.factor)
        if slope <= 0:
            slope = min(-policy.forget, slope / 2 + math.log(max(upper, 1e-3) / policy.factor) / 2)
        self.value += weight_s * max(-policy.steepest, min(policy.steepest, slope))
        self.value = min(policy.full, max(0.0, self.value))
        self.evidence_s += weight_s
        self.at = now


@dataclass(slots=True)
class _Watched:
    """One worker."""

    role: Role
    level: Standing = Standing.FINE
    ratio: float = 1.0  # smoothed
    scores: dict[Rank, _Score] = field(default_factory=dict)  # by observer; an attention worker has one, its own
    since: float = 0.0  # of the level
    num_verdicts: int = 0  # within memory
    drained_at: float = -math.inf

    def score(self, now: float, policy: SlowPolicy) -> float:
        """The score of the observer in the middle, the kinder one if there are two."""
        return median_low([s.value for s in self.scores.values() if now - s.at <= policy.fresh_s] or [0.0])

    def evidence_s(self, now: float, policy: SlowPolicy) -> float:
        return median_low([s.evidence_s for s in self.scores.values() if now - s.at <= policy.fresh_s] or [0.0])

    def last_evidence(self) -> float:
        return max((score.at for score in self.scores.values()), default=-math.inf)


class Slowness:
    """The verdicts about the workers of one instance."""

    def __init__(self, policy: SlowPolicy | None = None) -> None:
        self.policy = policy or SlowPolicy()
        self._watched: dict[Rank, _Watched] = {}
        self._steps: dict[Rank, tuple[Work, float]] = {}  # the last report of each attention worker
        self._reported_at: dict[Rank, float] = {}
        self._usual: dict[Role, _Usual] = {}

    # -- what is known ---------------------------------------------------------------------------

    @property
    def demoted(self) -> frozenset[Rank]:
        """Workers to be asked last, and to get no new streams."""
        return frozenset(
            rank for rank, one in self._watched.items() if one.level in (Standing.DEMOTED, Standing.DRAINED)
        )

    @property
    def has_demoted(self) -> bool:
        """Whether there may be a trial to come."""
        return any(one.level is Standing.DEMOTED for one in self._watched.values())

    @property
    def ratios(self) -> dict[Rank, float]:
        """How many times as long as its peers a worker takes, lately."""
        return {rank: round(one.ratio, 2) for rank, one in self._watched.items()}

    def level(self, rank: Rank) -> Standing:
        return self._watched[rank].level if rank in self._watched else Standing.FINE

    def next_deadline(self, ready: Collection[Rank]) -> float | None:
        demoted = (one for rank, one in self._watched.items() if one.level is Standing.DEMOTED and rank in ready)
        return min(map(self._trial_at, demoted), default=None)

    # -- what happens ----------------------------------------------------------------------------

    def report(self, observer: Rank, own: Work, peers: Iterable[tuple[Rank, Work]], now: float) -> None:
        """An attention worker's work since its last report, and that of the expert workers that it asked."""
        passed_s = min(1.0, now - self._reported_at.get(observer, -math.inf))
        self._reported_at[observer] = now
        if passed_s <= 0:
            return
        self._steps[observer] = (own, now)
        steps = {rank: (work, at) for rank, (work, at) in self._steps.items() if now - at <= self.policy.stale_s}
        fresh = [at for rank, (_, at) in steps.items() if rank != observer and now - at <= self.policy.fresh_s]
        works = {rank: work for rank, (work, at) in steps.items() if not fresh or now - at <= self.policy.fresh_s}
        self._compare(Role.ATTENTION, observer, observer, works, passed_s if fresh else passed_s / 4, now)
        answers = dict(peers)
        for rank in answers:
            self._compare(Role.EXPERT, rank, observer, answers, passed_s, now)

    def decide(self, now: float, ready: Collection[Rank], may_leave: Collection[Rank]) -> list[Verdict]:
        """New levels of ready workers, after a report or when a deadline has come. `may_leave`: those that can be
        drained now."""
        if not self.policy.factor:
            return []
        verdicts = []
        for rank in sorted(self._watched.keys() & set(ready)):
            verdict = self._judge(rank, now, ready, rank in may_leave)
            if verdict is not None:
                verdicts.append(verdict)
        return verdicts

    def end(self, rank: Rank, now: float) -> None:
        """Its process has ended. What was decided about it is remembered for the next one, how fast it was is not."""
        one = self._watched.get(rank)
        if one is not None:
            one.scores.clear()
            one.ratio, one.level, one.since = 1.0, Standing.FINE, now
        self._steps.pop(rank, None)
        self._reported_at.pop(rank, None)
        for other in self._watched.values():
            other.scores.pop(rank, None)  # as this one saw it

    # -- comparing -------------------------------------------------------------------------------

    def _compare(
        self, role: Role, rank: Rank, observer: Rank, works: Mapping[Rank, Work], passed_s: float, now: float
    ) -> None:
        work, policy = works[rank], self.policy
        others = [other for peer, other in works.items() if peer != rank]
        if not others or work.seconds <= 0:
            return
        ratio = median_low([slowdown(work, other) for other in others])
        upper = median_low([slowdown_at_most(work, other) for other in others])
        is_even = max(ratio, *(slowdown(other, work) for other in others)) <= policy.factor
        usual = self._usual.setdefault(role, _Usual())
        if len(others) == 1:
            ratio = min(ratio, usual.slowdown_of(work, policy))
        one = self._watched.get(rank)
        if one is None or one.role is not role:
            one = self._watched[rank] = _Watched(role)
        weight_s = passed_s * min(1.0, work.units[0] / _ENOUGH[role])
        one.ratio += (ratio - one.ratio) * (1 - math.exp(-weight_s / _SMOOTH_S))
        if policy.factor:
            score = one.scores.setdefault(observer, _Score())
            if now - score.at > 5 * policy.fresh_s:
                score.value = 0.0  # about a time that is past
            score.add((ratio, upper), weight_s, policy, now)
            if one.level is Standing.FINE and not score.value and is_even:
                usual.add(work, weight_s, policy)

    # -- judging ---------------------------------------------------------------------------------

    def _judge(self, rank: Rank, now: float, ready: Collection[Rank], may_leave: bool) -> Verdict | None:
        one, policy = self._watched[rank], self.policy
        may_leave = may_leave and not self._was_drained(one, now)
        score = one.score(now, policy)
        times = f"{one.ratio:.1f} times as long as its peers"
        is_fine = score == 0 and one.evidence_s(now, policy) >= policy.proof_s
        match one.level:
            case Standing.FINE if score >= policy.full and self._leaves_one(rank, ready):
                return self._set(rank, Standing.DEMOTED, now, f"it takes {times}")
            case Standing.FINE if one.num_verdicts and now - one.since >= policy.memory_s:
                one.num_verdicts = 0
            case Standing.DEMOTED | Standing.TRIAL if is_fine:
                return self._set(rank, Standing.FINE, now, "it is as fast as its peers again")
            case Standing.DEMOTED if score >= policy.full and may_leave:
                return self._set(rank, Standing.DRAINED, now, f"it still takes {times}, with less to do")
            case Standing.DEMOTED if self._trial_at(one) <= now:
                return self._set(rank, Standing.TRIAL, now, "a trial: nothing has shown lately how fast it is")
            case Standing.TRIAL if score >= policy.full / 2:
                level = Standing.DRAINED if may_leave else Standing.DEMOTED
                return self._set(rank, level, now, f"in a trial it takes {times} again")
        return None

    def _set(self, rank: Rank, level: Standing, now: float, reason: str) -> Verdict:
        one = self._watched[rank]
        if self._was_drained(one, now) and level is Standing.DEMOTED:
            reason += "; so did its predecessor, which was replaced: its place may be slow"
        one.level, one.since = level, now
        one.num_verdicts += level is Standing.DEMOTED
        if level is Standing.DRAINED:
            one.drained_at = now
        for score in one.scores.values():
            score.value = self.policy.full / 2 if level is Standing.DEMOTED else 0.0
            score.evidence_s = 0.0
        return Verdict(rank, level, one.ratio, reason)

    def _trial_at(self, one: _Watched) -> float:
        """Each further verdict about a worker makes its trials rarer: one that is slow now and then stays demoted."""
        delay_s = self.policy.trial_s * float(2 ** min(one.num_verdicts - 1, 30))
        return max(one.since, one.last_evidence()) + min(delay_s, self.policy.longest_trial_s)

    def _was_drained(self, one: _Watched, now: float) -> bool:
        return now - one.drained_at < self.policy.memory_s

    def _leaves_one(self, rank: Rank, ready: Collection[Rank]) -> bool:
        """Whether another ready worker of its role is left that is not demoted."""
        role, others = self._watched[rank].role, set(ready) - self.demoted - {rank}
        return any(peer in others for peer, one in self._watched.items() if one.role is role)


class _Usual:
    """What a role is used to: its work, older work counting less."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._seen_s = 0.0

    def add(self, work: Work, weight_s: float, policy: SlowPolicy) -> None:
        """Work that is far slower counts as little as memory is longer."""
        is_slow = self._work is not None and slowdown(work, self._work) > policy.factor
        share = policy.usual_s / policy.memory_s if is_slow else 1.0
        keep = math.exp(-share * weight_s / policy.usual_s)
        self._seen_s = self._seen_s * keep + share * weight_s
        if self._work is None:
            self._work = work
        else:
            units = tuple(keep * old + share * new for old, new in zip(self._work.units, work.units, strict=True))
            self._work = Work(keep * self._work.seconds + share * work.seconds, units)

    def slowdown_of(self, work: Work, policy: SlowPolicy) -> float:
        """Infinite while there is no history worth the name."""
        if self._work is None or self._seen_s < policy.usual_s / 4:
            return math.inf
        return slowdown(work, self._work)
