/* Products with quantised weights (quantised.h), and their numbers: what gemm() is made of. */

#pragma once

#include "ahead.h"
#include "gemm.h"

#define MOST_FUSED (MR < 2 ? MR : 2) /* rows for which quantised weights are decoded in registers */

/* c[0..m)[0..n) = a[0..m) . weights[row..row + n). */
void panel_quantised(const struct rows *a, size_t m, const struct quantised *q, size_t row, size_t n, size_t k,
                     const struct rows *c, struct ahead ahead);

/* A row as float32. */
void widen_quantised(const struct quantised *q, size_t row, size_t k, float *to);
