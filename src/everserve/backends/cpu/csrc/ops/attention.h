/* The two halves of attention between its projections, as they are called from ops.py and from heads.c. */

#pragma once

#include "kv_pool.h"
#include "threads.h"

#define MAX_HEAD_SIZE 576 /* ops.py checks */

/* What else there is to say about norms and rotation. */
struct turn {
    int64_t rotary_size; /* the first values of a head that are rotated; 0: none are, and there are no cos and sin */
    int64_t is_row;      /* all heads are normed together, each with weights of its own */
    int64_t norms_after; /* behind the rotation */
    double offset;       /* of the weights of norms */
    const float *q_scale; /* by position; NULL: q is not multiplied */
};

/* Which keys a row sees, and what is done with scores. */
struct view {
    double scale, softcap; /* 0: no cap */
    int64_t window, chunk; /* 0: none */
    const float *sinks;    /* by query head; NULL: none */
    int64_t value_size;    /* the first numbers of a key, which are its value too; 0: values are apart, as wide as keys */
};

struct rotate_args {
    struct kv_pool pool;
    const float *qkv, *cos, *sin;
    const void *q_norm, *k_norm; /* NULL where the model has none */
    const int32_t *positions, *kv_slots;
    float *q;
    int64_t num_rows, num_q_heads, q_norm_dtype, k_norm_dtype;
    double eps;
    struct turn turn;
};

struct attend_args {
    struct kv_pool pool;
    const float *q;
    float *out;
    const int32_t *positions, *query_starts, *block_tables;
    int64_t num_rows, num_sequences, table_width, num_q_heads;
    struct view view;
};

EXPORT void es_rotate_and_store(const struct rotate_args *args);
EXPORT void es_attend(const struct attend_args *args);
