/* The experts of each row: router logits, softmax over all experts that are allowed, the best K of these. */

#include "route.h"

#include "exp.h"

#define ROWS_PER_TASK 8
#define MAX_EXPERTS 1024 /* ops.py checks */

/* In place. logits has room for a multiple of VW; what is beyond n is ignored. */
static void softmax(float *logits, size_t n) {
    for (size_t i = n; i % VW; i++) logits[i] = -1e30f; /* e^that is 0 */
    float highest = logits[0];
    for (size_t i = 1; i < n; i++) highest = logits[i] > highest ? logits[i] : highest;
    vf total = splat(0.0f);
    for (size_t i = 0; i < n; i += VW) {
        vf e = exp_v(load_f32(logits + i) - splat(highest));
        total += e;
        store_f32(logits + i, e);
    }
    vf divisor = splat(sum(total));
    for (size_t i = 0; i < n; i += VW) store_f32(logits + i, load_f32(logits + i) / divisor);
}

/* As if the router gave experts that are not allowed no chance at all: e^that is 0. */
static void exclude(float *logits, size_t n, const int32_t *allowed) {
    for (size_t i = 0; i < n; i++)
        if (!allowed[i]) logits[i] = -1e30f;
}

/* The K largest, largest first; of equal ones the lower id first. Ids are valid even when all are NaN; -1, with no
   weight, where fewer than K are allowed. */
static void best(const float *p, size_t n, const int32_t *allowed, size_t top_k, int32_t *ids, float *weights) {
    uint8_t taken[MAX_EXPERTS] = {0};
    for (size_t i = 0; allowed && i < n; i++) taken[i] = !allowed[i];
    for (size_t k = 0; k < top_k; k++) {
        size_t at = n;
        for (size_t i = 0; i < n; i++)
            if (!taken[i] && (at == n || p[i] > p[at])) at = i;
        ids[k] = at < n ? (int32_t)at : -1;
        weights[k] = at < n ? p[at] : 0.0f;
        if (at < n) taken[at] = 1;
    }
}

static void route_task(void *job, size_t task) {
    const struct route_args *args = job;
    size_t num_experts = (size_t)args->num_experts, size = (size_t)args->size, top_k = (size_t)args->top_k;
    size_t first = task * ROWS_PER_TASK, m = smaller((size_t)args->num_rows - first, ROWS_PER_TASK);
    size_t stride = (num_experts + VW - 1) / VW * VW;
    float p[ROWS_PER_TASK * MAX_EXPERTS];
    struct rows x = {(float *)args->x + first * size, NULL, size}, logits = {p, NULL, stride};
    struct matrix router = {args->router, (size_t)args->router_stride, (enum dtype)args->dtype};
    gemm(x, m, router, num_experts, size, logits);
    for (size_t t = 0; t < m; t++) {
        float *weights = args->weights + (first + t) * top_k;
        if (args->allowed) exclude(row(&logits, t), num_experts, args->allowed);
        softmax(row(&logits, t), num_experts);
        best(row(&logits, t), num_experts, args->allowed, top_k, args->ids + (first + t) * top_k, weights);
        if (args->renormalise) {
            float total = 0.0f;
            for (size_t k = 0; k < top_k; k++) total += weights[k];
            for (size_t k = 0; k < top_k && total != 0.0f; k++) weights[k] /= total;
        }
    }
}

EXPORT void es_route(const struct route_args *args) {
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    double macs = (double)args->num_rows * (double)args->num_experts * (double)args->size;
    parallel_for(num_tasks, macs, route_task, (void *)args);
}
