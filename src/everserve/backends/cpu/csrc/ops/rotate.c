/* Between the qkv projection and attention: norm q and k per head (Qwen3), rotate them by their positions, store k
   and v. */

#include "attention.h"
#include "norm.h"
#include "threads.h"

#define ROWS_PER_TASK 8
#define MACS_PER_ELEMENT 4

struct rotate {
    const struct rotate_args *args;
    const float *q_norm, *k_norm; /* widened */
};

/* In two halves, as Hugging Face does: (a, b) -> (a cos - b sin, b cos + a sin). */
static void rotate_head(const float *x, const float *norm, float eps, const float *cos, const float *sin, size_t size,
                        float *restrict out) {
    float normed[MAX_HEAD_SIZE];
    if (norm) {
        float factor = inverse_rms(x, size, eps);
        for (size_t i = 0; i < size; i++) normed[i] = norm[i] * (x[i] * factor);
        x = normed;
    }
    size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
}

static void store_row(void *to, enum dtype dtype, const float *from, size_t n) {
    switch (dtype) {
        case F32: memcpy(to, from, n * sizeof(float)); break;
        case BF16:
            for (size_t i = 0; i < n; i++) ((bf16 *)to)[i] = f32_to_bf16(from[i]);
            break;
        case F16:
            for (size_t i = 0; i < n; i++) ((f16 *)to)[i] = f32_to_f16(from[i]);
            break;
    }
}

static void rotate_task(void *job, size_t task) {
    const struct rotate *r = job;
    const struct rotate_args *args = r->args;
    const struct kv_pool *pool = &args->pool;
    size_t size = (size_t)pool->head_size, num_q = (size_t)args->num_q_heads, num_kv = (size_t)pool->num_heads;
    size_t block_size = (size_t)pool->block_size, end = smaller((task + 1) * ROWS_PER_TASK, (size_t)args->num_rows);
    float eps = (float)args->eps;
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *q = args->qkv + t * (num_q + 2 * num_kv) * size, *k = q + num_q * size, *v = k + num_kv * size;
        size_t at = (size_t)args->positions[t] * size;
        const float *cos = args->cos + at, *sin = args->sin + at;
        size_t block = (size_t)args->kv_slots[t] / block_size, offset = (size_t)args->kv_slots[t] % block_size;
        for (size_t h = 0; h < num_q; h++)
            rotate_head(q + h * size, r->q_norm, eps, cos, sin, size, args->q + (t * num_q + h) * size);
        for (size_t g = 0; g < num_kv; g++) {
            float rotated[MAX_HEAD_SIZE];
            rotate_head(k + g * size, r->k_norm, eps, cos, sin, size, rotated);
            store_row(kv_row(pool, block, KEYS, g, offset), (enum dtype)pool->dtype, rotated, size);
            store_row(kv_row(pool, block, VALUES, g, offset), (enum dtype)pool->dtype, v + g * size, size);
        }
    }
}

EXPORT void es_rotate_and_store(const struct rotate_args *args) {
    float q_norm[MAX_HEAD_SIZE], k_norm[MAX_HEAD_SIZE];
    size_t size = (size_t)args->pool.head_size;
    if (args->q_norm) widen(args->q_norm, (enum dtype)args->q_norm_dtype, size, q_norm);
    if (args->k_norm) widen(args->k_norm, (enum dtype)args->k_norm_dtype, size, k_norm);
    struct rotate r = {args, args->q_norm ? q_norm : NULL, args->k_norm ? k_norm : NULL};
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    double heads = (double)(args->num_q_heads + 2 * args->pool.num_heads);
    parallel_for(num_tasks, MACS_PER_ELEMENT * (double)args->num_rows * heads * (double)size, rotate_task, &r);
}
