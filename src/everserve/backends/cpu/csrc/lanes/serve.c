/* The expert worker's end: requests in, answers out, over the lanes of all attention workers.

   poll -> (Python chooses a batch) -> gather -> (the kernel computes in place) -> answer */

#define _GNU_SOURCE
#include "lane.h"

#define MAX_REQUESTS (MAX_RANKS * NUM_BOXES)
#define SOMETHING_CHANGED (INT64_C(1) << 32)

/* All fields are 8 bytes wide: lane_server.py declares the same structs. */

struct incoming { /* the lane from one attention rank */
    char *lane; /* NULL: no peer */
    struct cell *cell;
    int64_t position;              /* the attention worker's, as of the last poll */
    uint64_t taken[NUM_BOXES];     /* the request that was seen last */
    int64_t num_tokens[NUM_BOXES]; /* of that request, as checked */
    int64_t num_rows[NUM_BOXES];
};

struct request {
    int64_t rank, box, layer, replay, num_rows, arrived_ns;
};

struct batch_entry {
    int64_t rank, box; /* rank is -1 once the request was refused */
};

struct server {
    struct layout layout;
    struct cell *own;
    const _Atomic uint32_t *alarm;
    char *base;                   /* of the region in which all lanes are */
    struct incoming *lanes;       /* by rank */
    const int32_t *const *held;   /* [layer][slot]: the expert there, or -1; NULL for a layer without experts */
    int64_t *const *rows_of;      /* [layer][expert]: rows that were computed since the start */
    int64_t num_layers, num_slots;
    int32_t *token_R, *slot_R, *y_R; /* of the batch, in rows from base */
    int64_t spin_ns, timeout_ns, is_holding, alarm_seen, control_seen, num_refused;
    struct request requests[MAX_REQUESTS];
    struct batch_entry batch[MAX_REQUESTS];
};

static void answer(const struct server *s, int64_t rank, int64_t b, int64_t status) {
    struct incoming *from = &s->lanes[rank];
    struct box *box = box_of(&s->layout, from->lane, b);
    box->status = status;
    atomic_store_explicit(&box->answer, from->taken[b], memory_order_release);
    cell_ring(from->cell);
}

static void refuse(struct server *s, int64_t rank, int64_t b, int64_t status) {
    s->num_refused++;
    answer(s, rank, b, status);
}

static bool has_our_shape(const struct server *s, const char *lane) {
    const struct lane_header *h = (const struct lane_header *)lane;
    return h->magic == LANE_MAGIC && h->max_tokens == s->layout.max_tokens && h->top_k == s->layout.top_k &&
           h->hidden_size == s->layout.hidden_size;
}

/* Take what is in a box. True if it is a new request that can be computed. */
static bool take(struct server *s, int64_t rank, int64_t b, struct request *request) {
    struct incoming *from = &s->lanes[rank];
    struct box *box = box_of(&s->layout, from->lane, b);
    uint64_t seq = atomic_load_explicit(&box->request, memory_order_acquire);
    if (seq <= from->taken[b]) return false;
    from->taken[b] = seq;
    if (!has_our_shape(s, from->lane)) { /* its answer word is somewhere else */
        s->num_refused++;
        return false;
    }
    int64_t layer = box->layer, num_tokens = box->num_tokens, num_rows = box->num_rows;
    bool is_sane = layer >= 0 && layer < s->num_layers && s->held[layer] && num_tokens > 0 &&
                   num_tokens <= s->layout.max_tokens && num_rows > 0 && num_rows <= num_tokens * s->layout.top_k;
    if (!is_sane) {
        refuse(s, rank, b, BAD_REQUEST);
        return false;
    }
    from->num_tokens[b] = num_tokens;
    from->num_rows[b] = num_rows;
    *request = (struct request){rank, b, layer, box->replay != 0, num_rows, cell_now_ns()};
    return true;
}

static int64_t scan(struct server *s) {
    int64_t count = 0;
    for (int64_t rank = 0; rank < MAX_RANKS; rank++)
        for (int64_t b = 0; b < NUM_BOXES && s->lanes[rank].lane; b++)
            if (take(s, rank, b, &s->requests[count])) count++;
    return count;
}

