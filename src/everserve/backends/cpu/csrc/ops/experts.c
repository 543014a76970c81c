/* down(activation(gate x) * up x), with biases where there are some, for R (token, expert) rows at once.

   The rows are sorted by slot, so that each expert's weights are read once:

       r        0  1  2  3  4  5        slot_R   2  0  2  1  0  2
       order    1  4 | 3 | 0  2  5      rows of slot 0 | slot 1 | slot 2, each in the order of r

   Phase 1 writes hidden[i] for i in sorted order, phase 2 writes y[order[i]]. No row is copied: products read x and
   write y through index arrays. So x and y may also be scattered over the memory of several peers, as long as every
   row is a whole number of rows away from one base; then `order` holds y's own numbers instead of r. */

#include "experts.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "exp.h"

#define ROWS_PER_PASS 64 /* rows of hidden that stay in cache between the products and silu */
#define MAX_COLUMNS 256  /* of hidden per task */

struct experts {
    const struct slot *slots;
    struct rows x, hidden, y;
    const int32_t *tokens; /* in sorted order */
    const int32_t *order;  /* where in y the answer goes */
    const int32_t *starts; /* rows of slot s: starts[s] .. starts[s + 1], in sorted order */
    const int32_t *busy;   /* the slots that have rows */
    size_t num_busy, hidden_size, inner_size;
    size_t columns_per_task, column_tasks;
};

ALWAYS_INLINE vf silu(vf x) { return x / (splat(1.0f) + exp_v(-x)); }

/* x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh(u)) / 2 = sigmoid(2 u). */
ALWAYS_INLINE vf gelu_tanh(vf x) {
    vf u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return x * sigmoid_v(splat(2.0f) * u);
}

ALWAYS_INLINE vf clamped_swiglu(vf gate, vf up, vf alpha, vf limit) {
    gate = -max_v(-gate, -limit);
    up = max_v(-max_v(-up, -limit), -limit);
    return gate * sigmoid_v(gate * alpha) * (up + splat(1.0f));
}

/* `kind` is a constant at every call. */
ALWAYS_INLINE vf activate(const enum activation kind, vf gate, vf up, vf alpha, vf limit) {
    switch (kind) {
        case GELU_TANH: return gelu_tanh(gate) * up;
        case RELU: return max_v(gate, splat(0.0f)) * up;
        case CLAMPED_SWIGLU: return clamped_swiglu(gate, up, alpha, limit);
        case SILU: break;
    }
    return silu(gate) * up;
}

ALWAYS_INLINE void gate_as(const enum activation kind, const struct slot *slot, float *hidden, const float *up,
                           size_t n) {
    vf alpha = splat((float)slot->alpha), limit = splat((float)slot->limit);
    size_t j = 0;
    for (; j + VW <= n; j += VW)
        store_f32(hidden + j, activate(kind, load_f32(hidden + j), load_f32(up + j), alpha, limit));
    if (j < n) {
        float gate_tail[VW] = {0}, up_tail[VW] = {0};
        memcpy(gate_tail, hidden + j, (n - j) * sizeof(float));
        memcpy(up_tail, up + j, (n - j) * sizeof(float));
        store_f32(gate_tail, activate(kind, load_f32(gate_tail), load_f32(up_tail), alpha, limit));
        memcpy(hidden + j, gate_tail, (n - j) * sizeof(float));
    }
}

static void gate_with(const struct slot *slot, float *hidden, const float *up, size_t n) {
    switch ((enum activation)slot->activation) {
        case SILU: gate_as(SILU, slot, hidden, up, n); break;
        case GELU_TANH: gate_as(GELU_TANH, slot, hidden, up, n); break;
        case RELU: gate_as(RELU, slot, hidden, up, n); break;
        case CLAMPED_SWIGLU: gate_as(CLAMPED_SWIGLU, slot, hidden, up, n); break;
    }
}

/* Some of a slot's biases, from the `first` on, to m rows. */
static void add_biases(const struct slot *slot, size_t first, size_t n, const struct rows *rows, size_t m) {
    float biases[MAX_COLUMNS];
    widen((const char *)slot->biases + first * (slot->bias_dtype == F32 ? 4 : 2), (enum dtype)slot->bias_dtype, n,
          biases);
    for (size_t r = 0; r < m; r++) {
        float *out = row(rows, r);
        for (size_t j = 0; j < n; j++) out[j] += biases[j];
    }
}

