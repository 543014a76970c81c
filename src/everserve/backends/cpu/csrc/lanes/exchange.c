/* The attention worker's end: rows out to their shards (experts or heads), answers back. One call at a time.

   A *part* is what one expert worker gets in one box. A row (t, k) belongs to one part at a time:

       no part yet --send--> open --answer--> arrived          (row_at[r] is where its answer lies)
                              |                  |
                              |                  `--a box is needed--> still arrived, but copied out of the box
                              |--peer not trusted any more--> lost     its rows are sent again, marked as a replay
                              `--answer says no or moved--> refused    likewise

   Nothing here decides which peers to trust: `ends[rank].trusted` and the owners of experts are set by peers.py. */

#define _GNU_SOURCE
#include "lane.h"

#define MAX_PARTS 512 /* of one layer; more than two per rank only if peers fail again and again */
#define MAX_MISSING 16
#define NO_PART (-1)
#define NO_EXPERT (-1) /* fewer experts are allowed than a row wants (ops/route.c): nothing is sent for it */

enum part_state { OPEN = 0, ARRIVED = 1, LOST = 2, REFUSED = 3 };

/* seam/outcomes.py: Outcome. */
enum outcome {
    DONE = 0,
    ATTEND = 1,   /* the alarm or the control word has changed */
    TIMEOUT = 2,  /* no answer for timeout_ns */
    REFUSAL = 3,  /* an answer says that it was not computed */
    NO_PLACE = 4, /* an expert that is needed has no owner; nothing was sent */
    TOO_MANY = 5, /* parts */
    UNBLOCKED = 6, /* a box has become free: send again */
    KV_ELSEWHERE = 7 /* a head would have to be asked in another place than where its KV is; nothing was sent */
};

/* All fields are 8 bytes wide: peers.py and remote_experts.py declare the same structs. */

struct end { /* of the lane to one expert rank */
    char *lane; /* NULL: no peer */
    struct cell *cell;
    int64_t trusted;
    uint64_t last_seq;
    uint64_t sent[NUM_BOXES];     /* the last request in each box */
    int64_t part[NUM_BOXES];      /* the part of this layer with rows there, or NO_PART */
    int64_t abandoned[NUM_BOXES]; /* its rows went to other peers: the answer will be counted, not used */
    int64_t num_stale;            /* such answers */
    uint64_t page;                /* the number of the page in the lane */
    uint64_t fetch;               /* the last request for KV */
    int64_t is_fetching;          /* it has no answer yet */
    /* while a part is being filled */
    int64_t filling, num_tokens, num_rows, last_token, replay;
    /* from a request to its answer, since peers.py last took these */
    int64_t answer_ns, num_answers, num_answered_rows;
};

struct part {
    char *lane;
    int64_t rank, box;
    uint64_t seq;
    int64_t num_rows, state, status, sent_ns;
};

/* What all rows of a step have in common, where heads are asked for. */
struct step {
    uint64_t page; /* its number; never 0, and only growing */
    int64_t num_sequences, table_width;
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    const uint64_t *chains; /* by row */
    int64_t *pools; /* by rank: the KV pool that the streams were computed with, 0 if there is no KV yet */
};

struct exchange {
    struct layout layout;
    struct cell *own;
    const _Atomic uint32_t *alarm;
    struct end *ends; /* by rank */
    int32_t *row_part;
    const float **row_at;
    float *spill; /* room for every row of a layer; touched only when needed */
    int64_t timeout_ns, spin_ns;
    int64_t alarm_seen, control_seen;
    /* What to do once the rows of a layer are on their way, before waiting for them; NULL: nothing. */
    void (*meanwhile)(void *arg, int64_t layer);
    void *meanwhile_arg;
    struct step step;
    /* the call at hand */
    int64_t fresh; /* 1: forget the call before */
    int64_t call, next_call, epoch, num_tokens, top_k;
    int64_t width;      /* floats of an answer to one row */
    int64_t num_shards; /* experts or heads of this call */
    const int32_t *ids;
    const float *x;
    const int32_t *owner, *slot_of; /* by shard */
    int32_t *kv_at; /* by head: the rank where its KV is, -1 if there is none; NULL: this call is not about heads */
    /* what became of it */
    int64_t num_parts, num_missing, num_blocked;
    int64_t missing[MAX_MISSING]; /* experts without an owner */
    int64_t blocked[MAX_RANKS];   /* ranks with rows that wait, because both boxes are in use */
    struct part parts[MAX_PARTS];
};

static int64_t owner_of(const struct exchange *e, int32_t expert) {
    return e->owner[expert];
}

