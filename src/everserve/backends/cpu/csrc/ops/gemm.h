/* Products of rows with weight matrices in dot-product form: c[i][j] = dot(a[i], w[j]), both contiguous along k.

   Each element of c is computed by exactly the same operations in the same order whatever m and n are, wherever it
   stands in a block, and however the work is cut: one vector accumulator that runs over all of k, the tail padded with
   zeros, one summation tree. Every micro-kernel keeps to this; so every op built on it is batch-invariant and
   thread-invariant. */

#pragma once

#include "quantised.h"
#include "simd.h"

enum dtype { F32 = 0, BF16 = 1, F16 = 2 };
#define QUANTISED 3 /* of a struct matrix only, beside enum dtype */

/* Rows of floats: row i is at base + (index ? index[i] : i) * stride. An index spares a gather or scatter. */
struct rows {
    float *base;
    const int32_t *index;
    size_t stride;
};

/* A weight matrix in place: row j is at data + j * stride elements. QUANTISED: data is a struct quantised, and row 0 is
   its row `first`. */
struct matrix {
    const void *data;
    size_t stride;
    int64_t dtype;
    size_t first;
};

ALWAYS_INLINE float *row(const struct rows *rows, size_t i) {
    return rows->base + (size_t)(rows->index ? rows->index[i] : (int32_t)i) * rows->stride;
}

ALWAYS_INLINE struct rows rows_from(struct rows rows, size_t first) {
    if (rows.index) rows.index += first;
    else rows.base += first * rows.stride;
    return rows;
}

ALWAYS_INLINE struct rows columns_from(struct rows rows, size_t first) {
    rows.base += first;
    return rows;
}

ALWAYS_INLINE struct matrix matrix_from(struct matrix w, size_t first_row) {
    if (w.dtype == QUANTISED) {
        w.first += first_row;
        return w;
    }
    size_t element = w.dtype == F32 ? 4 : 2;
    w.data = (const char *)w.data + first_row * w.stride * element;
    return w;
}

#if defined(SIMD_AVX512)
#define MIN_ROWS_TO_WIDEN (8 * MR) /* with fewer rows, widening in registers is cheaper */
#else
#define MIN_ROWS_TO_WIDEN (3 * MR)
#endif

/* c[0..m)[0..n) = a[0..m) . w[0..n), on the calling thread. */
void gemm(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c);

/* n numbers of any dtype as float32. */
void widen(const void *from, enum dtype dtype, size_t n, float *to);
