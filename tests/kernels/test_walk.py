"""The order of tiles: every pair once, in bands."""

import pytest
import torch
import triton
import triton.language as tl

from everserve.backends.cuda.ops.walk import tile_and_column


@triton.jit
def _walk(out, num_tiles, NUM_COLUMNS: tl.constexpr, BAND: tl.constexpr):
    for t in range(num_tiles * NUM_COLUMNS):
        tile, column = tile_and_column(t, num_tiles, NUM_COLUMNS, BAND)
        tl.store(out + 2 * t, tile)
        tl.store(out + 2 * t + 1, column)


@pytest.mark.parametrize("num_tiles, num_columns, band", [(5, 4, 2), (5, 4, 0), (3, 2, 16), (6, 1, 3), (1, 7, 2)])
def test_every_pair_once_band_after_band(device, num_tiles, num_columns, band) -> None:
    out = torch.zeros(num_tiles * num_columns, 2, dtype=torch.int32, device=device)
    _walk[(1,)](out, num_tiles, NUM_COLUMNS=num_columns, BAND=band)
    height = band or num_tiles
    expected = [
        [tile, column]
        for first in range(0, num_tiles, height)
        for column in range(num_columns)
        for tile in range(first, min(first + height, num_tiles))
    ]
    assert out.tolist() == expected