static int32_t slot_of(const struct exchange *e, int32_t expert) {
    return e->slot_of[expert];
}

static bool is_answered(const struct layout *layout, const struct end *end, int64_t b) {
    struct box *box = box_of(layout, end->lane, b);
    return !end->sent[b] || atomic_load_explicit(&box->answer, memory_order_acquire) == end->sent[b];
}

/* The end that a part was sent through; NULL once another incarnation sits in that rank. */
static struct end *end_of(struct exchange *e, const struct part *part) {
    struct end *end = &e->ends[part->rank];
    return end->lane == part->lane ? end : NULL;
}

static void forget(struct exchange *e, struct part *part, bool abandoned) {
    struct end *end = end_of(e, part);
    if (!end) return;
    end->part[part->box] = NO_PART;
    if (abandoned) end->abandoned[part->box] = 1;
}

static void begin(struct exchange *e) {
    /* A layer that was abandoned in the middle leaves open parts behind. */
    for (int64_t p = 0; p < e->num_parts; p++) forget(e, &e->parts[p], e->parts[p].state == OPEN);
    e->num_parts = e->num_blocked = 0;
    memset(e->row_part, 0xff, (size_t)(e->num_tokens * e->top_k) * sizeof(int32_t));
    e->fresh = 0;
}

static bool needs_a_place(const struct exchange *e, int64_t r) {
    int32_t p = e->row_part[r];
    if (e->ids[r] == NO_EXPERT) return false;
    return p == NO_PART || e->parts[p].state == LOST || e->parts[p].state == REFUSED;
}

static void note_missing(struct exchange *e, int64_t expert) {
    for (int64_t i = 0; i < e->num_missing; i++)
        if (e->missing[i] == expert) return;
    if (e->num_missing < MAX_MISSING) e->missing[e->num_missing++] = expert;
}

/* Copy a part's rows out of its box, so that the box can be used again. */
static void spill(struct exchange *e, int64_t p) {
    int64_t size = e->width;
    for (int64_t r = 0; r < e->num_tokens * e->top_k; r++) {
        if (e->row_part[r] != p) continue;
        memcpy(e->spill + r * size, e->row_at[r], (size_t)size * sizeof(float));
        e->row_at[r] = e->spill + r * size;
    }
    forget(e, &e->parts[p], false);
}

/* A box to fill, or -1: both wait for an answer. */
static int64_t free_box(struct exchange *e, struct end *end) {
    for (int64_t b = 0; b < NUM_BOXES; b++) {
        if (end->part[b] != NO_PART || !is_answered(&e->layout, end, b)) continue;
        end->num_stale += end->abandoned[b];
        end->abandoned[b] = 0;
        return b;
    }
    for (int64_t b = 0; b < NUM_BOXES; b++) {
        if (end->part[b] == NO_PART || e->parts[end->part[b]].state != ARRIVED) continue;
        spill(e, end->part[b]);
        return b;
    }
    return -1;
}

/* Begin a part for this rank. */
static void open_part(struct exchange *e, int64_t rank) {
    struct end *end = &e->ends[rank];
    int64_t b = free_box(e, end);
    end->num_tokens = end->num_rows = end->replay = 0;
    end->last_token = -1;
    if (b < 0) {
        e->blocked[e->num_blocked++] = rank;
        end->filling = NO_PART;
        return;
    }
    struct part *part = &e->parts[e->num_parts];
    *part = (struct part){.lane = end->lane, .rank = rank, .box = b, .state = OPEN};
    end->filling = end->part[b] = e->num_parts++;
}

static void append(struct exchange *e, struct end *end, int64_t t, int64_t r) {
    const struct layout *layout = &e->layout;
    struct box *box = box_of(layout, end->lane, e->parts[end->filling].box);
    size_t size = (size_t)layout->hidden_size;
    if (end->last_token != t) {
        memcpy(x_of(layout, box) + (size_t)end->num_tokens * size, e->x + (size_t)t * size, size * sizeof(float));
        end->num_tokens++;
        end->last_token = t;
    }
    int64_t i = end->num_rows++;
    tokens_of(layout, box)[i] = (int32_t)(end->num_tokens - 1);
    slots_of(layout, box)[i] = row_word(slot_of(e, e->ids[r]), e->ids[r]);
    end->replay |= e->row_part[r] != NO_PART;
    e->row_part[r] = (int32_t)end->filling;
    e->row_at[r] = y_of(layout, box) + (size_t)(i * e->width);
}

