"""An engine with the streams that it gives, for schedules that drive it in random order."""

from collections.abc import Callable

from everserve.engine.engine import Engine
from everserve.tables.requests import Flow, RequestSpec
from tests.support import guides
from tests.support.toy import StepAbandoned, ToyModel, run_alone, spec

_MANY_STEPS = 2000


class EngineStreams:
    """Every step is checked: its tokens follow those before them, and the tables are sound."""

    def __init__(self, engine: Engine, model: ToyModel) -> None:
        self.engine = engine
        self._model = model
        self._specs: dict[str, RequestSpec] = {}
        self._tokens: dict[str, list[int]] = {}
        self._cancelled: set[str] = set()

    def add(self, prompt: list[int], params: dict, flow: Flow | None = None) -> None:
        request = spec(f"r{len(self._specs)}", prompt, flow=flow, **params)
        self._specs[request.id], self._tokens[request.id] = request, []
        guides.add(self.engine, request)

    def step(self, may_go_ahead: bool = True, is_quiet: Callable[[], bool] | None = None) -> None:
        for output in self.engine.step(may_go_ahead=may_go_ahead, is_quiet=is_quiet).outputs:
            assert output.id not in self._cancelled
            assert output.index == len(self._tokens[output.id]), "a gap or a duplicate"
            self._tokens[output.id].append(output.token)
        self.engine.check()

    def cancel(self, number: int) -> None:
        if self.engine.cancel(f"r{number}"):
            self._cancelled.add(f"r{number}")
            self.engine.check()

    def abandon(self) -> None:
        """A step that fails in its forward pass leaves no trace, not even in the order of the free list; unless it had
        taken blocks that held something, and so overwrote it."""
        before = _snapshot(self.engine)
        self._model.fail_next = True
        try:
            self.engine.step()
            raise AssertionError("the fault was not injected")
        except StepAbandoned:
            pass
        after = _snapshot(self.engine)
        has_taken = after[-1].num_preemptions > before[-1].num_preemptions or len(after[-2]) < len(before[-2])
        assert after == before or has_taken
        self.engine.check()

    def finish(self) -> None:
        """To the end of all streams: each is what it would be alone, and holds nothing any more."""
        for _ in range(_MANY_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "a worker starves"
        assert self.engine.scheduler.pool.num_used == 0
        for id, request in self._specs.items():
            alone, tokens = run_alone(request, visible_keys=self._model.visible_keys), self._tokens[id]
            assert tokens == (alone[: len(tokens)] if id in self._cancelled else alone)


def _snapshot(engine: Engine) -> tuple:
    scheduler = engine.scheduler
    pool = scheduler.pool
    sequences = [
        (s.id, s.status, list(s.blocks), s.num_computed, list(s.tokens), s.num_cached)
        for s in [*scheduler.waiting, *scheduler.running]
    ]
    stats = engine.stats()
    return (
        sequences,
        len(scheduler.running),
        pool.free_list(),
        list(pool.refs),
        list(pool.hash_of),
        dict(pool.block_of),
        stats,
    )
