"""A chain of graphs: which are launched, and in which order."""

import pytest

from everserve.engine.recorder import Chain


class Graph:
    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def replay(self) -> None:
        self._launched.append(self._name)


@pytest.mark.parametrize("num_cuts", [0, 2])
def test_a_rehearsal_launches_everything_once(num_cuts):
    launched: list[str] = []
    chain = Chain()
    chain.graphs = [Graph(f"graph {i}", launched) for i in range(num_cuts + 1)]
    chain.asides = [Graph(f"aside {i}", launched) for i in range(num_cuts)]
    chain.rehearse()
    expected = ["graph 0", "aside 0", "graph 1", "aside 1", "graph 2"]
    assert launched == expected[: 2 * num_cuts + 1]
    launched.clear()
    chain.launch(num_cuts)
    assert launched == [f"graph {num_cuts}"]