static bool something_changed(const struct server *s) {
    return atomic_load(s->alarm) != (uint32_t)s->alarm_seen ||
           atomic_load(&s->own->control) != (uint32_t)s->control_seen;
}

/* New requests, into `requests`; blocks up to timeout_ns until there is one. Returns how many, and whether the alarm or
   the control word has changed. While it blocks without holding requests back, the cell says so: an attention worker
   that sees this worker idle despite a request knows that the ring was missed. */
EXPORT int64_t es_lane_poll(struct server *s) {
    int64_t count, deadline = 0;
    atomic_fetch_add_explicit(&s->own->progress, 1, memory_order_relaxed);
    for (;;) {
        uint32_t seen = atomic_load(&s->own->doorbell);
        count = scan(s);
        if (count || something_changed(s) || !s->timeout_ns) break;
        int64_t now = cell_now_ns();
        if (!deadline) deadline = now + s->timeout_ns;
        if (now >= deadline) break;
        if (!s->is_holding) atomic_store(&s->own->idle, 1);
        bool was_rung = cell_wait(s->own, seen, deadline - now, s->spin_ns) != seen;
        atomic_store(&s->own->idle, 0);
        if (!was_rung) break; /* time is up, or a signal wants to be handled */
    }
    for (int64_t rank = 0; rank < MAX_RANKS; rank++)
        if (s->lanes[rank].lane) s->lanes[rank].position = atomic_load(&s->lanes[rank].cell->position);
    return count | (something_changed(s) ? SOMETHING_CHANGED : 0);
}

/* Copy a box's indices behind those of the batch, counted from the region's base. Returns the new number of rows; the
   same number as before if an index is wrong, or a slot does not hold the expert that a row names. Slots change only
   between batches, so what is compared here is what will be computed. */
static int64_t append(struct server *s, int64_t rank, int64_t b, int64_t layer, int64_t num_rows) {
    const int32_t *held = s->held[layer];
    const struct layout *layout = &s->layout;
    struct incoming *from = &s->lanes[rank];
    struct box *box = box_of(layout, from->lane, b);
    int64_t row_bytes = layout->hidden_size * (int64_t)sizeof(float);
    int64_t first_x = ((char *)x_of(layout, box) - s->base) / row_bytes;
    int64_t first_y = ((char *)y_of(layout, box) - s->base) / row_bytes;
    const int32_t *tokens = tokens_of(layout, box);
    int32_t *words = slots_of(layout, box);
    int64_t num_moved = 0;
    for (int64_t i = 0; i < from->num_rows[b]; i++) {
        int32_t token = tokens[i], word = words[i], slot = slot_in(word);
        bool is_token = token >= 0 && token < from->num_tokens[b];
        if (!is_token || word < 0 || slot >= s->num_slots) {
            refuse(s, rank, b, is_token ? NO_SUCH_SLOT : BAD_REQUEST);
            return num_rows;
        }
        if (held[slot] != expert_in(word)) {
            words[i] = word | IS_MOVED;
            num_moved++;
        }
        s->token_R[num_rows + i] = (int32_t)(first_x + token);
        s->slot_R[num_rows + i] = slot;
        s->y_R[num_rows + i] = (int32_t)(first_y + i);
    }
    if (num_moved) {
        refuse(s, rank, b, MOVED);
        return num_rows;
    }
    for (int64_t i = 0; i < from->num_rows[b]; i++) s->rows_of[layer][held[s->slot_R[num_rows + i]]]++;
    return num_rows + from->num_rows[b];
}

/* The indices of all rows of the batch, for one kernel call; returns how many. What cannot be computed is refused. */
EXPORT int64_t es_lane_gather(struct server *s, int64_t num_entries, int64_t layer) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_entries; i++) {
        struct batch_entry *entry = &s->batch[i];
        int64_t before = num_rows;
        num_rows = append(s, entry->rank, entry->box, layer, num_rows);
        if (num_rows == before) entry->rank = -1;
    }
    return num_rows;
}

/* The rows of the batch are where they belong: say so. */
EXPORT void es_lane_answer(const struct server *s, int64_t num_entries) {
    for (int64_t i = 0; i < num_entries; i++)
        if (s->batch[i].rank >= 0) answer(s, s->batch[i].rank, s->batch[i].box, COMPUTED);
}