/* Put the step's page into the lane, unless it is there. */
static void write_page(struct exchange *e, struct end *end, int64_t rank) {
    const struct step *step = &e->step;
    if (end->page == step->page) return;
    struct page *page = page_of(&e->layout, end->lane);
    atomic_store_explicit(&page->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    page->pool = step->pools[rank];
    page->num_rows = e->num_tokens;
    page->num_sequences = step->num_sequences;
    page->table_width = step->table_width;
    int32_t *words = words_of(page);
    size_t num_rows = (size_t)e->num_tokens, num_starts = (size_t)step->num_sequences + 1;
    memcpy(words, step->positions, num_rows * sizeof(int32_t));
    memcpy(words += num_rows, step->kv_slots, num_rows * sizeof(int32_t));
    memcpy(words += num_rows, step->query_starts, num_starts * sizeof(int32_t));
    memcpy(words += num_starts, step->block_tables,
           (size_t)(step->num_sequences * step->table_width) * sizeof(int32_t));
    memcpy(words_of(page) + chains_at(e->num_tokens, step->num_sequences, step->table_width), step->chains,
           num_rows * sizeof(uint64_t));
    atomic_store_explicit(&page->number, step->page, memory_order_release);
    end->page = step->page;
}

static void publish(struct exchange *e, struct end *end) {
    struct part *part = &e->parts[end->filling];
    struct box *box = box_of(&e->layout, end->lane, part->box);
    part->seq = end->sent[part->box] = ++end->last_seq;
    part->num_rows = end->num_rows;
    box->epoch = e->epoch;
    box->call = (int32_t)e->call;
    box->num_tokens = (int32_t)end->num_tokens;
    box->num_rows = (int32_t)end->num_rows;
    box->replay = (int32_t)end->replay;
    part->sent_ns = cell_now_ns();
    if (e->kv_at) {
        write_page(e, end, part->rank);
        box->page = e->step.page;
    }
    atomic_store_explicit(&box->request, part->seq, memory_order_release);
    cell_ring(end->cell);
}

/* Whether every head that is to be asked, or asked again, has its KV where it will be asked. From now on it is there. */
static bool has_kv_in_place(struct exchange *e) {
    for (int64_t g = 0; g < e->num_shards; g++) /* the first token's rows: all tokens of a step go to every head */
        if (needs_a_place(e, g) && e->kv_at[g] >= 0 && e->kv_at[g] != owner_of(e, (int32_t)g)) return false;
    for (int64_t g = 0; g < e->num_shards; g++)
        if (needs_a_place(e, g)) e->kv_at[g] = (int32_t)owner_of(e, (int32_t)g);
    return true;
}

/* Send every row that needs a place to the owner of its expert. If both boxes of a rank are in use, its rows stay
   behind (`blocked`). Nothing at all is sent if an expert has no owner. */
static int64_t send_rows(struct exchange *e) {
    int64_t top_k = e->top_k, num_rows = e->num_tokens * top_k;
    e->num_missing = e->num_blocked = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        /* It has no weight in the sum; any row will do. */
        if (e->ids[r] == NO_EXPERT) e->row_at[r] = e->x + r / top_k * e->layout.hidden_size;
        if (!needs_a_place(e, r)) continue;
        int32_t expert = e->ids[r];
        bool is_known = expert >= 0 && expert < e->num_shards;
        if (!is_known || owner_of(e, expert) < 0) note_missing(e, expert);
    }
    if (e->num_missing) return NO_PLACE;
    if (e->kv_at && !has_kv_in_place(e)) return KV_ELSEWHERE;
    if (e->num_parts + MAX_RANKS > MAX_PARTS) return TOO_MANY;

    int64_t ranks[MAX_RANKS], num_ranks = 0;
    uint64_t seen = 0;
    for (int64_t t = 0, r = 0; t < e->num_tokens; t++) {
        for (int64_t k = 0; k < top_k; k++, r++) {
            if (!needs_a_place(e, r)) continue;
            int64_t rank = owner_of(e, e->ids[r]);
            if (!(seen >> rank & 1)) {
                seen |= UINT64_C(1) << rank;
                ranks[num_ranks++] = rank;
                open_part(e, rank);
            }
            if (e->ends[rank].filling != NO_PART) append(e, &e->ends[rank], t, r);
        }
    }
    for (int64_t i = 0; i < num_ranks; i++)
        if (e->ends[ranks[i]].filling != NO_PART) publish(e, &e->ends[ranks[i]]);
    /* Experts that got nothing from us need not wait for us: we are on our way to the next layer. */
    atomic_store(&e->own->position, (int32_t)e->next_call);
    return DONE;
}

/* An answer has come, or is not awaited any more. Answers that are noticed late, because this worker was held up, are
   late from all peers alike. */
