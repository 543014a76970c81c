"""Steps that are launched ahead, on a GPU: the same tokens, whatever dies while two steps are on their way."""

from dataclasses import replace

import pytest

from everserve_bench.load import Ask
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, cluster, kill_under_load, run, tokens

pytestmark = [*SERVER, pytest.mark.timeout(300)]

# Stops that the worker learns of when the step behind is on its way: a stop id, a string that the gateway finds, a
# limit; and one stream whose logits the host looks at, which ends long before the others.
STOPPED = [
    *(replace(ask, params=ask.params | {"stop": [" the", "e "]}) for ask in ASKS[:3]),
    *(
        replace(ask, params=ask.params | {"stop_token_ids": list(range(i, 4000, 80))})
        for i, ask in enumerate(ASKS[3:6])
    ),
    *(replace(ask, max_tokens=7 * i) for i, ask in enumerate(ASKS[6:11], 1)),
    Ask(ASKS[11].prompt, 40, {"frequency_penalty": 0.5}),
]


def one_by_one(asks: list[Ask]) -> list[Ask]:
    """The same tokens, of logits that the host looks at: no step is launched ahead of such streams."""
    return [replace(ask, params=ask.params | {"logprobs": 1}) for ask in asks]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with cluster(1, 0) as server:
        return tokens(run(server, one_by_one(ASKS))) + tokens(run(server, one_by_one(STOPPED)))


def test_tokens_are_those_of_steps_launched_one_by_one(expected: list[list[int]]) -> None:
    with cluster(1, 0) as server:
        assert tokens(run(server)) + tokens(run(server, STOPPED)) == expected
        assert tokens(run(server, [*ASKS, *STOPPED])) == expected


def test_a_death_in_the_middle_of_two_steps_changes_no_token(expected: list[list[int]]) -> None:
    """Of experts: the step stops in a layer, and the one behind it is launched again. Of an attention worker: another
    one takes over, with what the log has of the last step that was told."""
    with cluster(2, 2) as server:
        for rank in (2, 0, 3, 1):
            assert tokens(kill_under_load(server, rank)) == expected[: len(ASKS)]
        assert tokens(run(server, STOPPED)) == expected[len(ASKS) :]
        assert "Traceback" not in server.log_text(), server.log_text()
