/* Causal attention over the paged pool, for decode and prefill alike.

   A query is one (row, head). The keys are taken in tiles of TILE positions that start at multiples of TILE, in order,
   with an online softmax per query:

       position   0 .. 15   16 .. 31   32 .. 47
       row at 37  xxxxxxxx  xxxxxxxxx  xxxxxx      tile by tile: scores, new maximum, decay of what was summed so far,
       row at 38  xxxxxxxx  xxxxxxxxx  xxxxxxx     sums of weights and of weighted values

   What a query computes depends on its own position and its sequence's keys and values alone, bit for bit: not on the
   queries that share its task, not on how the prompt was chunked, not on the block size (a multiple of TILE, so no tile
   straddles blocks). Keys and values that it does not see may be anything, NaN included: scores of such keys are
   replaced, and such values are not read. It sees those up to its own position, from the beginning of its window or
   chunk on; a tile without any of them is not looked at. */

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "attention.h"
#include "exp.h"
#include "threads.h"

#define TILE 16              /* positions; a multiple of SUM_WIDTH */
#define MAX_QUERIES 32       /* per task */
#define QR (MR < 4 ? MR : 4) /* queries that share the loads of values */
#define NV 4                 /* vectors of values at once */

#define WEIGHT float
#define LOAD load_f32
#define NAME(x) x##_f32
#include "attention.inc.h"

#define WEIGHT bf16
#define LOAD load_bf16
#define NAME(x) x##_bf16
#include "attention.inc.h"

#define WEIGHT f16
#define LOAD load_f16
#define NAME(x) x##_f16
#include "attention.inc.h"

/* Some rows of one sequence. */
struct span {
    int32_t sequence, first_row, num_rows;
};

struct attend {
    const struct attend_args *args;
    const struct span *spans;
    size_t group_size;                 /* query heads per KV head */
    size_t heads_per_task, head_tasks; /* a group may be cut into several tasks */
};

/* Of a tile, the keys that a query sees. */
struct seen {
    size_t first, end;
};

/* The queries of one task, and their running softmax. */
struct state {
    int32_t index[MAX_QUERIES]; /* (row, head), as a row of q and out */
    int32_t position[MAX_QUERIES];
    float highest[MAX_QUERIES], total[MAX_QUERIES], decay[MAX_QUERIES];
    float scores[MAX_QUERIES * TILE]; /* then weights */
    float sums[MAX_QUERIES * MAX_HEAD_SIZE];
};

/* The first key that a row at this position sees. */
static size_t first_key(const struct view *view, int32_t position) {
    size_t p = (size_t)position;
    if (view->window) return p + 1 > (size_t)view->window ? p + 1 - (size_t)view->window : 0;
    return view->chunk ? p - p % (size_t)view->chunk : 0;
}

static struct seen keys_of(const struct view *view, int32_t position, size_t tile_start) {
    size_t first = first_key(view, position);
    return (struct seen){first > tile_start ? first - tile_start : 0, smaller((size_t)position + 1 - tile_start, TILE)};
}

