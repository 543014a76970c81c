"""Recorder: one pass over the model, captured as a chain of graphs.

The pass is cut wherever it may have to be taken up again (datapath/cuda: where it waits for others). A replay launches
the whole chain at once; if the device stops in the middle, it goes on from a cut. At a cut something may be recorded
*aside*: a graph for the case that what came before the cut must be done again, differently.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Chain:
    """Graphs in order; `asides[i]` belongs to the cut before graph i + 1."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.asides: list[torch.cuda.CUDAGraph] = []

    def launch(self, first: int = 0) -> None:
        """On the current stream."""
        for graph in self.graphs[first:]:
            graph.replay()

    def rehearse(self) -> None:
        """Each graph once, asides too: the first launch brings it to the device, and takes longer than any other."""
        for i, graph in enumerate(self.graphs):
            graph.replay()
            for aside in self.asides[i : i + 1]:
                aside.replay()


class Recorder:
    """`num_captures` only grows when something is captured: that healthy workers never do that again is a promise."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.num_captures = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._chain: Chain | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def record(self) -> Iterator[Chain]:
        """What is launched inside goes into the chain instead of to the device."""
        chain = self._chain = Chain()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self._begin()
            try:
                yield chain
            finally:
                self._chain = None
                chain.graphs.append(self._end())

    def cut(self, aside: Callable[[], None]) -> None:
        """Nothing happens while nothing is recorded."""
        if self._chain is None:
            return
        self._chain.graphs.append(self._end())
        self._begin()
        aside()
        self._chain.asides.append(self._end())
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.num_captures += 1

    def _end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph
