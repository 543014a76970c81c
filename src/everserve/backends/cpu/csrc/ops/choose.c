/* One token per row of logits: greedy, or drawn with one uniform number from what min-p, top-k and top-p leave.

   Weights are e^((logit - highest) / temperature), so the best token weighs 1. A draw walks along cumulative weights
   until they exceed u times the total: in the order of ids where nothing is filtered, else from the best token down.
   Equal weights go by the lower id. Each row is computed alone, so the batch does not matter. */

#include <math.h>
#include <stdlib.h>

#include "exp.h"
#include "threads.h"

#define BLOCK 64 /* weights are summed by blocks: a draw finds its block first, then its token */

struct draw {
    double temperature, top_k, top_p, min_p, uniform; /* temperature 0: greedy; top_k 0, top_p 1, min_p 0: off */
};

struct choose_args {
    const float *logits;
    const struct draw *draws;
    int32_t *tokens; /* -1 where a logit is not a number */
    int64_t num_rows, vocab;
};

/* The highest logit, or NaN if there is one. */
static float highest_of(const float *logits, size_t n) {
    vf high = splat(-INFINITY);
    vi is_nan = (vi)splat(0.0f);
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf x = load_f32(logits + i);
        is_nan |= x != x;
        high = max_v(x, high);
    }
    float highest = largest(high);
    for (int lane = 0; lane < VW; lane++)
        if (is_nan[lane]) return NAN;
    for (; i < n; i++) {
        if (logits[i] != logits[i]) return NAN;
        if (logits[i] > highest) highest = logits[i];
    }
    return highest;
}

static int32_t first_equal(const float *logits, size_t n, float value) {
    for (size_t i = 0; i < n; i++)
        if (logits[i] == value) return (int32_t)i;
    return -1;
}

static float sum_of_block(const float *weights) {
    accumulator sums = no_sum();
    for (size_t i = 0; i < BLOCK; i += SUM_WIDTH)
        UNROLL for (int s = 0; s < PARTS; s++) sums.part[s] += load_f32(weights + i + s * VW);
    return sum(sums);
}

/* Weights, padded with zeros to a multiple of BLOCK; returns their sum. */
static double weigh(const float *logits, size_t n, float highest, double temperature, float *weights) {
    size_t padded = (n + BLOCK - 1) / BLOCK * BLOCK;
    memcpy(weights, logits, n * sizeof(float));
    for (size_t i = n; i < padded; i++) weights[i] = -INFINITY;
    vf inverse = splat((float)(1.0 / temperature)), high = splat(highest);
    double total = 0;
    for (size_t block = 0; block < padded; block += BLOCK) {
        for (size_t i = block; i < block + BLOCK; i += VW) {
            vf x = load_f32(weights + i);
            vf w = select_v(x > splat(-INFINITY), exp_v((x - high) * inverse), splat(0.0f));
            store_f32(weights + i, w);
        }
        total += (double)sum_of_block(weights + block);
    }
    return total;
}

static int32_t draw_from_all(const float *weights, size_t n, double target) {
    double cumulative = 0;
    size_t last = 0;
    for (size_t block = 0; block < n; block += BLOCK) {
        double after = cumulative + (double)sum_of_block(weights + block);
        if (after > target || block + BLOCK >= n) {
            for (size_t i = block; i < smaller(block + BLOCK, n); i++) {
                if (weights[i] > 0) last = i;
                cumulative += (double)weights[i];
                if (cumulative > target) return (int32_t)i;
            }
            return (int32_t)last; /* rounding: the last token that has any weight */
        }
        cumulative = after;
    }
    return (int32_t)last;
}

/* A heap of candidates, the best at its top. A key orders by weight, then by lower id: no two are equal. */
static uint64_t key_of(float weight, size_t id) {
    uint32_t bits; /* of a number >= 0, which order as the numbers do */
    memcpy(&bits, &weight, sizeof bits);
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)id);
}

static void sift_down(uint64_t *heap, size_t n, size_t at) {
    uint64_t key = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (heap[child] < key) break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

static uint64_t pop(uint64_t *heap, size_t *n) {
    uint64_t best = heap[0];
    heap[0] = heap[--*n];
    if (*n) sift_down(heap, *n, 0);
    return best;
}

static float weight_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

/* min-p first, then the best top_k of what is left, then of those the fewest that reach top_p of their mass.

   Where top_k is off, tokens lighter than (1 - top_p) / n of the mass cannot be needed: all of them together weigh less
   than what top-p may leave out. That keeps the heap small. */
static int32_t draw_filtered(const float *weights, size_t n, double total, const struct draw *d, uint64_t *keys) {
    double mass = total, least = d->min_p;
    if (d->min_p > 0) {
        mass = 0;
        for (size_t i = 0; i < n; i++) mass += weights[i] >= d->min_p ? (double)weights[i] : 0;
    }
    size_t top_k = d->top_k > 0 && d->top_k < (double)n ? (size_t)d->top_k : n;
    if (top_k == n) least = fmax(least, 0.999 * (1 - d->top_p) * mass / (double)n);
    uint64_t *heap = keys, *popped = keys + n;
    size_t num_left = 0, num_popped = 0;
    for (size_t i = 0; i < n; i++)
        if (weights[i] > 0 && weights[i] >= least) heap[num_left++] = key_of(weights[i], i);
    for (size_t at = num_left / 2; at-- > 0;) sift_down(heap, num_left, at);

    double popped_mass = 0;
    while (num_left && num_popped < top_k && (top_k < n || num_popped == 0 || popped_mass < d->top_p * mass)) {
        popped[num_popped] = pop(heap, &num_left);
        popped_mass += (double)weight_of(popped[num_popped++]);
    }
    if (top_k < n) mass = popped_mass;
    double kept_mass = 0;
    size_t num_kept = 0;
    while (num_kept < num_popped && (num_kept == 0 || d->top_p >= 1 || kept_mass < d->top_p * mass))
        kept_mass += (double)weight_of(popped[num_kept++]);

    double target = d->uniform * kept_mass, cumulative = 0;
    for (size_t i = 0; i < num_kept; i++) {
        cumulative += (double)weight_of(popped[i]);
        if (cumulative > target || i + 1 == num_kept) return (int32_t)(UINT32_MAX - (uint32_t)popped[i]);
    }
    return -1; /* not reached: the best token is always kept */
}

static void choose_task(void *job, size_t task) {
    const struct choose_args *args = job;
    const struct draw *d = &args->draws[task];
    size_t n = (size_t)args->vocab;
    const float *logits = args->logits + task * n;
    float highest = highest_of(logits, n);
    if (highest != highest || d->temperature <= 0 || isinf(highest)) {
        args->tokens[task] = highest != highest ? -1 : first_equal(logits, n, highest);
        return;
    }
    int is_filtered = d->top_p < 1 || d->top_k > 0 || d->min_p > 0;
    size_t padded = (n + BLOCK - 1) / BLOCK * BLOCK;
    float *weights = malloc(padded * sizeof(float));
    uint64_t *keys = is_filtered ? malloc(2 * n * sizeof(uint64_t)) : NULL;
    if (!weights || (is_filtered && !keys)) abort();
    double total = weigh(logits, n, highest, d->temperature, weights);
    args->tokens[task] = is_filtered ? draw_filtered(weights, n, total, d, keys)
                                     : draw_from_all(weights, n, d->uniform * total);
    free(keys);
    free(weights);
}

EXPORT void es_choose(const struct choose_args *args) {
    double macs = 8.0 * (double)args->num_rows * (double)args->vocab;
    parallel_for((size_t)args->num_rows, macs, choose_task, (void *)args);
}
