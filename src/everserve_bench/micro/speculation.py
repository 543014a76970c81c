"""What do drafts gain, and what do they cost where they gain nothing?

Two engines in this process have the same weights and the same requests, one of them with drafts. They take turns of a
few steps each, and what counts is core time: so both see the same machine, whatever else it does. Prompts are not
counted. The tokens of both must be equal.
"""

import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs
from tokenizers import Tokenizer

from everserve.config.speculation import NO_DRAFTS, Speculation
from everserve.engine.engine import Engine
from everserve.engine.speculation import Speculator
from everserve.errors import EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve_bench import report
from everserve_bench.micro.restore_cpu import CpuWorkers

_FREE_ROWS = 3.0  # as on a CPU (backends/cpu/build.py)
_TURN = 8  # steps
_PASSAGE, _TIMES = 40, 5
_OUTPUT = 192
_CONTEXT = 512


@dataclass(frozen=True)
class Text:
    """Prompts of one kind, and how they go on."""

    name: str
    repeats: int  # of a passage
    temperature: float


TEXTS = (Text("repetitive, greedy", _TIMES, 0.0), Text("plain, sampled", 1, 1.0))


@dataclass
class Side:
    """One of both engines, and what it has done."""

    engine: Engine
    seconds: float = 0.0
    num_counted: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def turn(self, is_counted: bool, num_steps: int = _TURN) -> None:
        began_s = time.process_time()
        num_before = sum(map(len, self.tokens.values()))
        for _ in range(num_steps):
            for output in self.engine.step().outputs if self.engine.has_work else ():
                assert output.token is not None
                self.tokens.setdefault(output.id, []).append(output.token)
        if is_counted:
            self.seconds += time.process_time() - began_s
            self.num_counted += sum(map(len, self.tokens.values())) - num_before

    @property
    def speed(self) -> float:
        """Tokens by second of a core."""
        return self.num_counted / self.seconds


def run(streams: tuple[int, ...], rounds: int, num_drafts: int, out: Path | None) -> None:
    """The whole benchmark."""
    most = max(streams)
    base = CpuWorkers(str(DEMO_MODEL), _CONTEXT, 2 * most).build("off", 512).engine
    rows: list[dict[str, Any]] = []
    with Progress().begin("speculation", total=len(TEXTS) * len(streams) * rounds) as progress:
        for text in TEXTS:
            for num_streams in streams:
                rows.append(_measure(base, text, num_streams, rounds, num_drafts, progress.advance))
    path = report.write("speculation", {"num_drafts": num_drafts, "output": _OUTPUT, "rows": rows}, out)
    report.print_table(
        f"bundled model, one thread, up to {num_drafts} drafts",
        ["text", "streams", "tokens/s without", "with", "ratio (min-max)", "drafts", "right"],
        [_cells(row) for row in rows],
    )
    print(f"written to {path}")


def _measure(base: Engine, text: Text, num_streams: int, rounds: int, num_drafts: int, advance: Any) -> dict[str, Any]:
    without, drafted = _engines(base, num_drafts)
    samples: list[dict[str, float]] = []
    for round_ in range(rounds):
        requests = _requests(text, num_streams, round_)
        sides = Side(without), Side(drafted)
        _race(sides, requests)
        if sides[0].tokens != sides[1].tokens:
            raise EverserveError("streams differ with drafts and without")
        speeds = [side.speed for side in sides]
        samples.append({"without": speeds[0], "with": speeds[1], "ratio": speeds[1] / speeds[0]})
        advance()
    stats = drafted.stats()
    return {
        "text": text.name,
        "streams": num_streams,
        **{key: report.spread([sample[key] for sample in samples]) for key in samples[0]},
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_tokens": stats.num_generated_tokens,
    }


def _engines(base: Engine, num_drafts: int) -> tuple[Engine, Engine]:
    """Each has half of the blocks."""
    half = base.limits.num_blocks // 2
    first, second = replace(base.limits, num_blocks=half), replace(base.limits, num_blocks=half, first_block=half)
    plain = structs.replace(base.config, speculation=NO_DRAFTS)
    config = structs.replace(base.config, speculation=Speculation(num_speculative_tokens=num_drafts))
    return base.alike(plain, first), base.alike(config, second, Speculator.of(config, second, _FREE_ROWS))


def _race(sides: tuple[Side, Side], requests: list[RequestSpec]) -> None:
    for side in sides:
        for request in requests:
            side.engine.add(request)
        while len(side.tokens) < len(requests):
            side.turn(is_counted=False, num_steps=1)
    while any(side.engine.has_work for side in sides):
        for side in sides:
            if side.engine.has_work:
                side.turn(is_counted=True)
        sides = sides[1], sides[0]


def _requests(text: Text, num: int, seed: int) -> list[RequestSpec]:
    """Passages of the text that comes with the model."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = tokenizer.encode((DEMO_MODEL / "LICENSE").read_text()).ids
    rng = random.Random(seed)
    firsts = [rng.randrange(len(ids) - _PASSAGE) for _ in range(num)]
    return [
        RequestSpec(
            id=f"r{i}",
            prompt=as_tokens(ids[first : first + _PASSAGE] * text.repeats),
            params=SamplingParams(max_tokens=_OUTPUT, temperature=text.temperature, seed=seed * num + i),
        )
        for i, first in enumerate(firsts)
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    return [
        row["text"],
        str(row["streams"]),
        f"{row['without']['median']:.0f}",
        f"{row['with']['median']:.0f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
        f"{row['num_draft_tokens'] / row['num_tokens']:.0%}",
        f"{row['num_accepted_tokens'] / max(1, row['num_draft_tokens']):.0%}",
    ]
