/* The expert worker's end: requests in, answers out, over the lanes of all attention workers.

   poll -> (Python chooses a batch, of one call) -> gather -> (the kernel computes in place) -> answer

   Where there is nothing to choose, all of that is es_lane_serve, again and again without Python.

   Calls are of two kinds: rows of experts, which are gathered row by row, and heads, where a request has all rows of its
   step and each head of it is one piece of work. */

#define _GNU_SOURCE
#include "check.h"
#include "experts.h"
#include "heads.h"
#include "lane.h"

#define MAX_REQUESTS (MAX_RANKS * NUM_BOXES)
#define FETCH (-1) /* the call of a request that is no part of a step */
#define SOMETHING_CHANGED (INT64_C(1) << 32)

/* All fields are 8 bytes wide: lane_server.py declares the same structs. */

struct incoming { /* the lane from one attention rank */
    char *lane; /* NULL: no peer */
    struct cell *cell;
    int64_t position;              /* the attention worker's, as of the last poll */
    uint64_t taken[NUM_BOXES];     /* the request that was seen last */
    int64_t num_tokens[NUM_BOXES]; /* of that request, as checked */
    int64_t num_rows[NUM_BOXES];
    /* Heads. */
    uint64_t page[NUM_BOXES];        /* that the request names */
    int64_t first_block, num_blocks; /* blocks that this attention worker may name */
    uint64_t copied;                 /* the number of the page that was copied last */
    int64_t page_status, page_pool, page_rows, page_sequences, page_width;
    uint64_t fetch; /* the request for KV that was seen last */
};

struct request {
    int64_t rank, box, call, replay, num_rows, arrived_ns;
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
    const int32_t *const *held;   /* [call][slot]: the expert or head there, or -1; NULL for a call that is not served */
    int64_t *const *rows_of;      /* [call][expert or head]: rows that were computed since the start */
    const int64_t *num_slots;     /* [call] */
    const int32_t *const *pieces; /* [call][slot]: where a head's KV is; NULL for calls that are not about heads */
    int64_t num_calls;
    int32_t *token_R, *slot_R, *y_R; /* of the batch, in rows from base */
    /* Heads. */
    const _Atomic int64_t *pool;  /* the identity of our KV pool; NULL: no heads here */
    int64_t num_heads, answer_size, num_positions, block_size; /* heads of a layer; floats of an answer */
    int64_t num_blocks;           /* of the pool */
    int64_t num_parking;          /* blocks that only its mirror has */
    int32_t *pages;               /* [rank][page_words]: copies */
    struct head_request *head_requests;
    int32_t *head_slots, *head_pieces; /* [request][num_heads] */
    int64_t spin_ns, timeout_ns, is_holding, alarm_seen, control_seen, num_refused;
    struct request requests[MAX_REQUESTS + MAX_RANKS];
    struct batch_entry batch[MAX_REQUESTS];
};

static void answer(const struct server *s, int64_t rank, int64_t b, int64_t status) {
    struct incoming *from = &s->lanes[rank];
    struct box *box = box_of(&s->layout, from->lane, b);
    box->status = status;
    box->pool = s->pool ? atomic_load(s->pool) : 0;
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
           h->hidden_size == s->layout.hidden_size && h->y_floats == s->layout.y_floats &&
           h->page_words == s->layout.page_words;
}

static bool is_about_heads(const struct server *s, int64_t call) { return s->pieces[call]; }

static int64_t answer_size(const struct server *s, int64_t call) {
    return is_about_heads(s, call) ? s->answer_size : s->layout.hidden_size;
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
    int64_t call = box->call, num_tokens = box->num_tokens, num_rows = box->num_rows;
    bool is_sane = call >= 0 && call < s->num_calls && s->held[call] && num_tokens > 0 &&
                   num_tokens <= s->layout.max_tokens && num_rows > 0 && num_rows <= num_tokens * s->layout.top_k &&
                   num_rows * answer_size(s, call) <= s->layout.y_floats;
    if (!is_sane) {
        refuse(s, rank, b, BAD_REQUEST);
        return false;
    }
    from->num_tokens[b] = num_tokens;
    from->num_rows[b] = num_rows;
    from->page[b] = box->page;
    *request = (struct request){rank, b, call, box->replay != 0, num_rows, cell_now_ns()};
    return true;
}

static bool take_fetch(struct server *s, int64_t rank, struct request *request) {
    struct incoming *from = &s->lanes[rank];
    uint64_t seq = atomic_load_explicit(&fetch_of(&s->layout, from->lane)->request, memory_order_acquire);
    if (seq <= from->fetch) return false;
    from->fetch = seq;
    if (!has_our_shape(s, from->lane)) {
        s->num_refused++;
        return false;
    }
    *request = (struct request){.rank = rank, .call = FETCH, .arrived_ns = cell_now_ns()};
    return true;
}

static int64_t scan(struct server *s) {
    int64_t count = 0;
    for (int64_t rank = 0; rank < MAX_RANKS; rank++) {
        for (int64_t b = 0; b < NUM_BOXES && s->lanes[rank].lane; b++)
            if (take(s, rank, b, &s->requests[count])) count++;
        if (s->pool && s->lanes[rank].lane && take_fetch(s, rank, &s->requests[count])) count++;
    }
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
static int64_t append(struct server *s, int64_t rank, int64_t b, int64_t call, int64_t num_rows) {
    const int32_t *held = s->held[call];
    int64_t num_slots = s->num_slots[call];
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
        if (!is_token || word < 0 || slot >= num_slots) {
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
    for (int64_t i = 0; i < from->num_rows[b]; i++) s->rows_of[call][held[s->slot_R[num_rows + i]]]++;
    return num_rows + from->num_rows[b];
}

/* The indices of all rows of the batch, for one kernel call; returns how many. What cannot be computed is refused. */
EXPORT int64_t es_lane_gather(struct server *s, int64_t num_entries, int64_t call) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_entries; i++) {
        struct batch_entry *entry = &s->batch[i];
        int64_t before = num_rows;
        num_rows = append(s, entry->rank, entry->box, call, num_rows);
        if (num_rows == before) entry->rank = -1;
    }
    return num_rows;
}

/* Copy the page in a lane, and check the copy: nothing that an attention worker writes can lead to KV that is not its own.
   Returns why not, or COMPUTED. */
static int64_t copy_page(struct server *s, int64_t rank, uint64_t number) {
    const struct layout *layout = &s->layout;
    struct incoming *from = &s->lanes[rank];
    struct page *page = page_of(layout, from->lane);
    int64_t num_rows = page->num_rows, num_sequences = page->num_sequences, width = page->table_width, pool = page->pool;
    bool is_sane = num_rows > 0 && num_rows <= layout->max_tokens && num_sequences > 0 && num_sequences <= num_rows &&
                   width > 0 && width <= layout->page_words;
    int64_t num_words = is_sane ? chains_at(num_rows, num_sequences, width) + 2 * num_rows : 0;
    if (!is_sane || num_words > layout->page_words) return BAD_REQUEST;
    int32_t *words = s->pages + rank * layout->page_words;
    from->copied = 0; /* what was there is overwritten */
    memcpy(words, words_of(page), (size_t)num_words * sizeof(int32_t));
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&page->number, memory_order_relaxed) != number) return NO_PAGE;
    struct check_batch_args args = {
        .positions = words, .kv_slots = words + num_rows, .query_starts = words + 2 * num_rows,
        .block_tables = words + 2 * num_rows + num_sequences + 1, .num_rows = num_rows, .num_sequences = num_sequences,
        .table_width = width, .first_block = from->first_block, .num_blocks = from->num_blocks,
        .block_size = s->block_size,
    };
    int64_t highest = check_batch(&args);
    from->copied = number;
    from->page_status = highest >= 0 && highest < s->num_positions ? COMPUTED : BAD_REQUEST;
    from->page_pool = pool ? pool : atomic_load(s->pool);
    from->page_rows = num_rows;
    from->page_sequences = num_sequences;
    from->page_width = width;
    return from->page_status;
}

/* Whether a request's page is here and may be used; why not, or COMPUTED. The page is compared with the one in the lane
   each time: when the attention worker has begun another step, the blocks of this one may belong to other streams. */
static int64_t have_page(struct server *s, int64_t rank, int64_t b) {
    struct incoming *from = &s->lanes[rank];
    uint64_t number = atomic_load_explicit(&page_of(&s->layout, from->lane)->number, memory_order_acquire);
    if (!number || number != from->page[b]) return NO_PAGE;
    int64_t status = from->copied == number ? from->page_status : copy_page(s, rank, number);
    if (status != COMPUTED) return status;
    if (from->page_pool != atomic_load(s->pool)) return POOL_CHANGED;
    return from->page_rows == from->num_tokens[b] ? COMPUTED : BAD_REQUEST;
}

/* The heads that a request asks for, into slots and pieces; why not, or COMPUTED. */
static int64_t find_heads(struct server *s, int64_t rank, int64_t b, int64_t call, int64_t num_heads, int32_t *slots,
                          int32_t *pieces) {
    int32_t *words = slots_of(&s->layout, box_of(&s->layout, s->lanes[rank].lane, b));
    int64_t status = COMPUTED;
    for (int64_t j = 0; j < num_heads; j++) {
        int32_t word = words[j], slot = slot_in(word);
        if (word < 0 || slot >= s->num_slots[call]) return NO_SUCH_SLOT;
        if (s->held[call][slot] != expert_in(word)) {
            words[j] = word | IS_MOVED;
            status = MOVED;
        }
        slots[j] = slot;
        pieces[j] = s->pieces[call][slot];
    }
    return status;
}

