/* out = scale * (x . weight^T (+ bias)) (+ residual), as it is called from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

struct linear_args {
    const float *x;
    const void *weight, *bias; /* bias and residual may be NULL */
    const float *residual;
    float *out;
    int64_t num_rows, num_columns, k, weight_stride, dtype, bias_dtype;
    double scale;
};

EXPORT void es_linear(const struct linear_args *args);
