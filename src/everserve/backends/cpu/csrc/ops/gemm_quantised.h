/* Products with quantised weights (quantised.h), and their numbers: what gemm() is made of. */

#pragma once

#include "ahead.h"
#include "gemm.h"

/* With more rows than that a panel of weights is decoded first, and used for all of them. */
size_t most_fused(const struct quantised *q);

/* c[0..m)[0..n) = a[0..m) . weights[row..row + n). */
void panel_quantised(const struct rows *a, size_t m, const struct quantised *q, size_t row, size_t n, size_t k,
                     const struct rows *c, struct ahead ahead);

/* A row as float32. */
void widen_quantised(const struct quantised *q, size_t row, size_t k, float *to);
