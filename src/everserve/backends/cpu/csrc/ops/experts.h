/* Rows of experts, as they are asked for from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

/* What ops.py keeps per slot. All zeros when empty. */
enum activation { SILU = 0, GELU_TANH = 1, RELU = 2, CLAMPED_SWIGLU = 3 };

struct slot {
    const void *gate, *up, *down;
    const void *biases; /* of gate, up and down, one behind the other; NULL: none */
    int64_t gate_stride, up_stride, down_stride, dtype, bias_dtype, activation;
    double alpha, limit; /* of CLAMPED_SWIGLU */
};

struct expert_rows_args {
    const float *x;
    const int32_t *tokens, *slot_of;
    const struct slot *slots;
    float *y;
    const int32_t *y_index; /* NULL: the answer to r is row r of y */
    int64_t num_rows, num_tokens, num_y, num_slots, hidden_size, inner_size;
};

/* 0, or why nothing was computed: 1 + r when slot_R[r] is out of range or empty, -(1 + r) when token_R[r] or y_R[r] is
   out of range. */
EXPORT int64_t es_expert_rows(const struct expert_rows_args *args);
