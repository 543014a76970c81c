/* Whole layers, step after step, in one call: between the ops of a small model Python takes as long as they do.

       hidden -> norm -> qkv -> rotate, store -> attend -> output + hidden -> norm -> choose | seam | experts -> combine
                                                           = residual         = normed                          = hidden

   That is what most models do. Which steps a layer has comes from Python (model/whole_layers.py), which walks the same
   ones where it computes op by op; each step here calls the ops that ops.py calls there, with the same arguments, so
   the bits are the same.

   Where the experts of a layer are in other processes `cross` asks these (lanes/exchange.c). If that needs decisions, or
   there is no `cross`, the call ends at the seam of this layer, and Python sees to it; the next call goes on behind. */

#include <stdbool.h>

#include "attention.h"
#include "exp.h"
#include "experts.h"
#include "linear.h"
#include "route.h"
#include "rows.h"

/* Both as in model/whole_layers.py. */
enum reg { NOTHING = -1, HIDDEN = 0, NORMED = 1, RESIDUAL = 2, ANSWER = 3, ATTENDED = 4 };
enum step_kind { NORM_STEP = 0, HEADS_STEP = 1, PROJECT_STEP = 2, DENSE_STEP = 3, SEAM_STEP = 4, JOIN_STEP = 5 };

/* All that follows is packed by whole_layers.py. */

struct step {
    int64_t kind, x, into, residual, normed; /* registers */
    struct norm norm, following;
};

struct weight {
    const void *data; /* NULL where the model has none */
    int64_t num_rows, stride, dtype;
};

struct slots {
    const struct slot *slots; /* NULL: elsewhere */
    int64_t num_slots, inner_size;
};

struct layer {
    const struct step *steps;
    int64_t num_steps;
    /* attention */
    struct weight qkv, qkv_bias, q_norm, k_norm, output, output_bias;
    const float *cos, *sin;
    double eps, residual_scale;
    struct turn turn;
    struct view view;
    /* the FFN */
    struct weight router;      /* NULL: every row goes to every shard */
    struct choice choice;
    int64_t top_k, weighs_input;
    int64_t slices_per_expert; /* a slice has the weight of its expert. Without a router: how many slices there are */
    double answer_scale;       /* the weight of a slice without a router, and of what is at home */
    struct slots experts, dense;
    struct weight dense_gate;
};

/* 0, or why the answers are not complete. */
typedef int64_t (*cross_fn)(const void *seam, int64_t layer, int64_t num_rows, int64_t num_shards, const int32_t *ids,
                            const float *x);

/* Where in its first layer a call begins. */
enum start { AT_FIRST_STEP = 0, WITH_ANSWERS = 1, BEHIND_SEAM = 2 };

struct layers_args {
    struct kv_pool pool; /* its layer is set here */
    const struct layer *layers;
    const int32_t *const *allowed; /* by layer, as for es_route; NULL: no expert is masked */
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    float *rows[4];  /* registers but ATTENDED; hidden is read, and written */
    float *weights;  /* at a seam: what crosses it, with one of the registers */
    int32_t *ids;
    float *scratch; /* struct scratch */
    cross_fn cross; /* NULL: no layer whose experts are elsewhere can be completed here */
    const void *seam;
    const float *const *row_at; /* the answers that crossed it */
    int64_t num_rows, num_sequences, table_width, num_q_heads, hidden_size, most_shards, first, end;
    int64_t start; /* WITH_ANSWERS: those for `first` are at row_at. BEHIND_SEAM: the step there is done */
};

/* What the ops of one layer hand to each other. A row goes to most_shards shards at most. whole_layers.py knows how many
   floats that is. */
struct scratch {
    float *qkv, *q, *attended, *y, *expert_weights, *dense_weights;
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
    s.dense_weights = s.y + num_shard_rows * (size_t)args->hidden_size;
    s.expert_weights = s.dense_weights + num_rows;
    s.expert_ids = (int32_t *)(s.expert_weights + num_shard_rows);
    s.tokens = s.expert_ids + num_shard_rows;
    return s;
}

static float *rows_in(const struct layers_args *args, const struct scratch *s, int64_t reg) {
    return reg == NOTHING ? NULL : reg == ATTENDED ? s->attended : args->rows[reg];
}

static void norm(const struct layers_args *args, const float *x, const struct norm *norm, float *out) {
    struct norm_args n = {.x = x, .out = out, .num_rows = args->num_rows, .size = args->hidden_size, .norm = *norm};
    es_norm(&n);
}

static void project(const struct layers_args *args, const float *x, int64_t k, const struct weight *weight,
                    const struct weight *bias, const float *residual, double scale, float *out) {
    struct linear_args linear = {
        .x = x, .weight = weight->data, .bias = bias ? bias->data : NULL, .residual = residual, .out = out,
        .num_rows = args->num_rows, .num_columns = weight->num_rows, .k = k, .weight_stride = weight->stride,
        .dtype = weight->dtype, .bias_dtype = bias ? bias->dtype : 0, .scale = scale,
    };
    es_linear(&linear);
}

