"""Variants of one server: what does a flag cost?

at once            all are alive and only one of them is loaded at a time, in slices of about a second, in another order
                   each round: a slow moment of the machine hits all variants alike
one at a time      for models of which only one fits on the device: in each round every variant is started anew, in
                   another order, warmed up and measured by a few slices

Prompts are new in each slice, so that no prefix cache helps, and the same for all variants, which must all answer the
same tokens. A variant that cannot be measured says why; only the reference must be there.

Beside wall-clock figures stands the core time per token of all the server's processes: it does not depend on what else
the machine does.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everserve.errors import ConfigError, EverserveError
from everserve.progress import Progress
from everserve_bench import analysis, processes
from everserve_bench.load import random_prompts
from everserve_bench.slices import Server, Slice, running
from everserve_bench.subject import Subject

IDLE_S = 2.0
SLICES = 4  # of a server that is started for them: to start it takes far longer than these
_BLOCK = 64  # tokens of KV, on a GPU
# Of RAM for the KV cache of each attention worker: by default each server would take a quarter.
_SMALL_CACHE = ("--kv-cache-memory-bytes", str(128 << 20))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What each variant is given in each round."""

    streams: tuple[int, ...]
    prompt: int
    max_tokens: int
    rounds: int
    one_at_a_time: bool = False  # on a GPU


Samples = dict[tuple[str, int], list[Slice]]  # by variant and number of streams; the same slices of all variants


@dataclass(frozen=True)
class Difference:
    """A stream that is not what it is in the reference."""

    variant: str
    num_streams: int  # that ran beside it
    slice: int  # warm-ups count
    stream: int
    first: int  # the first token that differs, or is missing
    num_tokens: int  # that do


@dataclass(frozen=True)
class VariantResults:
    """What all rounds brought."""

    samples: Samples
    differences: list[Difference]
    idle_cores: dict[str, float]  # that each server uses without requests; none if one was alive at a time
    num_repeated: dict[str, int]  # slices in which a process was replaced: nothing was to fail here
    not_measured: dict[str, str]  # variants that are missing, and why

    @property
    def num_different(self) -> int:
        """Tokens that differ from the reference's."""
        return sum(found.num_tokens for found in self.differences)


def compare(
    flags: Mapping[str, tuple[str, ...]], reference: str, served: Subject, load: Load, progress: Progress
) -> Iterator[VariantResults]:
    """Start a server for each variant, and measure them all: what there is after each round."""
    room = _room_for(load, served)
    all_flags = {name: (*served.flags, *found, *room) for name, found in flags.items()}
    tally = Measurements(reference, all_flags, load.streams)
    for idle in (_one_at_a_time if load.one_at_a_time else _at_once)(served, tally, load, progress):
        yield VariantResults(tally.samples, tally.differences(), idle, tally.num_repeated, tally.not_measured)


