/* What latent attention has around attention (model/spec.py, Latent), as it is called from ops.py. */

#pragma once

#include "kv_pool.h"
#include "threads.h"

struct turn_latent_args {
    struct kv_pool pool;
    const float *q, *kv; /* [num_rows][num_heads][plain_size + rotary_size], [num_rows][pool.head_size] */
    const float *cos, *sin;
    const void *kv_norm;
    const int32_t *positions, *kv_slots;
    float *out; /* [num_rows][num_heads][pool.head_size]: the end of each head is written */
    int64_t num_rows, num_heads, plain_size, rotary_size, norm_dtype;
    double eps;
};

/* out = weight of the head . x, for each head. Strides are in elements: of x and of out from head to head, whose rows
   are num_heads times that apart; of weights from head to head, and from row to row. */
struct by_head_args {
    const float *x;
    const void *weight;
    float *out;
    int64_t num_rows, num_heads, num_columns, k, x_stride, out_stride, head_stride, row_stride, dtype;
};

EXPORT void es_turn_latent(const struct turn_latent_args *args);
EXPORT void es_by_head(const struct by_head_args *args);