/* One more request for the kernel, if it can be computed; why not, or COMPUTED. All of its rows go to all of its heads. */
static int64_t add_heads(struct server *s, int64_t rank, int64_t b, int64_t call, int64_t index) {
    struct incoming *from = &s->lanes[rank];
    struct box *box = box_of(&s->layout, from->lane, b);
    int64_t num_rows = from->num_tokens[b], num_heads = from->num_rows[b] / num_rows;
    if (num_heads * num_rows != from->num_rows[b] || num_heads > s->num_heads) return BAD_REQUEST;
    int64_t status = have_page(s, rank, b);
    if (status != COMPUTED) return status;
    int32_t *slots = s->head_slots + index * s->num_heads, *pieces = s->head_pieces + index * s->num_heads;
    status = find_heads(s, rank, b, call, num_heads, slots, pieces);
    if (status != COMPUTED) return status;
    const int32_t *words = s->pages + rank * s->layout.page_words;
    s->head_requests[index] = (struct head_request){
        .x = x_of(&s->layout, box), .y = y_of(&s->layout, box), .positions = words, .kv_slots = words + num_rows,
        .query_starts = words + 2 * num_rows, .block_tables = words + 2 * num_rows + from->page_sequences + 1,
        .slots = slots, .pieces = pieces, .num_rows = num_rows, .num_sequences = from->page_sequences,
        .table_width = from->page_width, .num_heads = num_heads,
        .chains = (const uint64_t *)(words + chains_at(num_rows, from->page_sequences, from->page_width)),
    };
    for (int64_t j = 0; j < num_heads; j++) s->rows_of[call][s->held[call][slots[j]]] += num_rows;
    return COMPUTED;
}

/* The same for a call about heads: into head_requests, and how many. */
EXPORT int64_t es_lane_gather_heads(struct server *s, int64_t num_entries, int64_t call) {
    int64_t count = 0;
    for (int64_t i = 0; i < num_entries; i++) {
        struct batch_entry *entry = &s->batch[i];
        int64_t status = add_heads(s, entry->rank, entry->box, call, count);
        if (status == COMPUTED) {
            count++;
        } else {
            refuse(s, entry->rank, entry->box, status);
            entry->rank = -1;
        }
    }
    return count;
}

/* The rows of the batch are where they belong: say so. */
EXPORT void es_lane_answer(const struct server *s, int64_t num_entries) {
    for (int64_t i = 0; i < num_entries; i++)
        if (s->batch[i].rank >= 0) answer(s, s->batch[i].rank, s->batch[i].box, COMPUTED);
}

struct own_experts { /* of one call */
    const struct slot *slots;
    int64_t num_slots, inner_size; /* no slots: it is not served here */
};

struct serving { /* lane_server.py: _Serving */
    int64_t (*expert_rows)(const struct expert_rows_args *args);
    const struct own_experts *experts; /* by call */
    int64_t num_region_rows;           /* of the region in which all lanes are */
    int64_t reach;                     /* seam/batching.py: BatchPolicy; -1: any */
    int64_t most_rows;                 /* of a request that is computed here */
    int64_t stretch_ns;                /* after so long Python looks after the rest, whatever comes */
    int64_t num_batches, num_rows;     /* since the start */
};

/* Whether choose_layer (seam/batching.py) would say "all are here", and so without a look at the clock. */
static bool is_nobody_coming(const struct server *s, const struct serving *v, const struct request *request) {
    for (int64_t rank = 0; rank < MAX_RANKS; rank++) {
        if (!s->lanes[rank].lane || rank == request->rank) continue;
        int64_t at = s->lanes[rank].position;
        if (at >= 0 && at <= request->call && (v->reach < 0 || at >= request->call - v->reach)) return false;
    }
    return true;
}

static bool is_plain(const struct server *s, const struct serving *v, const struct request *request) {
    return request->call != FETCH && !request->replay && !is_about_heads(s, request->call) &&
           request->num_rows <= v->most_rows && v->experts[request->call].slots && is_nobody_coming(s, v, request);
}

