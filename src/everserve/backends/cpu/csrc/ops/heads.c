/* Project, norm and rotate, store, attend: for some heads of one layer, and the rows of several homes at once.

   Phase 1 projects. A task is E rows of one slot's weights (one query head, the keys or the values), which it applies to
   all requests: so weights are read once, however many homes ask. The rest is what one process does for all of its heads
   (rotate.c, attention.c), request by request, with pieces of the pool instead of a layer:

       a row of qkv   | q of head 0 | q of head 1 .. | k of head 0 | k of head 1 .. | v of head 0 ..

   Every element is computed by the same operations as where all heads are computed together (gemm.h), so bits do not
   depend on which heads are here. */

#include "heads.h"

#include <stdlib.h>

#include "attention.h"

#define ROWS_PER_PASS 256 /* of x: as in linear.c */

struct head_rows_args {
    struct kv_pool pool; /* its layer, heads and pieces are those of each request */
    const struct head_slot *slots;
    const struct head_request *requests;
    const float *cos, *sin;
    const void *q_norm, *k_norm; /* NULL where the model has none */
    int64_t num_slots, num_requests, group_size, hidden_size, q_norm_dtype, k_norm_dtype;
    double eps;
    struct turn turn;
    struct view view; /* sinks are those of the slots */
};

struct heads {
    const struct head_rows_args *args;
    float *const *qkv;   /* by request */
    const int32_t *busy; /* the slots that are asked for */
    size_t num_parts;    /* of a slot: query heads, keys, values; E rows each */
};

static size_t row_width(const struct head_rows_args *args, const struct head_request *request) {
    return (size_t)request->num_heads * ((size_t)args->group_size + 2) * (size_t)args->pool.head_size;
}

/* Where a slot's part belongs in a row of qkv, in heads, if the slot is head j of m. */
static size_t place_of(size_t part, size_t group, size_t j, size_t m) {
    if (part < group) return j * group + part;
    return m * group + (part - group) * m + j;
}

static void add_bias(const void *bias, enum dtype dtype, size_t size, const struct rows *out, size_t m) {
    float widened[MAX_HEAD_SIZE];
    widen(bias, dtype, size, widened);
    for (size_t i = 0; i < m; i++)
        for (size_t e = 0; e < size; e++) row(out, i)[e] += widened[e];
}

static void project(const struct head_rows_args *args, const struct head_request *request, float *qkv, size_t place,
                    struct matrix weight, const void *bias, enum dtype bias_dtype) {
    size_t size = (size_t)args->pool.head_size, k = (size_t)args->hidden_size, width = row_width(args, request);
    for (size_t first = 0; first < (size_t)request->num_rows; first += ROWS_PER_PASS) {
        size_t m = smaller((size_t)request->num_rows - first, ROWS_PER_PASS);
        struct rows x = {(float *)request->x + first * k, NULL, k};
        struct rows out = {qkv + first * width + place * size, NULL, width};
        gemm(x, m, weight, size, k, out);
        if (bias) add_bias(bias, bias_dtype, size, &out, m);
    }
}

/* One part of one slot, for every request that wants it. */
static void project_task(void *job, size_t task) {
    const struct heads *h = job;
    const struct head_rows_args *args = h->args;
    size_t part = task % h->num_parts, group = (size_t)args->group_size, size = (size_t)args->pool.head_size;
    int32_t s = h->busy[task / h->num_parts];
    const struct head_slot *slot = &args->slots[s];
    bool is_q = part < group, is_k = part == group;
    struct matrix weight = {is_q ? slot->q : is_k ? slot->k : slot->v,
                            (size_t)(is_q ? slot->q_stride : is_k ? slot->k_stride : slot->v_stride),
                            slot->dtype, 0};
    const char *bias = is_q ? slot->q_bias : is_k ? slot->k_bias : slot->v_bias;
    if (is_q) {
        weight = matrix_from(weight, part * size);
        if (bias) bias += part * size * (slot->bias_dtype == F32 ? 4 : 2);
    }
    for (int64_t r = 0; r < args->num_requests; r++) {
        const struct head_request *request = &args->requests[r];
        for (int64_t j = 0; j < request->num_heads; j++)
            if (request->slots[j] == s)
                project(args, request, h->qkv[r], place_of(part, group, (size_t)j, (size_t)request->num_heads), weight,
                        bias, (enum dtype)slot->bias_dtype);
    }
}

