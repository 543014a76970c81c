/* Weights of 8 or 4 bits, as they are read: codes, and what turns them into numbers.

       weight[o][i] = rounded((number of code[o][i] - zero[o'][i / group]) * scale[o'][i / group])
                      o' = (first_row + o) / rows_per_scale

   The number is exact, the product is rounded to float32 and then to `dtype`: what is computed with is, bit for bit, what
   a decoder makes of the same files (model/decoding.py, model/unpacking.py). So products have the bits of products with
   the decoded weights.

       E4M3, INT8   a byte each, in order: fp8 (of its NaN it makes 480), and integers with a sign
       INT4, E2M1   32 columns are 16 bytes: byte l has column l in its low half, column 16 + l in its high half. The 16
                    weights that a group can have are made once for the group, and then looked up by code

   A group is a multiple of 32 columns, or of 16 with 8 bits, or at least as wide as the matrix. */

#pragma once

#include "simd.h"

/* E4M3_TINY: E4M3 with a scale below 2^-117, but not 0. */
enum codes { E4M3 = 0, INT8 = 1, INT4 = 2, E2M1 = 3, E4M3_TINY = 4 };

#define E8M0 4 /* of scales only, beside enum dtype: the exponent of a power of two */

struct quantised {
    const void *codes, *scales;
    const void *zeros; /* int8; NULL: all are 0 */
    int64_t stride;       /* bytes of codes from row to row */
    int64_t scale_stride; /* scales, and zeros, from row to row of these */
    int64_t rows_per_scale, first_row, group;
    int64_t kind, scale_dtype, dtype; /* enum codes; of scales; what weights are rounded to */
};