static int64_t compute_alone(struct server *s, struct serving *v, const struct request *request) {
    const struct own_experts *own = &v->experts[request->call];
    s->batch[0] = (struct batch_entry){request->rank, request->box};
    v->num_batches++;
    int64_t num_rows = es_lane_gather(s, 1, request->call);
    if (!num_rows) return 0;
    struct expert_rows_args args = {
        .x = (const float *)s->base, .tokens = s->token_R, .slot_of = s->slot_R, .slots = own->slots,
        .y = (float *)s->base, .y_index = s->y_R, .num_rows = num_rows, .num_tokens = v->num_region_rows,
        .num_y = v->num_region_rows, .num_slots = own->num_slots, .hidden_size = s->layout.hidden_size,
        .inner_size = own->inner_size,
    };
    if (v->expert_rows(&args)) return -1;
    es_lane_answer(s, 1);
    v->num_rows += num_rows;
    return 0;
}

/* es_lane_poll, but requests that come alone are computed and answered at once. Returns when something else comes, or
   nothing; what es_lane_poll returns. -1: a slot that holds an expert has no weights. */
EXPORT int64_t es_lane_serve(struct server *s, struct serving *v) {
    int64_t until = cell_now_ns() + v->stretch_ns;
    for (;;) {
        int64_t found = es_lane_poll(s);
        if (found != 1 || !is_plain(s, v, &s->requests[0])) return found;
        if (compute_alone(s, v, &s->requests[0])) return -1;
        if (cell_now_ns() >= until) return 0;
    }
}

struct taken { /* lane_server.py: _Taken. Behind it: what is behind struct fetch, with pieces instead of row words. */
    int64_t num_heads, num_blocks, num_tokens;
};

/* Heads become pieces; why not, or COMPUTED. */
static int64_t find_pieces(const struct server *s, const int32_t *calls, int32_t *words, int64_t num_heads) {
    for (int64_t i = 0; i < num_heads; i++) {
        int32_t call = calls[i], slot = slot_in(words[i]);
        if (call < 0 || call >= s->num_calls || !is_about_heads(s, call)) return BAD_REQUEST;
        if (words[i] < 0 || slot >= s->num_slots[call]) return NO_SUCH_SLOT;
        if (s->held[call][slot] != expert_in(words[i])) return MOVED;
        words[i] = s->pieces[call][slot];
    }
    return COMPUTED;
}

/* Copy a request for KV, and check the copy: nothing may be written but to blocks of the home that asks. Why not, or
   COMPUTED; then `taken` says what is wanted. */
EXPORT int64_t es_lane_take_fetch(struct server *s, int64_t rank, struct taken *taken) {
    const struct layout *layout = &s->layout;
    const struct incoming *from = &s->lanes[rank];
    const struct fetch *fetch = fetch_of(layout, from->lane);
    int64_t num_heads = fetch->num_heads, num_blocks = fetch->num_blocks, num_tokens = fetch->num_tokens;
    bool is_sane = num_heads >= 0 && num_heads <= layout->fetch_heads && num_tokens >= 0 &&
                   num_tokens <= layout->fetch_tokens && num_blocks <= layout->fetch_blocks &&
                   num_blocks == (num_tokens + s->block_size - 1) / s->block_size;
    if (!is_sane) return BAD_REQUEST;
    *taken = (struct taken){num_heads, num_blocks, num_tokens};
    size_t num_bytes = (size_t)(8 * num_tokens + 4 * (2 * num_heads + 2 * num_blocks));
    memcpy(taken + 1, fetch + 1, num_bytes);
    int32_t *calls = (int32_t *)((uint64_t *)(taken + 1) + num_tokens), *words = calls + num_heads;
    const int32_t *sources = words + num_heads, *blocks = sources + num_blocks;
    int64_t first = from->first_block; /* of the home; in the mirror, if that is where the first block is */
    if (s->num_parking && num_blocks && blocks[0] >= s->num_blocks) first += s->num_blocks;
    for (int64_t i = 0; i < num_blocks; i++) {
        bool is_own = blocks[i] >= first && blocks[i] < first + from->num_blocks;
        if (!is_own || sources[i] < 0 || sources[i] >= s->num_blocks + s->num_parking) return BAD_REQUEST;
    }
    return find_pieces(s, calls, words, num_heads);
}

/* So many leading tokens are there, and so many bytes were copied. */
EXPORT void es_lane_answer_fetch(struct server *s, int64_t rank, int64_t status, int64_t num_right, int64_t num_bytes) {
    struct incoming *from = &s->lanes[rank];
    struct fetch *fetch = fetch_of(&s->layout, from->lane);
    if (status != COMPUTED) s->num_refused++;
    fetch->status = status;
    fetch->num_right = num_right;
    fetch->num_bytes = num_bytes;
    fetch->pool = atomic_load(s->pool);
    atomic_store_explicit(&fetch->answer, from->fetch, memory_order_release);
    cell_ring(from->cell);
}
