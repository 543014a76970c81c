/* Ops on one row at a time: embed, norm, join, combine; and softcap. Element by element, so the compiler vectorises them as it likes. */

#include "rows.h"

#include <stdlib.h>

#include "exp.h"
#include "norm.h"

#define ROWS_PER_TASK 16
#define NUMBERS_PER_TASK 8192 /* a multiple of VW */
#define MACS_PER_ELEMENT 4 /* these ops wait for memory: count an element as so many multiply-adds */

EXPORT int64_t es_embed(const struct embed_args *args) {
    struct matrix table = {args->table, (size_t)args->stride, args->dtype, 0};
    size_t size = (size_t)args->size;
    for (int64_t t = 0; t < args->num_rows; t++) {
        int32_t token = args->tokens[t];
        if (token < 0 || token >= args->num_tokens) return 1 + t;
        float *out = args->out + (size_t)t * size, scale = (float)args->scale;
        widen(matrix_from(table, (size_t)token).data, table.dtype, size, out);
        for (size_t i = 0; i < size && scale != 1.0f; i++) out[i] *= scale;
    }
    return 0;
}

/* A norm of rows, with its weights as they are multiplied: widened, with offset and scale. */
struct prepared {
    const struct norm *norm;
    const float *weight;
    float *memory; /* to be freed */
};

static struct prepared prepare(const struct norm *norm, size_t size) {
    if (!norm->weight) return (struct prepared){norm, NULL, NULL};
    float offset = (float)norm->offset, scale = (float)norm->scale;
    if (norm->dtype == F32 && offset == 0.0f && scale == 1.0f) return (struct prepared){norm, norm->weight, NULL};
    float *memory = malloc(size * sizeof(float));
    if (!memory) abort();
    widen(norm->weight, (enum dtype)norm->dtype, size, memory);
    for (size_t i = 0; i < size; i++) memory[i] = (memory[i] + offset) * scale;
    return (struct prepared){norm, memory, memory};
}

struct rows_of_norm {
    const float *x, *residual; /* residual may be NULL */
    float *out;
    size_t num_rows, size;
    float scale;
    struct prepared prepared;
};

static void norm_task(void *job, size_t task) {
    const struct rows_of_norm *n = job;
    const struct norm *norm = n->prepared.norm;
    const float *weight = n->prepared.weight;
    size_t size = n->size, end = smaller((task + 1) * ROWS_PER_TASK, n->num_rows);
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *x = n->x + t * size, *residual = n->residual ? n->residual + t * size : NULL;
        float *out = n->out + t * size, scale = n->scale;
        float mean = weight && norm->is_centred ? mean_of(x, size) : 0.0f;
        float factor = weight ? inverse_deviation(x, size, (float)norm->eps, mean) : 1.0f;
        if (!residual)
            for (size_t i = 0; i < size; i++) out[i] = weight[i] * ((x[i] - mean) * factor);
        else if (weight)
            for (size_t i = 0; i < size; i++) out[i] = residual[i] + scale * (weight[i] * ((x[i] - mean) * factor));
        else
            for (size_t i = 0; i < size; i++) out[i] = residual[i] + scale * x[i];
    }
}

static void norm_rows(struct rows_of_norm *n) {
    size_t num_tasks = (n->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    parallel_for(num_tasks, MACS_PER_ELEMENT * (double)n->num_rows * (double)n->size, norm_task, n);
    free(n->prepared.memory);
}

EXPORT void es_norm(const struct norm_args *args) {
    struct rows_of_norm n = {args->x, NULL, args->out, (size_t)args->num_rows, (size_t)args->size, 1.0f,
                             prepare(&args->norm, (size_t)args->size)};
    norm_rows(&n);
}

EXPORT void es_join(const struct join_args *args) {
    struct rows_of_norm n = {args->x, args->residual, args->out, (size_t)args->num_rows, (size_t)args->size,
                             (float)args->scale, prepare(&args->norm, (size_t)args->size)};
    norm_rows(&n);
}

static void softcap_task(void *job, size_t task) {
    const struct softcap_args *args = job;
    size_t first = task * NUMBERS_PER_TASK, end = smaller(first + NUMBERS_PER_TASK, (size_t)args->size);
    vf cap = splat((float)args->cap);
    for (size_t i = first; i < end; i += VW) {
        float tail[VW] = {0};
        size_t n = smaller(end - i, VW);
        memcpy(tail, args->x + i, n * sizeof(float));
        store_f32(tail, cap * tanh_v(load_f32(tail) / cap));
        memcpy(args->x + i, tail, n * sizeof(float));
    }
}

EXPORT void es_softcap(const struct softcap_args *args) {
    size_t num_tasks = ((size_t)args->size + NUMBERS_PER_TASK - 1) / NUMBERS_PER_TASK;
    parallel_for(num_tasks, MACS_PER_ELEMENT * 4 * (double)args->size, softcap_task, (void *)args);
}

EXPORT void es_sigmoid(const struct sigmoid_args *args) {
    for (int64_t i = 0; i < args->size; i++) args->x[i] = sigmoid_v(splat(args->x[i]))[0];
}

/* ((residual + w0 r0) + w1 r1) + ..., from left to right, each product rounded. */
static void combine_task(void *job, size_t task) {
    const struct combine_args *c = job;
    size_t top_k = (size_t)c->top_k, size = (size_t)c->size;
    size_t end = smaller((task + 1) * ROWS_PER_TASK, (size_t)c->num_rows);
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *weights = c->weights + t * top_k;
        float *restrict out = c->out + t * size;
        if (!c->residual) memset(out, 0, size * sizeof(float));
        else if (c->residual != c->out) memcpy(out, c->residual + t * size, size * sizeof(float));
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
