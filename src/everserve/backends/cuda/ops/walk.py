"""In which order the tiles of a product are computed: which of them run together decides what is read twice.

Programs walk over (tile of rows, block of columns), row tiles fastest, so that those that run together share columns of
the weight. With few rows that is all that counts. With many, each block of columns would stream all rows through the
cache again. So tiles of rows are taken in *bands*, each with all columns before the next one:

                  columns                        columns
         tiles  0  5 10 15                     0  2  4  6    band 0
                1  6 11 16                     1  3  5  7
                2  7 12 17      bands of 2:    8 10 12 14    band 1
                3  8 13 18                     9 11 13 15
                4  9 14 19                    16 17 18 19    band 2

What runs together then shares rows and columns. No result depends on it.
"""

import triton
import triton.language as tl


@triton.jit
def tile_and_column(t, num_tiles, NUM_COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """The t-th of num_tiles * NUM_COLUMNS pairs. BAND: tiles of a band; 0: all of them are one."""
    if BAND == 0:
        tile, column = t % num_tiles, t // num_tiles
    else:
        first = t // (BAND * NUM_COLUMNS) * BAND
        height = tl.minimum(num_tiles - first, BAND)
        within = t - first * NUM_COLUMNS
        tile, column = first + within % height, within // height
    return tile, column