/* Scores of one query over one tile -> weights relative to the highest score so far. */
static void softmax_step(struct state *s, size_t query, struct seen keys, const struct view *view) {
    static const int32_t lanes[TILE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float *scores = s->scores + query * TILE;
    vf scaled[TILE / VW], high = splat(-FLT_MAX), scale = splat((float)view->scale), cap = splat((float)view->softcap);
    vi seen[TILE / VW];
    UNROLL for (int v = 0; v < TILE / VW; v++) {
        vi lane;
        memcpy(&lane, lanes + v * VW, sizeof lane);
        seen[v] = (lane < (int32_t)keys.end) & (lane >= (int32_t)keys.first);
        scaled[v] = load_f32(scores + v * VW) * scale;
        if (view->softcap != 0) scaled[v] = cap * tanh_v(scaled[v] / cap);
        high = max_v(select_v(seen[v], scaled[v], splat(-FLT_MAX)), high);
    }
    float highest = largest(high);
    highest = highest > s->highest[query] ? highest : s->highest[query];
    accumulator total = no_sum();
    UNROLL for (int v = 0; v < TILE / VW; v++) {
        vf weight = select_v(seen[v], exp_v(scaled[v] - splat(highest)), splat(0.0f));
        total.part[v % PARTS] += weight;
        store_f32(scores + v * VW, weight);
    }
    float decay = highest == s->highest[query] ? 1.0f : exp_v(splat(s->highest[query] - highest))[0];
    s->decay[query] = decay;
    s->total[query] = s->total[query] * decay + sum(total);
    s->highest[query] = highest;
}

static size_t value_width(const struct kv_pool *pool, const struct view *view) {
    return (size_t)(view->value_size ? view->value_size : pool->head_size);
}

static void add_values(struct state *s, size_t first, size_t num_queries, size_t tile_start,
                       const struct kv_pool *pool, const struct view *view, const char *tile_values) {
    size_t head_size = (size_t)pool->head_size, row_bytes = head_size * (pool->dtype == F32 ? 4 : 2);
    size_t width = value_width(pool, view);
    for (size_t i = first; i < num_queries;) {
        struct seen keys = keys_of(view, s->position[i], tile_start);
        size_t mr = 1;
        for (; mr < QR && i + mr < num_queries; mr++) {
            struct seen next = keys_of(view, s->position[i + mr], tile_start);
            if (next.first != keys.first || next.end != keys.end) break;
        }
        const float *p = s->scores + i * TILE + keys.first, *decay = s->decay + i;
        const void *values = tile_values + keys.first * row_bytes;
        size_t num_values = keys.end - keys.first;
        float *sums = s->sums + i * width;
        switch ((enum dtype)pool->dtype) {
            case F32: add_values_f32(mr, p, decay, values, num_values, head_size, width, sums); break;
            case BF16: add_values_bf16(mr, p, decay, values, num_values, head_size, width, sums); break;
            case F16: add_values_f16(mr, p, decay, values, num_values, head_size, width, sums); break;
        }
        i += mr;
    }
}

static size_t gather_queries(const struct attend_args *args, const struct span *span, size_t first_head,
                             size_t num_heads, struct state *s) {
    size_t n = 0;
    for (int32_t r = span->first_row; r < span->first_row + span->num_rows; r++)
        for (size_t h = 0; h < num_heads; h++, n++) {
            s->index[n] = (int32_t)((size_t)r * (size_t)args->num_q_heads + first_head + h);
            s->position[n] = args->positions[r];
            s->highest[n] = -INFINITY;
            s->total[n] = 0.0f;
        }
    memset(s->sums, 0, n * value_width(&args->pool, &args->view) * sizeof(float));
    return n;
}

static void attend_task(void *job, size_t task) {
    const struct attend *a = job;
    const struct kv_pool *pool = &a->args->pool;
    size_t num_kv_heads = (size_t)pool->num_heads, block_size = (size_t)pool->block_size;
    size_t size = (size_t)pool->head_size;
    const struct span *span = &a->spans[task / (num_kv_heads * a->head_tasks)];
    size_t head = task / a->head_tasks % num_kv_heads, part = task % a->head_tasks * a->heads_per_task;
    size_t num_heads = smaller(a->group_size - part, a->heads_per_task);
    const int32_t *table = a->args->block_tables + (size_t)span->sequence * (size_t)a->args->table_width;
    struct state s;
    size_t n = gather_queries(a->args, span, head * a->group_size + part, num_heads, &s);
    struct rows q = {(float *)a->args->q, s.index, size}, scores = {s.scores, NULL, TILE};

    const struct view *view = &a->args->view;
    size_t last = (size_t)s.position[n - 1], start = first_key(view, s.position[0]) / TILE * TILE;
    size_t first = 0, end = 0; /* queries before first are done, those from end on have not begun: positions ascend */
    for (; start <= last; start += TILE) {
        while ((size_t)s.position[first] < start) first++;
        while (end < n && first_key(view, s.position[end]) < start + TILE) end++;
        if (first == end) continue;
        size_t block = (size_t)table[start / block_size], offset = start % block_size;
        struct matrix keys = {kv_row(pool, block, KEYS, head, offset), size, pool->dtype, 0};
        gemm(rows_from(q, first), end - first, keys, TILE, size, rows_from(scores, first));
        for (size_t i = first; i < end; i++) softmax_step(&s, i, keys_of(view, s.position[i], start), view);
        add_values(&s, first, end, start, pool, view, kv_row(pool, block, VALUES, head, offset));
    }
    for (size_t i = 0; i < n && view->sinks; i++) /* a score that no value belongs to */
        s.total[i] += exp_f(view->sinks[s.index[i] % a->args->num_q_heads] - s.highest[i]);
    size_t width = value_width(pool, view);
    for (size_t i = 0; i < n; i++) {
        float *out = a->args->out + (size_t)s.index[i] * width;
        for (size_t e = 0; e < width; e++) out[e] = s.sums[i * width + e] / s.total[i];
    }
}

EXPORT void es_attend(const struct attend_args *args) {
    if (!args->num_rows) return;
    struct attend a = {.args = args, .group_size = (size_t)(args->num_q_heads / args->pool.num_heads)};
    /* A decoding row is one task per KV head; if these are too few for the threads, its query heads are shared out. */
    size_t pieces = (size_t)(args->num_rows * args->pool.num_heads);
    a.heads_per_task = smaller(a.group_size, MAX_QUERIES);
    while (a.heads_per_task > 1 && pieces * (a.group_size / a.heads_per_task) < max_threads()) a.heads_per_task /= 2;
    a.head_tasks = (a.group_size + a.heads_per_task - 1) / a.heads_per_task;

    int32_t rows_per_span = (int32_t)(MAX_QUERIES / a.heads_per_task);
    size_t num_spans = 0;
    double num_keys = 0;
    struct span *spans = malloc((size_t)args->num_rows * sizeof(struct span));
    if (!spans) abort();
    for (int32_t s = 0; s < args->num_sequences; s++)
        for (int32_t r = args->query_starts[s]; r < args->query_starts[s + 1]; r += rows_per_span) {
            int32_t left = args->query_starts[s + 1] - r, rows = left < rows_per_span ? left : rows_per_span;
            spans[num_spans++] = (struct span){s, r, rows};
            num_keys += (double)rows * (double)(args->positions[r] + 1);
        }
    a.spans = spans;
    double macs = 2 * num_keys * (double)args->num_q_heads * (double)args->pool.head_size;
    parallel_for(num_spans * (size_t)args->pool.num_heads * a.head_tasks, macs, attend_task, &a);
    free(spans);
}
