/* Ops on one row at a time, as they are called from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

struct embed_args {
    const void *table;
    const int32_t *tokens;
    float *out;
    int64_t num_rows, num_tokens, size, stride, dtype; /* the table has num_tokens rows */
    double scale;
};

/* x * factor * (weight + offset) * scale; is_centred: of x minus its mean. */
struct norm {
    const void *weight; /* NULL: x as it is */
    int64_t dtype, is_centred;
    double eps, offset, scale;
};

struct norm_args {
    const float *x;
    float *out;
    int64_t num_rows, size;
    struct norm norm;
};

/* residual + scale * norm(x). `out` may be x, or the residual. */
struct join_args {
    const float *x, *residual;
    float *out;
    int64_t num_rows, size;
    double scale;
    struct norm norm;
};

struct softcap_args {
    float *x; /* and the result */
    int64_t size;
    double cap;
};

struct sigmoid_args {
    float *x; /* and the result */
    int64_t size;
};

struct combine_args {
    const float *rows;           /* one after the other, in the order of (t, k) ... */
    const float *const *row_at;  /* ... or, if not NULL, each where this says */
    const float *weights, *residual; /* residual may be NULL, which is 0, or be `out` */
    float *out;
    int64_t num_rows, top_k, size;
};

/* 0, or 1 + t: tokens[t] has no row. */
EXPORT int64_t es_embed(const struct embed_args *args);
EXPORT void es_norm(const struct norm_args *args);
EXPORT void es_join(const struct join_args *args);
EXPORT void es_softcap(const struct softcap_args *args);
EXPORT void es_sigmoid(const struct sigmoid_args *args);
EXPORT void es_combine(const struct combine_args *args);
