"""Requests as real services get them: lengths from public traces, arrivals at random at a chosen rate.

Models and machines differ by orders of magnitude from those of the traces, so lengths are scaled by one factor for
prompts and answers alike: their distribution and their proportion stay.
"""

import csv
import gzip
import random
from dataclasses import dataclass
from pathlib import Path

from everserve.errors import ConfigError

_DATA = Path(__file__).parent / "data"
NAMES = ("azure-conv", "azure-code", "mooncake-conv")


@dataclass(frozen=True)
class Lengths:
    """The lengths of one request, in tokens."""

    num_prompt: int
    num_output: int


@dataclass(frozen=True)
class Arrival:
    """One request of an open load: it comes at its time, however busy the server is."""

    at_s: float
    lengths: Lengths


def read(name: str) -> list[Lengths]:
    """All requests of a trace, in order."""
    if name not in NAMES:
        raise ConfigError(f"--trace {name}: choose {' or '.join(NAMES)}")
    with gzip.open(_DATA / f"{name.replace('-', '_')}.csv.gz", "rt", encoding="ascii", newline="") as lines:
        return [Lengths(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]


def scaled(lengths: list[Lengths], factor: float, most: int) -> list[Lengths]:
    """At least one token each, at most `most` together: the prompt is cut then."""
    found = []
    for one in lengths:
        num_output = min(max(1, round(one.num_output * factor)), most - 1)
        found.append(Lengths(min(max(1, round(one.num_prompt * factor)), most - num_output), num_output))
    return found


def with_mean_prompt(lengths: list[Lengths], mean: float, most: int) -> list[Lengths]:
    """Scaled so that prompts have so many tokens on average, before the longest are cut."""
    return scaled(lengths, mean * len(lengths) / sum(one.num_prompt for one in lengths), most)


def poisson(lengths: list[Lengths], per_s: float, duration_s: float, seed: int) -> list[Arrival]:
    """Requests of the trace in an order of their own, at random times: the same ones for the same seed."""
    generator = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = generator.expovariate(per_s)
    while at_s < duration_s:
        arrivals.append(Arrival(at_s, generator.choice(lengths)))
        at_s += generator.expovariate(per_s)
    return arrivals