/* Attended rows of x; stores their keys and values. */
static void attend(const struct layers_args *args, int64_t number, const struct scratch *s, const float *x) {
    const struct layer *layer = &args->layers[number];
    struct kv_pool pool = args->pool;
    pool.layer = number;
    project(args, x, args->hidden_size, &layer->qkv, &layer->qkv_bias, NULL, 1.0, s->qkv);
    struct rotate_args rotate = {
        .pool = pool, .qkv = s->qkv, .cos = layer->cos, .sin = layer->sin, .q_norm = layer->q_norm.data,
        .k_norm = layer->k_norm.data, .positions = args->positions, .kv_slots = args->kv_slots, .q = s->q,
        .num_rows = args->num_rows, .num_q_heads = args->num_q_heads, .q_norm_dtype = layer->q_norm.dtype,
        .k_norm_dtype = layer->k_norm.dtype, .eps = layer->eps, .turn = layer->turn,
    };
    es_rotate_and_store(&rotate);
    struct attend_args attend = {
        .pool = pool, .q = s->q, .out = s->attended, .positions = args->positions,
        .query_starts = args->query_starts, .block_tables = args->block_tables, .num_rows = args->num_rows,
        .num_sequences = args->num_sequences, .table_width = args->table_width, .num_q_heads = args->num_q_heads,
        .view = layer->view,
    };
    es_attend(&attend);
}

static void join(const struct layers_args *args, const float *x, const float *residual, const struct layer *layer,
                 const struct norm *norm, float *out) {
    struct join_args join = {.x = x, .residual = residual, .out = out, .num_rows = args->num_rows,
                             .size = args->hidden_size, .scale = layer->residual_scale, .norm = *norm};
    es_join(&join);
}

/* The output of attention joins the residual. */
static void project_and_norm(const struct layers_args *args, const struct layer *layer, const struct scratch *s,
                             const struct step *step) {
    float *into = rows_in(args, s, step->into), *residual = rows_in(args, s, step->residual);
    int64_t k = (int64_t)q_width(args);
    if (step->norm.weight) {
        project(args, s->attended, k, &layer->output, &layer->output_bias, NULL, 1.0, into);
        join(args, into, residual, layer, &step->norm, into);
    } else {
        project(args, s->attended, k, &layer->output, &layer->output_bias, residual, layer->residual_scale, into);
    }
    if (step->normed == NOTHING) return;
    float *normed = rows_in(args, s, step->normed);
    if (step->following.weight) norm(args, into, &step->following, normed);
    else memcpy(normed, into, (size_t)(args->num_rows * args->hidden_size) * sizeof(float));
}

/* From experts to their slices, in place of model/shard_choice.py. Without a router there is one expert. NO_EXPERT stays
   what it is. */
static void choose_slices(const struct layers_args *args, const struct layer *layer, const struct scratch *s) {
    int64_t num_slices = layer->slices_per_expert, num_chosen = args->num_rows * layer->top_k;
    for (int64_t i = 0; i < num_chosen; i++) {
        int32_t expert = layer->router.data ? s->expert_ids[i] : 0;
        float weight = layer->router.data ? s->expert_weights[i] : (float)layer->answer_scale;
        for (int64_t j = 0; j < num_slices; j++) {
            args->ids[i * num_slices + j] = expert < 0 ? -1 : (int32_t)(expert * num_slices + j);
            args->weights[i * num_slices + j] = weight;
        }
    }
}

/* Rows that are weighed in front of their only expert. */
static void weigh(const struct layers_args *args, int64_t num_slices, float *x) {
    for (int64_t t = 0; t < args->num_rows; t++) {
        float *weights = args->weights + t * num_slices, *row = x + t * args->hidden_size;
        for (int64_t i = 0; i < args->hidden_size; i++) row[i] *= weights[0];
        for (int64_t j = 0; j < num_slices; j++) weights[j] = 1.0f;
    }
}

/* The shards of each row. */
static void choose(const struct layers_args *args, int64_t number, const struct scratch *s, float *x) {
    const struct layer *layer = &args->layers[number];
    bool is_direct = layer->router.data && layer->slices_per_expert == 1;
    if (layer->router.data) {
        struct route_args route = {
            .x = x, .router = layer->router.data, .ids = is_direct ? args->ids : s->expert_ids,
            .weights = is_direct ? args->weights : s->expert_weights,
            .allowed = args->allowed ? args->allowed[number] : NULL, .num_rows = args->num_rows,
            .num_experts = layer->router.num_rows, .size = args->hidden_size, .top_k = layer->top_k,
            .router_stride = layer->router.stride, .dtype = layer->router.dtype, .choice = layer->choice,
        };
        es_route(&route);
    }
    if (!is_direct) choose_slices(args, layer, s);
}

static int64_t num_shards(const struct layer *layer) { return layer->top_k * layer->slices_per_expert; }