/* Some columns of hidden for all rows of one slot. */
static void gate_up_task(void *job, size_t task) {
    const struct experts *e = job;
    int32_t s = e->busy[task / e->column_tasks];
    const struct slot *slot = &e->slots[s];
    size_t column = task % e->column_tasks * e->columns_per_task;
    size_t n = smaller(e->inner_size - column, e->columns_per_task);
    struct matrix gate = {slot->gate, (size_t)slot->gate_stride, slot->dtype, 0};
    struct matrix up = {slot->up, (size_t)slot->up_stride, slot->dtype, 0};
    float up_block[ROWS_PER_PASS * MAX_COLUMNS];
    struct rows up_rows = {up_block, NULL, n};

    size_t end = (size_t)e->starts[s + 1];
    for (size_t i = (size_t)e->starts[s]; i < end; i += ROWS_PER_PASS) {
        size_t m = smaller(end - i, ROWS_PER_PASS);
        struct rows x = {e->x.base, e->tokens + i, e->x.stride};
        struct rows hidden = columns_from(rows_from(e->hidden, i), column);
        gemm(x, m, matrix_from(gate, column), n, e->hidden_size, hidden);
        gemm(x, m, matrix_from(up, column), n, e->hidden_size, up_rows);
        if (slot->biases) {
            add_biases(slot, column, n, &hidden, m);
            add_biases(slot, e->inner_size + column, n, &up_rows, m);
        }
        for (size_t r = 0; r < m; r++) gate_with(slot, row(&hidden, r), row(&up_rows, r), n);
    }
}

/* Some columns of y for all rows of one slot. */
static void down_task(void *job, size_t task) {
    const struct experts *e = job;
    int32_t s = e->busy[task / e->column_tasks];
    const struct slot *slot = &e->slots[s];
    size_t column = task % e->column_tasks * e->columns_per_task;
    size_t n = smaller(e->hidden_size - column, e->columns_per_task);
    size_t i = (size_t)e->starts[s], m = (size_t)e->starts[s + 1] - i;
    struct matrix down = {slot->down, (size_t)slot->down_stride, slot->dtype, 0};
    struct rows y = {e->y.base + column, e->order + i, e->y.stride};
    gemm(rows_from(e->hidden, i), m, matrix_from(down, column), n, e->inner_size, y);
    if (slot->biases) add_biases(slot, 2 * e->inner_size + column, n, &y, m);
}

static void set_columns(struct experts *e, size_t total) {
    e->columns_per_task = smaller(task_size(total, e->num_busy, 32), MAX_COLUMNS);
    e->column_tasks = (total + e->columns_per_task - 1) / e->columns_per_task;
}

/* Whether row r has no expert at all (route.c). Its answer is zeros. Rows in shared memory always have one. */
static bool is_nowhere(const struct expert_rows_args *args, int64_t r) {
    return args->slot_of[r] == -1 && !args->y_index;
}

EXPORT int64_t es_expert_rows(const struct expert_rows_args *args) {
    const int32_t *tokens = args->tokens, *slot_of = args->slot_of, *y_index = args->y_index;
    int64_t num_rows = args->num_rows, num_slots = args->num_slots;
    for (int64_t r = 0; r < num_rows; r++) {
        if (is_nowhere(args, r)) continue;
        if (slot_of[r] < 0 || slot_of[r] >= num_slots || !args->slots[slot_of[r]].gate) return 1 + r;
        if (tokens[r] < 0 || tokens[r] >= args->num_tokens) return -(1 + r);
        if (y_index && (y_index[r] < 0 || y_index[r] >= args->num_y)) return -(1 + r);
    }
    if (!num_rows) return 0;

    size_t num_indices = (size_t)(2 * num_rows + 2 * num_slots + 2);
    int32_t *indices = calloc(num_indices, sizeof(int32_t));
    float *hidden = malloc((size_t)num_rows * (size_t)args->inner_size * sizeof(float));
    if (!indices || !hidden) abort();
    int32_t *order = indices, *sorted_tokens = order + num_rows, *starts = sorted_tokens + num_rows;
    int32_t *busy = starts + num_slots + 2;

    /* Counting sort. While rows are placed, starts[s + 1] is where the next row of slot s goes. */
    size_t num_busy = 0;
    for (int64_t r = 0; r < num_rows; r++)
        if (!is_nowhere(args, r)) starts[slot_of[r] + 2]++;
    for (int64_t s = 0; s < num_slots; s++) {
        if (starts[s + 2]) busy[num_busy++] = (int32_t)s;
        starts[s + 2] += starts[s + 1];
    }
    for (int64_t r = 0; r < num_rows; r++) {
        if (is_nowhere(args, r)) {
            memset(args->y + r * args->hidden_size, 0, (size_t)args->hidden_size * sizeof(float));
            continue;
        }
        int32_t at = starts[slot_of[r] + 1]++;
        order[at] = y_index ? y_index[r] : (int32_t)r;
        sorted_tokens[at] = tokens[r];
    }

    struct experts e = {
        .slots = args->slots,
        .x = {(float *)args->x, NULL, (size_t)args->hidden_size},
        .hidden = {hidden, NULL, (size_t)args->inner_size},
        .y = {args->y, NULL, (size_t)args->hidden_size},
        .tokens = sorted_tokens,
        .order = order,
        .starts = starts,
        .busy = busy,
        .num_busy = num_busy,
        .hidden_size = (size_t)args->hidden_size,
        .inner_size = (size_t)args->inner_size,
    };
    double macs = (double)num_rows * (double)args->hidden_size * (double)args->inner_size;
    set_columns(&e, e.inner_size);
    parallel_for(num_busy * e.column_tasks, 2 * macs, gate_up_task, &e);
    set_columns(&e, e.hidden_size);
    parallel_for(num_busy * e.column_tasks, macs, down_task, &e);
    free(hidden);
    free(indices);
    return 0;
}
