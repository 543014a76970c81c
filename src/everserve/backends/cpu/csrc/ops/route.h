/* The experts of each row, as they are chosen from ops.py and from layers.c. */

#pragma once

#include "gemm.h"
#include "threads.h"

enum score { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2 };

/* How experts are chosen and weighed: model/spec.py, Router. */
struct choice {
    const void *bias;        /* of logits; NULL: none */
    const float *correction; /* NULL: none */
    int64_t bias_dtype, score, num_groups, groups_kept, counted, renormalise;
    double least_sum, scale;
};

struct route_args {
    const float *x;
    const void *router;
    int32_t *ids;
    float *weights;
    const int32_t *allowed; /* by expert; NULL: all are */
    int64_t num_rows, num_experts, size, top_k, router_stride, dtype;
    struct choice choice;
};

EXPORT void es_route(const struct route_args *args);