/* The rest, for one request. */
static void store_and_attend(const struct head_rows_args *args, const struct head_request *request, const float *qkv,
                             float *q) {
    size_t group = (size_t)args->group_size;
    struct view view = args->view;
    float *sinks = malloc((size_t)request->num_heads * group * sizeof(float));
    if (!sinks) abort();
    for (size_t j = 0; j < (size_t)request->num_heads; j++) {
        const float *of_slot = args->slots[request->slots[j]].sinks;
        if (!of_slot) break; /* the model has none */
        memcpy(sinks + j * group, of_slot, group * sizeof(float));
        view.sinks = sinks;
    }
    struct kv_pool pool = args->pool;
    pool.num_heads = request->num_heads;
    pool.pieces = request->pieces;
    int64_t num_q_heads = request->num_heads * args->group_size;
    struct rotate_args rotate = {
        .pool = pool, .qkv = qkv, .cos = args->cos, .sin = args->sin, .q_norm = args->q_norm, .k_norm = args->k_norm,
        .positions = request->positions, .kv_slots = request->kv_slots, .q = q, .num_rows = request->num_rows,
        .num_q_heads = num_q_heads, .q_norm_dtype = args->q_norm_dtype, .k_norm_dtype = args->k_norm_dtype,
        .eps = args->eps, .turn = args->turn,
    };
    es_rotate_and_store(&rotate);
    struct attend_args attend = {
        .pool = pool, .q = q, .out = request->y, .positions = request->positions,
        .query_starts = request->query_starts, .block_tables = request->block_tables, .num_rows = request->num_rows,
        .num_sequences = request->num_sequences, .table_width = request->table_width, .num_q_heads = num_q_heads,
        .view = view,
    };
    es_attend(&attend);
    free(sinks);
}

/* The slots that are asked for, each once, or -1 if one of them is empty or out of range. */
static int64_t find_busy(const struct head_rows_args *args, int32_t *busy) {
    int64_t num_busy = 0;
    for (int64_t r = 0; r < args->num_requests; r++)
        for (int64_t j = 0; j < args->requests[r].num_heads; j++) {
            int32_t slot = args->requests[r].slots[j];
            if (slot < 0 || slot >= args->num_slots || !args->slots[slot].q) return -1;
            bool is_known = false;
            for (int64_t i = 0; i < num_busy && !is_known; i++) is_known = busy[i] == slot;
            if (!is_known) busy[num_busy++] = slot;
        }
    return num_busy;
}

/* 0, or -1: nothing was computed, because a slot is empty or out of range. */
EXPORT int64_t es_head_rows(const struct head_rows_args *args) {
    size_t num_requests = (size_t)args->num_requests, num_floats = 0, most_q = 0;
    double macs = 0;
    for (size_t r = 0; r < num_requests; r++) {
        const struct head_request *request = &args->requests[r];
        size_t floats = (size_t)request->num_rows * row_width(args, request);
        num_floats += floats;
        most_q = floats > most_q ? floats : most_q;
        macs += (double)floats * (double)args->hidden_size;
    }
    int32_t *busy = malloc((size_t)(args->num_slots + 1) * sizeof(int32_t));
    float **qkv = malloc((num_requests + 1) * sizeof(float *)), *rows = malloc((num_floats + most_q + 1) * sizeof(float));
    if (!busy || !qkv || !rows) abort();
    int64_t num_busy = find_busy(args, busy);
    if (num_busy >= 0) {
        float *next = rows;
        for (size_t r = 0; r < num_requests; r++) {
            qkv[r] = next;
            next += (size_t)args->requests[r].num_rows * row_width(args, &args->requests[r]);
        }
        struct heads h = {args, qkv, busy, (size_t)args->group_size + 2};
        parallel_for((size_t)num_busy * h.num_parts, macs, project_task, &h);
        for (size_t r = 0; r < num_requests; r++) store_and_attend(args, &args->requests[r], qkv[r], next);
    }
    free(rows);
    free(qkv);
    free(busy);
    return num_busy >= 0 ? 0 : -1;
}
