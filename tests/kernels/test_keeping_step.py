"""Attention workers that are out of step come together, whatever the order of things, and stay so.

Kernels of all workers run in random order, and no attention worker ever has rows for all expert workers.
"""

import itertools
import random

import pytest
import torch

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import FLAG_AT
from tests.kernels.toy_lanes import NUM_EXPERTS, NUM_LAYERS, Cluster, make_cluster

IS_SLOW = not torch.cuda.is_available()  # kernels are interpreted
NUM_WORKERS = 2 if IS_SLOW else 3  # of each kind
NUM_STEPS = 3 if IS_SLOW else 6  # of each attention worker; they begin somewhere in the middle of the first
PATIENCE = 40  # looks; in each turn an expert worker looks once


class Steps:
    """One attention worker, step after step, until it has had enough of them."""

    def __init__(self, cluster: Cluster, a: int, layer: int, rng: random.Random) -> None:
        self._cluster, self._a, self._rng = cluster, a, rng
        self._worker = cluster.attention[a]
        self._num_steps, self._layer = 0, layer
        self._send()

    @property
    def is_done(self) -> bool:
        return self._num_steps == NUM_STEPS

    def turn(self) -> None:
        """Go on if all answers are there."""
        flags = [self._cluster.word(self._a, e, FLAG_AT, torch.int32).item() for e in range(NUM_WORKERS)]
        if self.is_done or min(flags) < 0:
            return
        self._layer = (self._layer + 1) % NUM_LAYERS
        self._num_steps += self._layer == 0
        if self.is_done:
            send.announce(self._worker.state, -1)
        else:
            self._send()

    def _send(self) -> None:
        """Rows for all expert workers but one. Somebody has to be waited for: without that nobody keeps step."""
        worker, state, layer = self._worker, self._worker.state, self._layer
        all_TK = torch.arange(worker.ids_TK.numel(), dtype=torch.int32, device=state.stop.device) % NUM_EXPERTS
        left_out = self._rng.randrange(NUM_WORKERS)
        ids_TK = torch.where(all_TK % NUM_WORKERS == left_out, -1, all_TK).view(worker.ids_TK.shape)
        y_row_TK = send.plan(state, ids_TK, worker.place_of_LN[layer], worker.expert_at_LP[layer], layer)
        send.post(state, worker.x_TD, y_row_TK, layer, (layer + 1) % NUM_LAYERS)


@pytest.mark.parametrize("seed", [1] if IS_SLOW else range(20))
def test_steps_begin_together_whoever_is_where(device, seed) -> None:
    rng = random.Random(seed)
    cluster = make_cluster(device, num_attention=NUM_WORKERS, num_experts=NUM_WORKERS, num_tokens=4, max_spins=1)
    for expert in cluster.experts:
        expert.state.limits[1:] = torch.tensor([PATIENCE, 10 * PATIENCE])
    workers = [Steps(cluster, a, layer, rng) for a, layer in enumerate(rng.sample(range(NUM_LAYERS), NUM_WORKERS))]
    batches: list[list[tuple[int, int]]] = [[] for _ in cluster.experts]  # the layer, and whose requests
    while not any(worker.is_done for worker in workers):
        i = rng.randrange(2 * NUM_WORKERS)
        if i < NUM_WORKERS:
            workers[i].turn()
            continue
        expert = cluster.experts[i - NUM_WORKERS]
        layer = expert.answer()
        if layer >= 0:
            batches[i - NUM_WORKERS].append((layer, int((expert.state.seq_A > 0).sum().item())))

    begun = batches[0].index((0, NUM_WORKERS))
    assert begun <= NUM_WORKERS * NUM_LAYERS, f"{batches[0]}: all should have come together in their first steps"
    for (before, _), (layer, num) in itertools.pairwise(batches[0][begun:]):
        assert layer > before or (layer, num) == (0, NUM_WORKERS), f"{batches[0]}: out of step again"
