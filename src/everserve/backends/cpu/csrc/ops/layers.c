/* Whole layers, op after op, in one call: between the ops of a small model Python takes as long as they do.

       hidden -> norm -> qkv -> rotate, store -> attend -> output + hidden -> norm -> choose | seam | experts -> combine
                                                           = residual         = normed                          = hidden

   Each op is the one that ops.py calls, with the same arguments, so the bits are those of op by op.

   Where the experts of a layer are in other processes `cross` asks these (lanes/exchange.c). If that needs decisions, or
   there is no `cross`, the call ends at the seam of this layer, and Python sees to the rest of it; the next call begins
   behind the seam, or at the next layer. */

#include <stdbool.h>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "route.h"
#include "rows.h"

struct weight {
    const void *data; /* NULL where the model has none */
    int64_t num_rows, stride, dtype;
};

/* Packed by whole_layers.py. */
struct layer {
    struct weight input_norm, qkv, qkv_bias, q_norm, k_norm, output, output_bias, post_norm;
    struct weight router;      /* NULL: every row goes to every shard, with weight 1 */
    const struct slot *slots;  /* NULL: the experts are elsewhere */
    int64_t num_slots, inner_size;
    int64_t top_k, renormalise;
    int64_t slices_per_expert; /* a slice has the weight of its expert. Without a router: how many slices there are */
};

/* 0, or why the answers are not complete. */
typedef int64_t (*cross_fn)(const void *seam, int64_t layer, int64_t num_rows, int64_t num_shards, const int32_t *ids,
                            const float *x);

struct layers_args {
    struct kv_pool pool; /* its layer is set here */
    const struct layer *layers;
    const int32_t *const *allowed; /* by layer, as for es_route; NULL: no expert is masked */
    const float *cos, *sin;
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    float *hidden; /* read, and written if a layer's experts are here */
    float *residual, *normed, *weights; /* at a seam: what crosses it */
    int32_t *ids;
    float *scratch; /* struct scratch */
    cross_fn cross; /* NULL: no layer whose experts are elsewhere can be completed here */
    const void *seam;
    const float *const *row_at; /* the answers that crossed it */
    int64_t num_rows, num_sequences, table_width, num_q_heads, hidden_size, most_shards, first, end;
    int64_t is_behind_seam; /* the answers for `first` are there */
    double eps, scale;
};

/* What the ops of one layer hand to each other. A row goes to most_shards shards at most. whole_layers.py knows how many
   floats that is. */
struct scratch {
    float *qkv, *q, *attended, *y, *expert_weights;
    int32_t *tokens, *expert_ids;
};

static size_t q_width(const struct layers_args *args) { return (size_t)(args->num_q_heads * args->pool.head_size); }

static size_t kv_width(const struct layers_args *args) { return (size_t)(args->pool.num_heads * args->pool.head_size); }

static struct scratch divide(const struct layers_args *args) {
    size_t num_rows = (size_t)args->num_rows, num_shard_rows = num_rows * (size_t)args->most_shards;
    struct scratch s;
    s.qkv = args->scratch;
    s.q = s.qkv + num_rows * (q_width(args) + 2 * kv_width(args));
    s.attended = s.q + num_rows * q_width(args);
    s.y = s.attended + num_rows * q_width(args);
    s.expert_weights = s.y + num_shard_rows * (size_t)args->hidden_size;
    s.expert_ids = (int32_t *)(s.expert_weights + num_shard_rows);
    s.tokens = s.expert_ids + num_shard_rows;
    return s;
}

static void norm(const struct layers_args *args, const float *x, const struct weight *weight, float *out) {
    struct rms_norm_args norm = {.x = x, .weight = weight->data, .out = out, .num_rows = args->num_rows,
                                 .size = args->hidden_size, .dtype = weight->dtype, .eps = args->eps};
    es_rms_norm(&norm);
}

static void project(const struct layers_args *args, const float *x, int64_t k, const struct weight *weight,
                    const struct weight *bias, const float *residual, float *out) {
    struct linear_args linear = {
        .x = x, .weight = weight->data, .bias = bias->data, .residual = residual, .out = out,
        .num_rows = args->num_rows, .num_columns = weight->num_rows, .k = k, .weight_stride = weight->stride,
        .dtype = weight->dtype, .bias_dtype = bias->dtype,
    };
    es_linear(&linear);
}

/* From hidden to attended rows; stores their keys and values. */
static void attend(const struct layers_args *args, int64_t number, const struct scratch *s) {
    const struct layer *layer = &args->layers[number];
    struct kv_pool pool = args->pool;
    pool.layer = number;
    norm(args, args->hidden, &layer->input_norm, args->normed);
    project(args, args->normed, args->hidden_size, &layer->qkv, &layer->qkv_bias, NULL, s->qkv);
    struct rotate_args rotate = {
        .pool = pool, .qkv = s->qkv, .cos = args->cos, .sin = args->sin, .q_norm = layer->q_norm.data,
        .k_norm = layer->k_norm.data, .positions = args->positions, .kv_slots = args->kv_slots, .q = s->q,
        .num_rows = args->num_rows, .num_q_heads = args->num_q_heads, .q_norm_dtype = layer->q_norm.dtype,
        .k_norm_dtype = layer->k_norm.dtype, .eps = args->eps,
    };
    es_rotate_and_store(&rotate);
    struct attend_args attend = {
        .pool = pool, .q = s->q, .out = s->attended, .positions = args->positions,
        .query_starts = args->query_starts, .block_tables = args->block_tables, .num_rows = args->num_rows,
        .num_sequences = args->num_sequences, .table_width = args->table_width, .num_q_heads = args->num_q_heads,
        .scale = args->scale,
    };
    es_attend(&attend);
}

