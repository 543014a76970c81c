"""Guided streams when their workers die: the same tokens, and still what the grammar says."""

import dataclasses
import json
import signal
from typing import Any

import pytest

from tests.support import cluster as c
from tests.support.cluster import Fault
from tests.support.shared_servers import CLUSTER_OF_SMALL_STEPS

WORDS = {"type": "array", "minItems": 14, "maxItems": 14, "items": {"type": "string", "pattern": "^[a-z]{3,9}$"}}
RECORDS = {
    "type": "array",
    "minItems": 6,
    "maxItems": 6,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{3,9}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["old", "new"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
SCHEMAS: list[dict[str, Any]] = [WORDS, RECORDS]
GUIDED = [
    dataclasses.replace(
        ask, max_tokens=400, params={**ask.params, "ignore_eos": False, "guided_json": SCHEMAS[i % len(SCHEMAS)]}
    )
    for i, ask in enumerate(c.asks(6, num_prompt=12, max_tokens=0))
]


@pytest.fixture(scope="module")
def shared(shared_servers):
    with shared_servers.lend(*CLUSTER_OF_SMALL_STEPS) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


@pytest.fixture(scope="module")
def expected(server) -> list[list[int]]:
    """By one process that is not disturbed."""
    return c.right_answers(server, GUIDED)


def assert_valid(streams: list[c.Stream]) -> None:
    for i, stream in enumerate(streams):
        value = json.loads(stream.text)
        assert stream.finish_reason == "stop" and len(value) == SCHEMAS[i % len(SCHEMAS)]["minItems"]
        for item in value:
            assert isinstance(item, str) or (item.keys() == {"name", "age", "kind"} and item["age"] < 1000)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_sigkill(whole, expected, rank) -> None:
    """Of an attention worker: another one makes the guides anew, from the tokens. Of an expert worker: a step is
    repeated, and no guide has moved."""
    fault = Fault(whole, rank, signal.SIGKILL)
    streams = c.run_with(whole, GUIDED, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    assert_valid(streams)
    c.wait_whole(whole)


def test_a_worker_that_leaves(whole, expected) -> None:
    """With streams whose grammars it may still be compiling."""
    streams = c.run_with(
        whole, GUIDED, lambda streams: True, lambda: c.post(whole, "/cluster/drain", {"rank": 0}).raise_for_status()
    )
    c.assert_equal(streams, expected)
    assert_valid(streams)
    c.wait_whole(whole)
