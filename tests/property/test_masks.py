"""Masks come, change and go in the middle of everything: preemptions, abandoned steps, deaths and restores.

Two rules hold whatever happens. A token that is not marked is what an exact run gives, given the tokens before it; so a
stream without marks is the undisturbed one as a whole, and so is every stream up to its first mark. And a token is
marked if and only if it was sampled while experts were masked.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from everserve.tables.outputs import Output
from everserve.tables.requests import Masked, RequestSpec
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import (
    VOCAB,
    Clairvoyant,
    LoggedToy,
    StepAbandoned,
    ToyConfig,
    make_config,
    mask,
    run_alone,
    spec,
)

# Prompts of one family begin alike.
prompts = st.builds(
    lambda family, length: [(31 * family + i * i) % VOCAB for i in range(length)], st.integers(0, 2), st.integers(1, 40)
)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 8, 20]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 5),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "cache_salt": st.sampled_from([b"", b"", b"a salt"]),
        "guided": st.sampled_from([None, None, *guides.GUIDED]),
    }
)
adds = st.tuples(st.just("add"), prompts, params)
steps = st.tuples(st.just("step"), st.integers(1, 6), st.booleans())
masks = st.tuples(st.just("mask"), st.booleans())  # a new one, or none
deaths = st.tuples(
    st.just("die"),
    st.sampled_from(["same", "none", "new"]),  # the mask that the next worker has
    st.sampled_from([0, 0, 1, 3]),  # of each stream's last tokens, how many never arrive
)
others = st.one_of(st.tuples(st.just("abandon")), st.tuples(st.just("cancel"), st.integers(0, 6)))
lives = st.builds(
    lambda first, then: [*first, *then],
    st.lists(adds, min_size=1, max_size=4),
    st.lists(st.one_of(adds, steps, steps, masks, masks, deaths, others), min_size=4, max_size=16),
)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([16, 18, 24, 128]),
        "max_num_seqs": st.sampled_from([2, 6]),
        "max_num_batched_tokens": st.sampled_from([3, 16]),
        "max_prefill_while_decoding": st.sampled_from([2, 16]),
        "max_restored_while_serving": st.sampled_from([4, 2048]),
        "enable_prefix_caching": st.booleans(),
        "visible_keys": st.sampled_from([None, 6]),
    }
).map(lambda overrides: make_config(**overrides))


@dataclass
class Client:
    """What has arrived of one stream."""

    request: RequestSpec
    tokens: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)
    masked: Masked | None = None
    is_over: bool = False


class World:
    """One worker after the other, and the clients of all of them."""

    def __init__(
        self, config: ToyConfig, is_in_place: bool, is_late: bool = False, rng: random.Random | None = None
    ) -> None:
        """`rng`: of drafts; None: there are none."""
        self.config = config
        self.drafting = Clairvoyant(rng, config.limits.visible_keys) if rng is not None else None
        self.is_in_place = is_in_place
        self.is_late = is_late  # what a step has computed is logged while the next one computes
        self.clients: dict[str, Client] = {}
        self.worker = LoggedToy(config, is_in_place, drafting=self.drafting)
        self.made = [self.worker]
        self.last_mask = 0

    def use_new_mask(self) -> None:
        self.last_mask += 1
        self.worker.engine.use_mask(*mask(self.last_mask))

    def add(self, prompt: list[int], options: dict) -> None:
        request = spec(f"r{len(self.clients)}", prompt, **options)
        self.clients[request.id] = Client(request)
        guides.add(self.worker.engine, request)

    def step(self, is_checked: bool = True) -> None:
        """`is_checked`: not for nothing, since the log's writer no longer follows streams then."""
        engine = self.worker.engine
        result = engine.step(meanwhile=engine.log_step) if self.is_late else engine.step()
        for output in result.outputs:
            self.receive(output, engine.mask_id)
        if not self.is_late:
            engine.log_step()
        if is_checked:
            engine.check()

    def receive(self, output: Output, mask_id: int) -> None:
        client = self.clients[output.id]
        assert (output.masked is not None) == bool(mask_id) and output.index == len(client.tokens)
        assert not client.is_over and output.token is not None
        client.tokens.append(output.token)
        client.marks.append(output.masked is not None)
        client.masked = output.masked
        client.is_over = output.finish_reason is not None

    def abandon(self) -> None:
        self.worker.model.fail_next = True
        try:
            self.worker.engine.step()
            raise AssertionError("the fault was not injected")
        except StepAbandoned:
            self.worker.engine.check()

    def die(self, next_mask: str, num_lost: int) -> None:
        """What the log shows at this moment is all that the next worker gets, beside what clients have."""
        old, mask_id = self.worker, self.worker.engine.mask_id
        orphans = [client for client in self.clients.values() if client.request.id in old.engine.stream_ids()]
        memory = old.photograph()
        if self.is_in_place:
            self.worker = LoggedToy(self.config, True, memory, self.drafting)
            log = self.worker.log
        else:
            left = LoggedToy(self.config, False, memory)
            self.made.append(left)
            self.worker, log = LoggedToy(self.config, False, drafting=self.drafting), left.log
        self.made.append(self.worker)
        if next_mask == "new":
            self.use_new_mask()
        elif next_mask == "same":
            self.worker.engine.use_mask(*mask(mask_id))
        for client in orphans:
            del client.tokens[len(client.tokens) - num_lost :], client.marks[len(client.marks) - num_lost :]
            resumed = client.request.after(client.tokens, client.masked)
            guides.add(self.worker.engine, resumed, self.worker.find(log, resumed.id))

    def live(self, life: list[tuple]) -> None:
        for what, *how in life:
            engine = self.worker.engine
            if what == "add":
                self.add(*how)
            elif what == "step":
                for _ in range(how[0]):
                    self.step(is_checked=how[1])
            elif what == "mask" and how[0]:
                self.use_new_mask()
                engine.check()
            elif what == "mask":
                engine.use_mask(0)
                engine.check()
            elif what == "abandon" and engine.has_work:
                self.abandon()
            elif what == "cancel":
                engine.cancel(f"r{how[0]}")
            elif what == "die":
                self.die(*how)

    def finish(self) -> None:
        self.worker.engine.use_mask(0)
        for _ in range(2000):
            if not self.worker.engine.has_work:
                break
            self.step()
        assert not self.worker.engine.has_work, "a stream starves"
        assert self.worker.engine.scheduler.pool.num_used == 0

    def close(self) -> None:
        for toy in self.made:
            toy.close()


def check_stream(client: Client, visible_keys: int | None) -> None:
    """Every run of tokens without a mark is what an exact run gives, given what was delivered before."""
    start = 0
    while start < len(client.marks):
        end = start
        while end < len(client.marks) and client.marks[end] == client.marks[start]:
            end += 1
        if not client.marks[start]:
            given_tokens = client.request.after(client.tokens[:start])
            alone = run_alone(given_tokens, visible_keys=visible_keys)
            assert client.tokens[start:end] == alone[: end - start], f"from token {start} on"
        start = end


def check_life(world: World, life: list[tuple]) -> None:
    try:
        world.live(life)
        world.finish()
        for client in world.clients.values():
            check_stream(client, world.config.limits.visible_keys)
    finally:
        world.close()


@examples(25)
@given(lives, configs, st.booleans(), st.one_of(st.none(), st.randoms(use_true_random=False)))
def test_what_is_not_marked_is_exact(life, config, is_in_place, rng):
    check_life(World(config, is_in_place, rng=rng), life)