/* residual + the answers, which are in y, or where row_at says. */
static void combine(const struct layers_args *args, int64_t top_k, const float *y, const float *weights,
                    const float *residual, float *out) {
    struct combine_args combine = {.rows = y, .row_at = y ? NULL : args->row_at, .weights = weights,
                                   .residual = residual, .out = out, .num_rows = args->num_rows,
                                   .top_k = top_k, .size = args->hidden_size};
    es_combine(&combine);
}

/* 0, or what es_expert_rows says. */
static int64_t compute(const struct layers_args *args, const struct slots *slots, int64_t top_k, const int32_t *slot_of,
                       const struct scratch *s, const float *x) {
    int64_t num_rows = args->num_rows * top_k;
    for (int64_t r = 0; r < num_rows; r++) s->tokens[r] = (int32_t)(r / top_k);
    struct expert_rows_args rows = {
        .x = x, .tokens = s->tokens, .slot_of = slot_of, .slots = slots->slots, .y = s->y,
        .num_rows = num_rows, .num_tokens = args->num_rows, .num_y = num_rows, .num_slots = slots->num_slots,
        .hidden_size = args->hidden_size, .inner_size = slots->inner_size,
    };
    return es_expert_rows(&rows);
}

/* An FFN of the home. */
static int64_t dense(const struct layers_args *args, const struct layer *layer, const struct scratch *s,
                     const struct step *step) {
    const float *x = rows_in(args, s, step->x);
    memset(s->expert_ids, 0, (size_t)args->num_rows * sizeof(int32_t));
    if (layer->dense_gate.data) project(args, x, args->hidden_size, &layer->dense_gate, NULL, NULL, 1.0, s->dense_weights);
    for (int64_t t = 0; t < args->num_rows; t++) {
        float *weight = &s->dense_weights[t], scale = (float)layer->answer_scale;
        *weight = layer->dense_gate.data ? scale * sigmoid_v(splat(*weight))[0] : scale;
    }
    if (compute(args, &layer->dense, 1, s->expert_ids, s, x)) return -1;
    combine(args, 1, s->y, s->dense_weights, rows_in(args, s, step->residual), rows_in(args, s, step->into));
    return 0;
}

#define OUTCOME_AT 32 /* bits of what es_layers returns, above the layer */
#define NO_SLOT (-1)
#define NO_CROSSING (-2)

/* 0, or why the step is not complete: NO_SLOT, NO_CROSSING, or what `cross` says. */
static int64_t seam(const struct layers_args *args, int64_t number, const struct scratch *s, const struct step *step,
                    bool has_answers) {
    const struct layer *layer = &args->layers[number];
    float *x = rows_in(args, s, step->x);
    if (!has_answers) {
        choose(args, number, s, x);
        if (layer->weighs_input) weigh(args, layer->slices_per_expert, x);
    }
    if (layer->experts.slots) {
        if (compute(args, &layer->experts, num_shards(layer), args->ids, s, x)) return NO_SLOT;
    } else if (!has_answers) {
        if (!args->cross) return NO_CROSSING;
        int64_t outcome = args->cross(args->seam, number, args->num_rows, num_shards(layer), args->ids, x);
        if (outcome) return outcome;
    }
    combine(args, num_shards(layer), layer->experts.slots ? s->y : NULL, args->weights,
            rows_in(args, s, step->residual), rows_in(args, s, step->into));
    return 0;
}

/* Layers first .. end. Returns end, or the layer at whose seam it has stopped and, above it, why it could not be crossed
   (0: there is no `cross`). -1 - layer: an expert of it is asked for whose slot is empty, or does not exist. */
EXPORT int64_t es_layers(const struct layers_args *args) {
    struct scratch s = divide(args);
    bool is_waiting = args->start != AT_FIRST_STEP; /* for the seam of the first layer */
    for (int64_t number = args->first; number < args->end; number++) {
        const struct layer *layer = &args->layers[number];
        for (int64_t i = 0; i < layer->num_steps; i++) {
            const struct step *step = &layer->steps[i];
            if (is_waiting) {
                if (step->kind != SEAM_STEP) continue;
                is_waiting = false;
                if (args->start == BEHIND_SEAM) continue;
            }
            const float *x = rows_in(args, &s, step->x);
            float *into = rows_in(args, &s, step->into);
            int64_t found = 0;
            switch ((enum step_kind)step->kind) {
                case NORM_STEP: norm(args, x, &step->norm, into); break;
                case HEADS_STEP: attend(args, number, &s, x); break;
                case PROJECT_STEP: project_and_norm(args, layer, &s, step); break;
                case JOIN_STEP: join(args, x, rows_in(args, &s, step->residual), layer, &step->norm, into); break;
                case DENSE_STEP: found = dense(args, layer, &s, step); break;
                case SEAM_STEP:
                    found = seam(args, number, &s, step, args->start == WITH_ANSWERS && number == args->first);
                    break;
            }
            if (found == NO_SLOT) return -1 - number;
            if (found == NO_CROSSING) return number;
            if (found) return found << OUTCOME_AT | number;
        }
    }
    return args->end;
}
