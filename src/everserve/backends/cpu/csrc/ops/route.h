/* The experts of each row, as they are chosen from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

struct route_args {
    const float *x;
    const void *router;
    int32_t *ids;
    float *weights;
    const int32_t *allowed; /* by expert; NULL: all are */
    int64_t num_rows, num_experts, size, top_k, router_stride, dtype, renormalise;
};

EXPORT void es_route(const struct route_args *args);