def _room_for(load: Load, served: Subject) -> tuple[str, ...]:
    """Flags for no more KV than the streams need."""
    num_tokens = load.prompt + load.max_tokens
    if num_tokens > served.max_context:
        raise ConfigError(
            f"--prompt {load.prompt} and --tokens {load.max_tokens}: {served.title} has room for"
            f" {served.max_context} tokens in all"
        )
    if not load.one_at_a_time:
        return _SMALL_CACHE
    max_model_len = min(-(-num_tokens // _BLOCK) * _BLOCK, served.max_context)
    return "--max-model-len", str(max_model_len), "--max-num-seqs", str(max(load.streams))


class Measurements:
    """What has come in so far, of the variants with these flags."""

    def __init__(self, reference: str, flags: Mapping[str, tuple[str, ...]], streams: tuple[int, ...]) -> None:
        self.reference = reference
        self.flags = flags
        self.samples: Samples = {(name, num): [] for num in streams for name in flags}
        self.num_repeated = dict.fromkeys(flags, 0)
        self.not_measured: dict[str, str] = {}
        self._answers: dict[tuple[str, int], list[list[list[int]]]] = {key: [] for key in self.samples}

    def add(self, name: str, server: Server, prompts: list[list[int]], max_tokens: int, is_warm_up: bool) -> None:
        """Measure one more slice of this variant. Tokens count in warm-ups too."""
        found, tokens = server.measure(prompts, max_tokens)
        self._answers[name, len(prompts)].append(tokens)
        if not is_warm_up:
            self.samples[name, len(prompts)].append(found)

    def give_up(self, name: str, reason: str) -> None:
        """This variant cannot be measured. What there is of it goes too: it has no counterpart in every round."""
        if name == self.reference:
            raise ConfigError(f"variant {name!r} ({' '.join(self.flags[name])}) {reason}")
        self.not_measured[name] = reason
        for key in [key for key in self.samples if key[0] == name]:
            del self.samples[key], self._answers[key]

    def differences(self) -> list[Difference]:
        """In all slices, and all variants."""
        return [
            Difference(name, num_streams, slice_, stream, *found)
            for (name, num_streams), answers in self._answers.items()
            for slice_, both in enumerate(zip(answers, self._answers[self.reference, num_streams], strict=True))
            for stream, (ours, theirs) in enumerate(zip(*both, strict=True))
            if (found := _difference(ours, theirs))
        ]


def _difference(token_ids: list[int], expected: list[int]) -> tuple[int, int] | None:
    """The first token that differs, and how many do."""
    if token_ids == expected:
        return None
    verdict = analysis.compare(token_ids, expected)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, expected, strict=False))
    return sum(1 for _ in same), verdict.num_different + verdict.num_lost


def _at_once(served: Subject, tally: Measurements, load: Load, progress: Progress) -> Iterator[dict[str, float]]:
    """After each round: how many cores each server uses without requests."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, flags in tally.flags.items():
            try:
                servers[name] = stack.enter_context(running(served, flags))
            except EverserveError as error:
                tally.give_up(name, str(error))
        idle = _idle_share(servers)
        progress.begin("variants", (load.rounds + 1) * len(load.streams) * len(servers))
        for round_ in range(load.rounds + 1):  # round 0 warms everything up and is thrown away
            for num_streams in load.streams:
                prompts = random_prompts(served.vocab_size, num_streams, load.prompt, seed=round_)
                for name in _shuffled(servers, f"{round_}/{num_streams}"):
                    tally.add(name, servers[name], prompts, load.max_tokens, is_warm_up=round_ == 0)
                    progress.advance()
            tally.num_repeated |= {name: server.num_repeated for name, server in servers.items()}
            if round_ > 0:
                yield idle


def _one_at_a_time(served: Subject, tally: Measurements, load: Load, progress: Progress) -> Iterator[dict[str, float]]:
    """After each round: nothing, as no server is there while another one is measured."""
    progress.begin("variants", load.rounds * len(tally.flags) * len(load.streams) * (1 + SLICES))
    for round_ in range(load.rounds):
        for name in _shuffled(tally.flags, str(round_)):
            if name in tally.not_measured:
                continue
            try:
                with running(served, tally.flags[name]) as server:
                    _measure_round(tally, name, server, served, load, round_, progress)
                    tally.num_repeated[name] += server.num_repeated
            except (EverserveError, OSError) as error:
                tally.give_up(name, str(error))
        yield {}


def _measure_round(
    tally: Measurements, name: str, server: Server, served: Subject, load: Load, round_: int, progress: Progress
) -> None:
    for num_streams in load.streams:
        for slice_ in range(1 + SLICES):  # slice 0 warms it up and is thrown away
            seed = round_ * (1 + SLICES) + slice_
            prompts = random_prompts(served.vocab_size, num_streams, load.prompt, seed)
            tally.add(name, server, prompts, load.max_tokens, is_warm_up=slice_ == 0)
            progress.advance(name)


def _shuffled(names: Mapping[str, object], seed: str) -> list[str]:
    return random.Random(seed).sample(list(names), len(names))


def _idle_share(servers: dict[str, Server]) -> dict[str, float]:
    """Cores that each server uses without requests: what it takes away from the one that is measured."""
    before = {name: processes.cpu_s(server.pids) for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: (processes.cpu_s(server.pids) - before[name]) / IDLE_S for name, server in servers.items()}
