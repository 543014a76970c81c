/* The two halves of attention between its projections, as they are called from ops.py and from heads.c. */

#pragma once

#include "kv_pool.h"
#include "threads.h"

#define MAX_HEAD_SIZE 512 /* ops.py checks */

struct rotate_args {
    struct kv_pool pool;
    const float *qkv, *cos, *sin;
    const void *q_norm, *k_norm; /* NULL where the model has none */
    const int32_t *positions, *kv_slots;
    float *q;
    int64_t num_rows, num_q_heads, q_norm_dtype, k_norm_dtype;
    double eps;
};

struct attend_args {
    struct kv_pool pool;
    const float *q;
    float *out;
    const int32_t *positions, *query_starts, *block_tables;
    int64_t num_rows, num_sequences, table_width, num_q_heads;
    double scale;
};

EXPORT void es_rotate_and_store(const struct rotate_args *args);
EXPORT void es_attend(const struct attend_args *args);
