/* Ops on one row at a time, as they are called from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

struct embed_args {
    const void *table;
    const int32_t *tokens;
    float *out;
    int64_t num_rows, num_tokens, size, stride, dtype; /* the table has num_tokens rows */
};

struct rms_norm_args {
    const float *x;
    const void *weight;
    float *out;
    int64_t num_rows, size, dtype;
    double eps;
};

struct combine_args {
    const float *rows;           /* one after the other, in the order of (t, k) ... */
    const float *const *row_at;  /* ... or, if not NULL, each where this says */
    const float *weights, *residual;
    float *out;
    int64_t num_rows, top_k, size;
};

/* 0, or 1 + t: tokens[t] has no row. */
EXPORT int64_t es_embed(const struct embed_args *args);
EXPORT void es_rms_norm(const struct rms_norm_args *args);
EXPORT void es_combine(const struct combine_args *args);
