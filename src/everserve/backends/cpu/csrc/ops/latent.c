/* Latent attention: what is between its products with weights, and the products of single heads. Attention itself is
   that of all other models, with one KV head whose keys begin with their values (attention.c). */

#include "latent.h"

#include <stdlib.h>

#include "norm.h"
#include "rotate.h"

#define ROWS_PER_TASK 8
#define PRODUCT_ROWS 256 /* of x, in a task */
#define MACS_PER_ELEMENT 4

struct turn_latent {
    const struct turn_latent_args *args;
    const float *kv_norm; /* widened */
};

/* The latent row of one token: normed, but for its end, which is rotated. */
static void latent_row(const struct turn_latent *t, const float *kv, const float *cos, const float *sin, float *out) {
    size_t rotary = (size_t)t->args->rotary_size, rank = (size_t)t->args->pool.head_size - rotary;
    float factor = inverse_rms(kv, rank, (float)t->args->eps);
    for (size_t i = 0; i < rank; i++) out[i] = t->kv_norm[i] * (kv[i] * factor);
    rotate_halves(kv + rank, cos, sin, rotary, out + rank);
}

static void turn_task(void *job, size_t task) {
    const struct turn_latent *t = job;
    const struct turn_latent_args *args = t->args;
    const struct kv_pool *pool = &args->pool;
    size_t size = (size_t)pool->head_size, rotary = (size_t)args->rotary_size, num_heads = (size_t)args->num_heads;
    size_t q_size = (size_t)args->plain_size + rotary, block_size = (size_t)pool->block_size;
    size_t end = smaller((task + 1) * ROWS_PER_TASK, (size_t)args->num_rows);
    for (size_t r = task * ROWS_PER_TASK; r < end; r++) {
        const float *cos = args->cos + (size_t)args->positions[r] * rotary;
        const float *sin = args->sin + (size_t)args->positions[r] * rotary;
        size_t block = (size_t)args->kv_slots[r] / block_size, offset = (size_t)args->kv_slots[r] % block_size;
        float latent[MAX_HEAD_SIZE];
        latent_row(t, args->kv + r * size, cos, sin, latent);
        store_row(kv_row(pool, block, KEYS, 0, offset), (enum dtype)pool->dtype, latent, size);
        for (size_t h = 0; h < num_heads; h++) {
            const float *q = args->q + (r * num_heads + h) * q_size + (size_t)args->plain_size;
            rotate_halves(q, cos, sin, rotary, args->out + (r * num_heads + h) * size + size - rotary);
        }
    }
}

EXPORT void es_turn_latent(const struct turn_latent_args *args) {
    float kv_norm[MAX_HEAD_SIZE];
    size_t num_rows = (size_t)args->num_rows;
    widen(args->kv_norm, (enum dtype)args->norm_dtype, (size_t)(args->pool.head_size - args->rotary_size), kv_norm);
    struct turn_latent t = {args, kv_norm};
    double elements = (double)args->pool.head_size + (double)args->num_heads * (double)args->rotary_size;
    parallel_for((num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, MACS_PER_ELEMENT * (double)num_rows * elements,
                 turn_task, &t);
}

/* Some rows of one head. */
static void by_head_task(void *job, size_t task) {
    const struct by_head_args *args = job;
    size_t num_heads = (size_t)args->num_heads, head = task % num_heads, first = task / num_heads * PRODUCT_ROWS;
    size_t x_stride = (size_t)args->x_stride, out_stride = (size_t)args->out_stride;
    struct rows x = {(float *)args->x + head * x_stride, NULL, num_heads * x_stride};
    struct rows out = {args->out + head * out_stride, NULL, num_heads * out_stride};
    struct matrix weight = {args->weight, (size_t)args->row_stride, args->dtype, 0};
    weight.data = (const char *)weight.data + head * (size_t)args->head_stride * (weight.dtype == F32 ? 4 : 2);
    gemm(rows_from(x, first), smaller((size_t)args->num_rows - first, PRODUCT_ROWS), weight,
         (size_t)args->num_columns, (size_t)args->k, rows_from(out, first));
}

EXPORT void es_by_head(const struct by_head_args *args) {
    size_t row_tasks = ((size_t)args->num_rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
    double macs = (double)args->num_rows * (double)args->num_heads * (double)args->num_columns * (double)args->k;
    parallel_for(row_tasks * (size_t)args->num_heads, macs, by_head_task, (void *)args);
}
