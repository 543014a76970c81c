"""A chain of graphs: which are launched, and in which order."""

import pytest
import torch

from everserve.backends.cuda import recorder
from everserve.backends.cuda.recorder import Chain
from everserve.memory.device import CudaError

EVERYTHING = ["graph 0", "aside 0", "graph 1", "aside 1", "graph 2"]


class Graph:
    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self._launched = name, launched

    def replay(self) -> None:
        self._launched.append(self.name)

    def raw_cuda_graph(self) -> "Graph":
        return self


class Joined:
    def __init__(self, graphs: list[Graph]) -> None:
        self._graphs = graphs

    def launch(self, stream: int) -> None:
        first = self._graphs[0]
        first._launched.append(f"{first.name} and {len(self._graphs) - 1} more on {stream}")


class Impossible:
    def __init__(self, graphs: list[Graph]) -> None:
        raise CudaError("cuGraphAddChildGraphNode", 801, "not supported")


class Stream:
    cuda_stream = 7


@pytest.fixture
def launched() -> list[str]:
    return []


@pytest.fixture
def make_chain(monkeypatch, launched):
    def make(num_cuts: int, joined: type = Joined) -> Chain:
        monkeypatch.setattr(recorder, "JoinedGraph", joined)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        chain = Chain()
        chain.graphs = [Graph(f"graph {i}", launched) for i in range(num_cuts + 1)]
        chain.asides = [Graph(f"aside {i}", launched) for i in range(num_cuts)]
        chain.join()
        return chain

    return make


def test_a_rehearsal_launches_everything_once(make_chain, launched):
    assert make_chain(2).rehearse() == 2
    assert launched == [*EVERYTHING, "graph 0", "graph 1 and 1 more on 7"]


@pytest.mark.parametrize("num_cuts", [0, 1])
def test_so_few_graphs_need_not_be_joined(make_chain, launched, num_cuts):
    chain = make_chain(num_cuts)
    assert chain.rehearse() == 1
    launched.clear()
    chain.launch()
    assert launched == ["graph 0", "graph 1"][: num_cuts + 1]


def test_a_step_is_launched_in_two_pieces_and_taken_up_anywhere(make_chain, launched):
    chain = make_chain(3)
    for first, expected in (
        (0, ["graph 0", "graph 1 and 2 more on 7"]),
        (1, ["graph 1 and 2 more on 7"]),
        (2, ["graph 2", "graph 3"]),
        (3, ["graph 3"]),
    ):
        launched.clear()
        chain.launch(first)
        assert launched == expected


def test_what_cannot_be_joined_is_launched_one_by_one(make_chain, launched, caplog):
    chain = make_chain(2, Impossible)
    assert "one by one: cuGraphAddChildGraphNode: not supported" in caplog.text
    assert chain.rehearse() == 1 and launched == EVERYTHING
    launched.clear()
    chain.launch()
    assert launched == ["graph 0", "graph 1", "graph 2"]