static void count_answer(struct end *end, const struct part *part) {
    end->answer_ns += cell_now_ns() - part->sent_ns;
    end->num_answers++;
    end->num_answered_rows += part->num_rows;
}

/* Note an answer, if it is there. */
static bool has_arrived(struct exchange *e, struct part *part) {
    struct box *box = box_of(&e->layout, part->lane, part->box);
    if (atomic_load_explicit(&box->answer, memory_order_acquire) != part->seq) return false;
    part->status = box->status;
    part->state = part->status == COMPUTED ? ARRIVED : REFUSED;
    if (part->state == REFUSED) {
        forget(e, part, false);
        return true;
    }
    if (e->kv_at && !e->step.pools[part->rank]) e->step.pools[part->rank] = box->pool;
    if (end_of(e, part)) count_answer(end_of(e, part), part);
    return true;
}

/* Note all answers that are there; returns how many parts are still open. */
static int64_t collect(struct exchange *e, bool *refused) {
    int64_t num_open = 0;
    for (int64_t p = 0; p < e->num_parts; p++) {
        struct part *part = &e->parts[p];
        if (part->state != OPEN) continue;
        if (!has_arrived(e, part)) num_open++;
        else if (part->state == REFUSED) *refused = true;
    }
    return num_open;
}

static bool is_unblocked(const struct exchange *e) {
    for (int64_t i = 0; i < e->num_blocked; i++)
        for (int64_t b = 0; b < NUM_BOXES; b++)
            if (is_answered(&e->layout, &e->ends[e->blocked[i]], b)) return true;
    return false;
}

static bool wants_attention(const struct exchange *e) {
    return atomic_load(e->alarm) != (uint32_t)e->alarm_seen ||
           atomic_load(&e->own->control) != (uint32_t)e->control_seen;
}

/* Block until every row has its answer, or until there is something to decide. */
static int64_t wait(struct exchange *e) {
    int64_t deadline = 0;
    for (;;) {
        uint32_t seen = atomic_load(&e->own->doorbell);
        bool refused = false;
        int64_t num_open = collect(e, &refused);
        if (refused) return REFUSAL;
        if (is_unblocked(e)) return UNBLOCKED;
        if (!num_open && !e->num_blocked) return DONE;
        if (wants_attention(e)) return ATTEND;
        int64_t now = cell_now_ns();
        if (!deadline) deadline = now + e->timeout_ns;
        if (now >= deadline) return TIMEOUT;
        cell_wait(e->own, seen, deadline - now, e->spin_ns);
    }
}

/* The whole of a layer, if nothing goes wrong: one call, one wake-up. After any other outcome than DONE the caller
   decides, and goes on with es_lane_settle, es_lane_send and es_lane_wait. */
EXPORT int64_t es_lane_exchange(struct exchange *e) {
    if (e->fresh) begin(e);
    if (wants_attention(e)) return ATTEND; /* peers and owners of experts may have changed: do not send yet */
    int64_t outcome = send_rows(e);
    if (outcome == DONE && e->meanwhile) e->meanwhile(e->meanwhile_arg, e->call);
    for (;;) {
        if (outcome == DONE) outcome = wait(e);
        if (outcome != UNBLOCKED) return outcome;
        outcome = send_rows(e);
    }
}

struct crossing { /* the call of one layer */
    int64_t call, next_call;
    const int32_t *owner, *slot_of;
};

struct seam { /* exchange.py: Seam */
    struct exchange *exchange;
    const struct crossing *crossings; /* by layer */
    int64_t epoch, width, num_shards;
};

/* The same for whole layers that are computed without Python (ops/layers.c). */
EXPORT int64_t es_lane_cross(const struct seam *seam, int64_t layer, int64_t num_tokens, int64_t top_k,
                             const int32_t *ids, const float *x) {
    const struct crossing *crossing = &seam->crossings[layer];
    struct exchange *e = seam->exchange;
    e->fresh = 1;
    e->call = crossing->call;
    e->next_call = crossing->next_call;
    e->epoch = seam->epoch;
    e->num_tokens = num_tokens;
    e->top_k = top_k;
    e->width = seam->width;
    e->num_shards = seam->num_shards;
    e->ids = ids;
    e->x = x;
    e->owner = crossing->owner;
    e->slot_of = crossing->slot_of;
    e->kv_at = NULL;
    return es_lane_exchange(e);
}

/* After trust has changed: the open parts of peers that are not trusted any more are lost, unless their answers have
   arrived. Answers do not count if another incarnation has taken the rank. Other open parts stay open. */
