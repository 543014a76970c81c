/* Ops on one row at a time: embed, rms_norm, combine. Element by element, so the compiler vectorises them as it likes. */

#include "rows.h"

#include <stdlib.h>

#include "norm.h"

#define ROWS_PER_TASK 16
#define MACS_PER_ELEMENT 4 /* these ops wait for memory: count an element as so many multiply-adds */

EXPORT int64_t es_embed(const struct embed_args *args) {
    struct matrix table = {args->table, (size_t)args->stride, (enum dtype)args->dtype};
    size_t size = (size_t)args->size;
    for (int64_t t = 0; t < args->num_rows; t++) {
        int32_t token = args->tokens[t];
        if (token < 0 || token >= args->num_tokens) return 1 + t;
        widen(matrix_from(table, (size_t)token).data, table.dtype, size, args->out + (size_t)t * size);
    }
    return 0;
}

struct norm {
    const struct rms_norm_args *args;
    const float *weight; /* widened */
};

static void norm_task(void *job, size_t task) {
    const struct norm *n = job;
    size_t size = (size_t)n->args->size, end = smaller((task + 1) * ROWS_PER_TASK, (size_t)n->args->num_rows);
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *x = n->args->x + t * size;
        float *restrict out = n->args->out + t * size;
        float factor = inverse_rms(x, size, (float)n->args->eps);
        for (size_t i = 0; i < size; i++) out[i] = n->weight[i] * (x[i] * factor);
    }
}

EXPORT void es_rms_norm(const struct rms_norm_args *args) {
    float *widened = NULL;
    if (args->dtype != F32) {
        widened = malloc((size_t)args->size * sizeof(float));
        if (!widened) abort();
        widen(args->weight, (enum dtype)args->dtype, (size_t)args->size, widened);
    }
    struct norm n = {args, widened ? widened : args->weight};
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    parallel_for(num_tasks, MACS_PER_ELEMENT * (double)args->num_rows * (double)args->size, norm_task, &n);
    free(widened);
}

/* ((residual + w0 r0) + w1 r1) + ..., from left to right, each product rounded. */
static void combine_task(void *job, size_t task) {
    const struct combine_args *c = job;
    size_t top_k = (size_t)c->top_k, size = (size_t)c->size;
    size_t end = smaller((task + 1) * ROWS_PER_TASK, (size_t)c->num_rows);
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *weights = c->weights + t * top_k;
        const float *residual = c->residual + t * size;
        float *restrict out = c->out + t * size;
        memcpy(out, residual, size * sizeof(float));
        for (size_t k = 0; k < top_k; k++) {
            size_t r = t * top_k + k;
            const float *row = c->row_at ? c->row_at[r] : c->rows + r * size;
            for (size_t i = 0; i < size; i++) out[i] += weights[k] * row[i];
        }
    }
}

EXPORT void es_combine(const struct combine_args *args) {
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    double macs = MACS_PER_ELEMENT * (double)args->num_rows * (double)args->top_k * (double)args->size;
    parallel_for(num_tasks, macs, combine_task, (void *)args);
}
