/* Between the qkv projection and attention: norm q and k, per head or all heads together, rotate them by their positions,
   store k and v. */

#include "rotate.h"

#include <stdlib.h>
#include "norm.h"
#include "threads.h"

#define ROWS_PER_TASK 8
#define MACS_PER_ELEMENT 4

struct rotate {
    const struct rotate_args *args;
    const float *q_norm, *k_norm; /* widened, with the offset; of one head, or of all */
};

static void norm_head(const float *x, const float *norm, float factor, size_t size, float *out) {
    for (size_t i = 0; i < size; i++) out[i] = norm[i] * (x[i] * factor);
}

/* `factor`: of the norm of the whole row, if that has one. */
static void rotate_head(const struct rotate_args *args, const float *x, const float *norm, float factor,
                        const float *cos, const float *sin, size_t size, float *restrict out) {
    float normed[MAX_HEAD_SIZE], eps = (float)args->eps;
    if (norm && !args->turn.norms_after) {
        norm_head(x, norm, args->turn.is_row ? factor : inverse_rms(x, size, eps), size, normed);
        x = normed;
    }
    size_t rotated = (size_t)args->turn.rotary_size;
    rotate_halves(x, cos, sin, rotated, out);
    memcpy(out + rotated, x + rotated, (size - rotated) * sizeof(float));
    if (norm && args->turn.norms_after) norm_head(out, norm, inverse_rms(out, size, eps), size, out);
}

static void rotate_task(void *job, size_t task) {
    const struct rotate *r = job;
    const struct rotate_args *args = r->args;
    const struct kv_pool *pool = &args->pool;
    const struct turn *turn = &args->turn;
    size_t size = (size_t)pool->head_size, num_q = (size_t)args->num_q_heads, num_kv = (size_t)pool->num_heads;
    size_t block_size = (size_t)pool->block_size, end = smaller((task + 1) * ROWS_PER_TASK, (size_t)args->num_rows);
    size_t next_norm = turn->is_row ? size : 0; /* from the weights of one head to those of the next */
    float eps = (float)args->eps;
    for (size_t t = task * ROWS_PER_TASK; t < end; t++) {
        const float *q = args->qkv + t * (num_q + 2 * num_kv) * size, *k = q + num_q * size, *v = k + num_kv * size;
        size_t position = (size_t)args->positions[t], at = position * (size_t)turn->rotary_size;
        const float *cos = args->cos + at, *sin = args->sin + at;
        size_t block = (size_t)args->kv_slots[t] / block_size, offset = (size_t)args->kv_slots[t] % block_size;
        float q_factor = turn->is_row ? inverse_rms(q, num_q * size, eps) : 0.0f;
        float k_factor = turn->is_row ? inverse_rms(k, num_kv * size, eps) : 0.0f;
        for (size_t h = 0; h < num_q; h++) {
            const float *norm = r->q_norm ? r->q_norm + h * next_norm : NULL;
            float *out = args->q + (t * num_q + h) * size;
            rotate_head(args, q + h * size, norm, q_factor, cos, sin, size, out);
            for (size_t i = 0; i < size && turn->q_scale; i++) out[i] *= turn->q_scale[position];
        }
        for (size_t g = 0; g < num_kv; g++) {
            const float *norm = r->k_norm ? r->k_norm + g * next_norm : NULL;
            float rotated[MAX_HEAD_SIZE];
            rotate_head(args, k + g * size, norm, k_factor, cos, sin, size, rotated);
            store_row(kv_row(pool, block, KEYS, g, offset), (enum dtype)pool->dtype, rotated, size);
            store_row(kv_row(pool, block, VALUES, g, offset), (enum dtype)pool->dtype, v + g * size, size);
        }
    }
}

static void widen_norm(const void *from, int64_t dtype, size_t n, float offset, float *to) {
    widen(from, (enum dtype)dtype, n, to);
    for (size_t i = 0; i < n; i++) to[i] += offset;
}

EXPORT void es_rotate_and_store(const struct rotate_args *args) {
    size_t size = (size_t)args->pool.head_size, is_row = (size_t)args->turn.is_row;
    size_t q_size = is_row ? size * (size_t)args->num_q_heads : size;
    size_t k_size = is_row ? size * (size_t)args->pool.num_heads : size;
    float few[2 * MAX_HEAD_SIZE], *norms = is_row ? malloc((q_size + k_size) * sizeof(float)) : few;
    if (!norms) abort();
    float offset = (float)args->turn.offset, *k_norm = norms + q_size;
    if (args->q_norm) widen_norm(args->q_norm, args->q_norm_dtype, q_size, offset, norms);
    if (args->k_norm) widen_norm(args->k_norm, args->k_norm_dtype, k_size, offset, k_norm);
    struct rotate r = {args, args->q_norm ? norms : NULL, args->k_norm ? k_norm : NULL};
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    double heads = (double)(args->num_q_heads + 2 * args->pool.num_heads);
    parallel_for(num_tasks, MACS_PER_ELEMENT * (double)args->num_rows * heads * (double)size, rotate_task, &r);
    if (norms != few) free(norms);
}
