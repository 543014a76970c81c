/* Some heads of one layer for all rows of a step: what a worker is asked by the homes of streams. */

#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What ops.py keeps per slot: the rows of q, k and v of one KV head and its query heads. All zeros when empty. */
struct head_slot {
    const void *q, *k, *v;
    const void *q_bias, *k_bias, *v_bias; /* NULL where the model has none */
    const float *sinks;                   /* by query head; NULL where the model has none */
    int64_t q_stride, k_stride, v_stride, dtype, bias_dtype;
};

/* All fields are 8 bytes wide: model/ops.py declares the same struct. */
struct head_request {
    const float *x; /* num_rows normed rows */
    float *y;       /* [num_rows][num_heads][query heads of one][E]: attended rows */
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    const int32_t *slots, *pieces; /* of the heads that are asked for */
    int64_t num_rows, num_sequences, table_width, num_heads;
    const uint64_t *chains; /* by row: what the words of KV are made of; NULL: it gets none */
};
