"""Recorder: one pass over the model, captured as a chain of graphs.

The pass is cut wherever it may have to be taken up again (lanes: where it waits for peers). Usually it is launched in
two pieces: the first graph, which is short and starts the device, and while that runs all others, joined. If the device
stops in the middle, it goes on from a cut. At a cut something may be recorded *aside*: a graph for the case that what
came before the cut must be done again, differently.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from everserve.backends.cuda.graphs import JoinedGraph
from everserve.memory.device import CudaError

_log = logging.getLogger(__name__)


class Chain:
    """Graphs in order; `asides[i]` belongs to the cut before graph i + 1. `rest`: all graphs but the first, joined."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.asides: list[torch.cuda.CUDAGraph] = []
        self.rest: JoinedGraph | None = None

    def launch(self, first: int = 0) -> None:
        """Launches the chain on the current stream."""
        if first == 0:
            self.graphs[0].replay()
            first = 1
        if first == 1 and self.rest is not None:
            self.rest.launch(torch.cuda.current_stream().cuda_stream)
            return
        for graph in self.graphs[first:]:
            graph.replay()

    def join(self) -> None:
        """Make the rest, if there is something to join. A driver that cannot do it costs time, nothing else."""
        if len(self.graphs) < 3:
            return
        try:
            self.rest = JoinedGraph([graph.raw_cuda_graph() for graph in self.graphs[1:]])
        except CudaError as error:
            _log.warning("graphs are launched one by one: %s", error)

    def rehearse(self) -> int:
        """Everything once, asides too: a first launch brings a graph to the device, and takes longer than any other.
        Returns how many passes over the model that was."""
        for i, graph in enumerate(self.graphs):
            graph.replay()
            for aside in self.asides[i : i + 1]:
                aside.replay()
        if self.rest is None:
            return 1
        self.launch()
        return 2


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
            chain.join()

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
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.num_captures += 1

    def _end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph
