"""How much experts are used: rows per second by layer and expert, over all workers, older rows counting less."""

import math
from collections.abc import Mapping

import numpy as np

from everserve.plan.dealing import Loads

_HALF_LIFE_S = 10.0
_TAU_S = _HALF_LIFE_S / math.log(2)  # rows that count, at a constant rate: those of this long
_FLOOR = 0.01  # of the mean: an expert without rows today may have some tomorrow


class ExpertLoads:
    """Reports of workers, decayed. The time is passed in."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._rows_LE = np.zeros((num_layers, num_experts))
        self._at = 0.0
        self._began: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self._rows_LE)

    def add(self, rows: Mapping[int, Mapping[int, int]], now: float) -> None:
        """Rows by index of the layer and expert, computed in about the last second. Others than there are do not
        count: a worker is not trusted with that."""
        self._decay(now)
        if self._began is None:
            self._began = now - 1.0
        num_layers, num_experts = self._rows_LE.shape
        for layer, experts in rows.items():
            for expert, num in experts.items():
                if 0 <= layer < num_layers and 0 <= expert < num_experts and num > 0:
                    self._rows_LE[layer, expert] += num

    def per_s(self, now: float) -> np.ndarray:
        """Rows per second, [call][expert]. Soon after the start it is the mean since then."""
        self._decay(now)
        if self._began is None:
            return self._rows_LE.copy()
        return self._rows_LE / (_TAU_S * -math.expm1(-(now - self._began) / _TAU_S))

    def by_layer(self, now: float | None = None) -> dict[int, Loads]:
        """For planners: only layers that are used, and no expert without any load. None: as of the last report, where
        only proportions matter."""
        load_LE = self.per_s(self._at if now is None else now)
        used = [layer for layer, load_E in enumerate(load_LE) if load_E.sum() > 0]
        return {layer: tuple((load_LE[layer] + _FLOOR * load_LE[layer].mean()).tolist()) for layer in used}

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._rows_LE *= 0.5 ** ((now - self._at) / _HALF_LIFE_S)
            self._at = now
