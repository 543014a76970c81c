/* The experts of each row: router logits, scores, the best K of the experts that are allowed (model/spec.py, Router). */

#include "route.h"

#include "exp.h"

#define ROWS_PER_TASK 8
#define MAX_EXPERTS 1024 /* ops.py checks */

/* In place. logits has room for a multiple of SUM_WIDTH; what is beyond n is ignored. */
static void softmax(float *logits, size_t n) {
    for (size_t i = n; i % SUM_WIDTH; i++) logits[i] = -1e30f; /* e^that is 0 */
    float highest = logits[0];
    for (size_t i = 1; i < n; i++) highest = logits[i] > highest ? logits[i] : highest;
    accumulator total = no_sum();
    for (size_t i = 0; i < n; i += SUM_WIDTH)
        UNROLL for (int s = 0; s < PARTS; s++) {
            vf e = exp_v(load_f32(logits + i + s * VW) - splat(highest));
            total.part[s] += e;
            store_f32(logits + i + s * VW, e);
        }
    vf divisor = splat(sum(total));
    for (size_t i = 0; i < n; i += VW) store_f32(logits + i, load_f32(logits + i) / divisor);
}

/* As if the router gave experts that are not allowed no chance at all: e^that is 0. */
static void exclude(float *logits, size_t n, const int32_t *allowed) {
    for (size_t i = 0; i < n; i++)
        if (!allowed[i]) logits[i] = -1e30f;
}

/* In place. */
static void sigmoid(float *logits, size_t n) {
    for (size_t i = 0; i < n; i += VW) store_f32(logits + i, sigmoid_v(load_f32(logits + i)));
}

/* The two best of a group together, if two are counted; one, if the other is taken. */
static float score_of_group(const float *rank, const uint8_t *taken, size_t n, size_t counted) {
    float best = 0.0f, second = 0.0f;
    size_t num = 0;
    for (size_t i = 0; i < n; i++) {
        if (taken[i]) continue;
        if (num == 0 || rank[i] > best) {
            second = best;
            best = rank[i];
        } else if (num == 1 || rank[i] > second) {
            second = rank[i];
        }
        num++;
    }
    return num > 1 && counted > 1 ? best + second : best;
}

/* Mark the experts of all groups as taken but for those of the best ones, of equal ones the lower. A group in which all
   are taken is none of these. */
static void keep_groups(const struct choice *choice, const float *rank, uint8_t *taken, size_t n) {
    size_t num_groups = (size_t)choice->num_groups, num_kept = (size_t)choice->groups_kept, size = n / num_groups;
    float scores[MAX_EXPERTS];
    uint8_t is_kept[MAX_EXPERTS] = {0}, is_empty[MAX_EXPERTS];
    for (size_t g = 0; g < num_groups; g++) {
        is_empty[g] = 1;
        for (size_t i = g * size; i < (g + 1) * size; i++) is_empty[g] &= taken[i];
        scores[g] = score_of_group(rank + g * size, taken + g * size, size, (size_t)choice->counted);
    }
    for (size_t k = 0; k < num_kept; k++) {
        size_t at = num_groups;
        for (size_t g = 0; g < num_groups; g++)
            if (!is_kept[g] && !is_empty[g] && (at == num_groups || scores[g] > scores[at])) at = g;
        if (at < num_groups) is_kept[at] = 1;
    }
    for (size_t i = 0; i < n; i++) taken[i] |= !is_kept[i / size];
}

/* The K largest, largest first; of equal ones the lower id first. Ids are valid even when all are NaN; -1, with no
   weight, where fewer than K are left. Experts are ranked by `rank`, and weigh p. */
static void best(const float *p, const float *rank, size_t n, uint8_t *taken, size_t top_k, int32_t *ids,
                 float *weights) {
    for (size_t k = 0; k < top_k; k++) {
        size_t at = n;
        for (size_t i = 0; i < n; i++)
            if (!taken[i] && (at == n || rank[i] > rank[at])) at = i;
        ids[k] = at < n ? (int32_t)at : -1;
        weights[k] = at < n ? p[at] : 0.0f;
        if (at < n) taken[at] = 1;
    }
}

/* Logits of the chosen -> their weights. */
static void softmax_of_chosen(const int32_t *ids, size_t top_k, float *weights) {
    float logits[MAX_EXPERTS];
    for (size_t k = 0; k < top_k; k++) logits[k] = ids[k] < 0 ? -1e30f : weights[k];
    softmax(logits, top_k);
    for (size_t k = 0; k < top_k; k++) weights[k] = ids[k] < 0 ? 0.0f : logits[k];
}

/* One row: p has its logits, with room for a multiple of SUM_WIDTH. */
static void choose(const struct route_args *args, float *p, int32_t *ids, float *weights) {
    const struct choice *choice = &args->choice;
    size_t n = (size_t)args->num_experts, top_k = (size_t)args->top_k;
    float ranks[MAX_EXPERTS];
    const float *rank = p;
    uint8_t taken[MAX_EXPERTS] = {0};
    for (size_t i = 0; args->allowed && i < n; i++) taken[i] = !args->allowed[i];
    if (args->allowed) exclude(p, n, args->allowed);
    if (choice->score == SOFTMAX) softmax(p, n);
    if (choice->score == SIGMOID) sigmoid(p, n);
    if (choice->correction) {
        for (size_t i = 0; i < n; i++) ranks[i] = p[i] + choice->correction[i];
        rank = ranks;
    }
    if (choice->num_groups > 1) keep_groups(choice, rank, taken, n);
    best(p, rank, n, taken, top_k, ids, weights);
    if (choice->score == SOFTMAX_OF_CHOSEN) softmax_of_chosen(ids, top_k, weights);
    if (choice->renormalise) {
        float total = 0.0f, least = (float)choice->least_sum;
        for (size_t k = 0; k < top_k; k++) total += weights[k];
        total = total < least ? least : total;
        for (size_t k = 0; k < top_k && total != 0.0f; k++) weights[k] /= total;
    }
    float scale = (float)choice->scale;
    for (size_t k = 0; k < top_k && scale != 1.0f; k++) weights[k] *= scale;
}

static void route_task(void *job, size_t task) {
    const struct route_args *args = job;
    size_t num_experts = (size_t)args->num_experts, size = (size_t)args->size, top_k = (size_t)args->top_k;
    size_t first = task * ROWS_PER_TASK, m = smaller((size_t)args->num_rows - first, ROWS_PER_TASK);
    size_t stride = (num_experts + SUM_WIDTH - 1) / SUM_WIDTH * SUM_WIDTH;
    float p[ROWS_PER_TASK * MAX_EXPERTS], bias[MAX_EXPERTS];
    struct rows x = {(float *)args->x + first * size, NULL, size}, logits = {p, NULL, stride};
    struct matrix router = {args->router, (size_t)args->router_stride, args->dtype, 0};
    gemm(x, m, router, num_experts, size, logits);
    if (args->choice.bias) widen(args->choice.bias, (enum dtype)args->choice.bias_dtype, num_experts, bias);
    for (size_t t = 0; t < m; t++) {
        float *of_row = row(&logits, t);
        for (size_t i = 0; i < num_experts && args->choice.bias; i++) of_row[i] += bias[i];
        choose(args, of_row, args->ids + (first + t) * top_k, args->weights + (first + t) * top_k);
    }
}

EXPORT void es_route(const struct route_args *args) {
    size_t num_tasks = ((size_t)args->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    double macs = (double)args->num_rows * (double)args->num_experts * (double)args->size;
    parallel_for(num_tasks, macs, route_task, (void *)args);
}