EXPORT void es_lane_settle(struct exchange *e) {
    for (int64_t p = 0; p < e->num_parts; p++) {
        struct part *part = &e->parts[p];
        struct end *end = end_of(e, part);
        if (part->state != OPEN || (end && (end->trusted || has_arrived(e, part)))) continue;
        part->state = LOST;
        if (end) count_answer(end, part);
        forget(e, part, true);
    }
}

EXPORT int64_t es_lane_send(struct exchange *e) { return send_rows(e); }

EXPORT int64_t es_lane_wait(struct exchange *e) { return wait(e); }

/* The answers to a call that is complete, in the order of tokens and shards. */
EXPORT void es_lane_collect(const struct exchange *e, float *out) {
    size_t bytes = (size_t)e->width * sizeof(float);
    for (int64_t r = 0; r < e->num_tokens * e->top_k; r++) memcpy(out + r * e->width, e->row_at[r], bytes);
}

/* Count the answers that have come to abandoned requests. Called for ends in use and for retired ones. */
EXPORT void es_lane_count_stale(const struct layout *layout, struct end *end) {
    for (int64_t b = 0; b < NUM_BOXES && end->lane; b++) {
        if (!end->abandoned[b] || !is_answered(layout, end, b)) continue;
        end->abandoned[b] = 0;
        end->num_stale++;
    }
}

/* Nothing more is expected from this end: what has not been answered is abandoned. */
EXPORT void es_lane_retire(const struct layout *layout, struct end *end) {
    for (int64_t b = 0; b < NUM_BOXES && end->lane; b++)
        if (!is_answered(layout, end, b)) end->abandoned[b] = 1;
}

struct fetch_args { /* exchange.py: Fetch */
    int64_t num_heads, num_blocks, num_tokens;
    const uint64_t *chains;
    const int32_t *calls, *words, *sources, *blocks;
};

static void *put(void *to, const void *from, int64_t num, size_t size) {
    memcpy(to, from, (size_t)num * size);
    return (char *)to + (size_t)num * size;
}

/* Ask an expert worker to have KV. 0 if it was sent; the last such request to it must have been answered before. */
EXPORT int64_t es_lane_send_fetch(struct exchange *e, int64_t rank, const struct fetch_args *args) {
    const struct layout *layout = &e->layout;
    struct end *end = &e->ends[rank];
    if (!end->lane || end->is_fetching || args->num_heads > layout->fetch_heads ||
        args->num_blocks > layout->fetch_blocks || args->num_tokens > layout->fetch_tokens)
        return -1;
    atomic_store_explicit(&page_of(layout, end->lane)->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    end->page = 0;
    struct fetch *fetch = fetch_of(layout, end->lane);
    fetch->num_heads = args->num_heads;
    fetch->num_blocks = args->num_blocks;
    fetch->num_tokens = args->num_tokens;
    void *to = put(fetch + 1, args->chains, args->num_tokens, sizeof(uint64_t));
    to = put(to, args->calls, args->num_heads, sizeof(int32_t));
    to = put(to, args->words, args->num_heads, sizeof(int32_t));
    to = put(to, args->sources, args->num_blocks, sizeof(int32_t));
    put(to, args->blocks, args->num_blocks, sizeof(int32_t));
    end->is_fetching = 1;
    atomic_store_explicit(&fetch->request, ++end->fetch, memory_order_release);
    cell_ring(end->cell);
    return 0;
}

/* Note the answers that are there; returns how many are still to come from peers that are trusted. */
static int64_t collect_fetches(struct exchange *e) {
    int64_t num_open = 0;
    for (int64_t rank = 0; rank < MAX_RANKS; rank++) {
        struct end *end = &e->ends[rank];
        if (!end->lane || !end->is_fetching || !end->trusted) continue;
        const struct fetch *fetch = fetch_of(&e->layout, end->lane);
        if (atomic_load_explicit(&fetch->answer, memory_order_acquire) == end->fetch) end->is_fetching = 0;
        else num_open++;
    }
    return num_open;
}

EXPORT int64_t es_lane_num_fetching(struct exchange *e) { return collect_fetches(e); }

/* Block until every request for KV to a peer that is trusted has its answer, or until there is something to decide. */
EXPORT int64_t es_lane_wait_fetches(struct exchange *e) {
    int64_t deadline = 0;
    for (;;) {
        uint32_t seen = atomic_load(&e->own->doorbell);
        if (!collect_fetches(e)) return DONE;
        if (wants_attention(e)) return ATTEND;
        int64_t now = cell_now_ns();
        if (!deadline) deadline = now + e->timeout_ns;
        if (now >= deadline) return TIMEOUT;
        cell_wait(e->own, seen, deadline - now, e->spin_ns);
    }
}