/* From experts to their slices, in place of model/shard_choice.py. Without a router there is one expert, with weight 1.
   NO_EXPERT stays what it is. */
static void choose_slices(const struct layers_args *args, const struct layer *layer, const struct scratch *s) {
    int64_t num_slices = layer->slices_per_expert, num_chosen = args->num_rows * layer->top_k;
    for (int64_t i = 0; i < num_chosen; i++) {
        int32_t expert = layer->router.data ? s->expert_ids[i] : 0;
        float weight = layer->router.data ? s->expert_weights[i] : 1.0f;
        for (int64_t j = 0; j < num_slices; j++) {
            args->ids[i * num_slices + j] = expert < 0 ? -1 : (int32_t)(expert * num_slices + j);
            args->weights[i * num_slices + j] = weight;
        }
    }
}

/* The shards of each row. */
static void choose(const struct layers_args *args, int64_t number, const struct scratch *s) {
    const struct layer *layer = &args->layers[number];
    bool is_direct = layer->router.data && layer->slices_per_expert == 1;
    if (layer->router.data) {
        struct route_args route = {
            .x = args->normed, .router = layer->router.data, .ids = is_direct ? args->ids : s->expert_ids,
            .weights = is_direct ? args->weights : s->expert_weights,
            .allowed = args->allowed ? args->allowed[number] : NULL, .num_rows = args->num_rows,
            .num_experts = layer->router.num_rows, .size = args->hidden_size, .top_k = layer->top_k,
            .router_stride = layer->router.stride, .dtype = layer->router.dtype, .renormalise = layer->renormalise,
        };
        es_route(&route);
    }
    if (!is_direct) choose_slices(args, layer, s);
}

static int64_t num_shards(const struct layer *layer) { return layer->top_k * layer->slices_per_expert; }

/* The end of a layer: answers are in y, or where row_at says. */
static void combine(const struct layers_args *args, const struct layer *layer, const float *y) {
    struct combine_args combine = {.rows = y, .row_at = y ? NULL : args->row_at, .weights = args->weights,
                                   .residual = args->residual, .out = args->hidden, .num_rows = args->num_rows,
                                   .top_k = num_shards(layer), .size = args->hidden_size};
    es_combine(&combine);
}

/* 0, or what es_expert_rows says. */
static int64_t compute_experts(const struct layers_args *args, const struct layer *layer, const struct scratch *s) {
    int64_t top_k = num_shards(layer), num_rows = args->num_rows * top_k;
    for (int64_t r = 0; r < num_rows; r++) s->tokens[r] = (int32_t)(r / top_k);
    struct expert_rows_args rows = {
        .x = args->normed, .tokens = s->tokens, .slot_of = args->ids, .slots = layer->slots, .y = s->y,
        .num_rows = num_rows, .num_tokens = args->num_rows, .num_y = num_rows, .num_slots = layer->num_slots,
        .hidden_size = args->hidden_size, .inner_size = layer->inner_size,
    };
    return es_expert_rows(&rows);
}

/* From hidden to what crosses the seam: residual, normed, ids and weights. */
static void attention_half(const struct layers_args *args, int64_t number, const struct scratch *s) {
    const struct layer *layer = &args->layers[number];
    attend(args, number, s);
    project(args, s->attended, (int64_t)q_width(args), &layer->output, &layer->output_bias, args->hidden,
            args->residual);
    norm(args, args->residual, &layer->post_norm, args->normed);
    choose(args, number, s);
}

#define OUTCOME_AT 32 /* bits of what es_layers returns, above the layer */

/* Layers first .. end. Returns end, or the layer at whose seam it has stopped and, above it, why it could not be crossed
   (0: there is no `cross`). -1 - layer: an expert of it is asked for whose slot is empty, or does not exist. */
EXPORT int64_t es_layers(const struct layers_args *args) {
    struct scratch s = divide(args);
    for (int64_t number = args->first; number < args->end; number++) {
        const struct layer *layer = &args->layers[number];
        bool is_behind_seam = args->is_behind_seam && number == args->first;
        if (!is_behind_seam) attention_half(args, number, &s);
        if (layer->slots) {
            if (compute_experts(args, layer, &s)) return -1 - number;
        } else if (!is_behind_seam) {
            if (!args->cross) return number;
            int64_t outcome =
                args->cross(args->seam, number, args->num_rows, num_shards(layer), args->ids, args->normed);
            if (outcome) return outcome << OUTCOME_AT | number;
        }
        combine(args, layer, layer->slots ? s.y : NULL);
    }
    return args->end;
}
