/* A lane: the memory between one attention worker and one expert worker, owned by neither (lane.py has the picture).

       header                       written by the attention worker before its first request
       page                         where the rows of the step at hand belong; only where heads are asked for
       fetch                        KV that the expert worker shall have; only where heads are asked for
       box 0, box 1                 each: words, token_R, slot_R, x_TD, y_RD

   One-sided writes, then a sequence word. The attention worker fills a box and stores its sequence number in `request`
   (release); the expert worker, having seen it (acquire), reads x and writes y where they lie, and stores the same
   number in `answer` (release). Sequence numbers of a lane only grow, and an answer counts only if it is exactly the
   number asked for: any other number in that word, from a late or faulty peer, is no answer.

   A row's word names a slot *and* the expert that the sender expects in it. Slots are refilled while streams
   run, so the sender's routes may be out of date: a row for an expert that has left that slot is not computed.
   The whole request is answered MOVED then, with IS_MOVED set in the words of such rows.

   The page is written once per step, before the first request that names its number. It says for all rows of the step
   what attention needs to know: positions, KV slots, where sequences begin, block tables, and the chains that the words
   of KV are made of. Its number is 0 while it is being written. A request whose page is not the one in the lane is not computed: its step was abandoned, and its KV slots
   may belong to others by now.

   A *fetch* is a request of its own kind, with its own words: these tokens of a stream shall be in these blocks of the
   expert worker's pool, for these heads. The answer says how many of them are (memory/pieces/sources.py). Nothing of a
   step may be under way when a fetch is sent: the page's number becomes 0, so that requests of a step that was abandoned
   do not write to blocks that KV is fetched into.

   A process that reads from a lane copies sizes and indices into its own memory first and checks the copies. Its peer
   may die, or be stopped, at any instruction. */

#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "cell.h"

#define EXPORT __attribute__((visibility("default")))

#define LANE_MAGIC INT64_C(0x656e616c2d7365)
#define NUM_BOXES 2
#define MAX_RANKS 64

/* Where things are, in bytes; computed in lane.py. x and y begin at whole numbers of rows from the lane's beginning. */
struct layout {
    int64_t max_tokens, top_k, hidden_size;
    int64_t first_box, box_bytes;                /* from the beginning of the lane */
    int64_t tokens_at, slots_at, x_at, y_at;     /* from the beginning of the box */
    int64_t y_floats;                            /* room for answers */
    int64_t page_at, page_words;                 /* words: int32, behind struct page */
    int64_t fetch_at, fetch_heads, fetch_blocks, fetch_tokens; /* room for so many */
};

struct lane_header {
    int64_t magic, max_tokens, top_k, hidden_size;
    int64_t attention_rank, attention_incarnation, expert_rank, expert_incarnation; /* for debugging */
    _Alignas(CELL_LINE) int64_t y_floats;
    int64_t page_words;
};

/* Why a request was not computed; 0: it was. seam/outcomes.py: Status. */
enum { COMPUTED = 0, BAD_REQUEST = 2, NO_SUCH_SLOT = 3, MOVED = 4, NO_PAGE = 5, POOL_CHANGED = 6 };

/* A row's word: the slot in the low bits, the expert above it, IS_MOVED in an answer. lane.py has the same numbers. */
#define SLOT_BITS 16
#define IS_MOVED INT32_MIN

static inline int32_t row_word(int32_t slot, int32_t expert) { return slot | expert << SLOT_BITS; }
static inline int32_t slot_in(int32_t word) { return word & ((1 << SLOT_BITS) - 1); }
static inline int32_t expert_in(int32_t word) { return word >> SLOT_BITS; }

struct box {
    /* The attention worker's line. */
    _Alignas(CELL_LINE) _Atomic uint64_t request;
    int64_t epoch; /* of the routes that it was sent by; for debugging */
    int32_t call, num_tokens, num_rows, replay;
    uint64_t page; /* the step's, where heads are asked for */
    /* The expert worker's line. */
    _Alignas(CELL_LINE) _Atomic uint64_t answer;
    int64_t status;
    int64_t pool; /* the identity of the KV pool that the answer was computed with */
};

/* Behind it: positions[num_rows], kv_slots[num_rows], query_starts[num_sequences + 1], block_tables of num_sequences times
   table_width, and chains[num_rows], two words each. */
struct page {
    _Alignas(CELL_LINE) _Atomic uint64_t number;
    int64_t pool; /* the KV pool that the streams were computed with; 0: there is no KV yet, any pool will do */
    int64_t num_rows, num_sequences, table_width;
};

/* Behind it: chains[num_tokens], then calls[num_heads], row words of the heads, as in a box, [num_heads], and the blocks
   that tokens are in [num_blocks], and those that they shall be in [num_blocks]. */
struct fetch {
    /* The attention worker's line. */
    _Alignas(CELL_LINE) _Atomic uint64_t request;
    int64_t num_heads, num_blocks, num_tokens;
    /* The expert worker's line. */
    _Alignas(CELL_LINE) _Atomic uint64_t answer;
    int64_t status, num_right, num_bytes;
    int64_t pool; /* the identity of the KV pool */
};

_Static_assert(sizeof(struct fetch) == 2 * CELL_LINE, "lane.py knows the layout");
_Static_assert(sizeof(struct box) == 2 * CELL_LINE, "lane.py knows the layout");
_Static_assert(sizeof(struct lane_header) == 2 * CELL_LINE, "lane.py knows the layout");
_Static_assert(sizeof(struct page) == CELL_LINE, "lane.py knows the layout");

static inline struct page *page_of(const struct layout *layout, char *lane) {
    return (struct page *)(lane + layout->page_at);
}
static inline int32_t *words_of(struct page *page) { return (int32_t *)(page + 1); }

/* Where chains begin among the words of a page: at a whole number of them. */
static inline int64_t chains_at(int64_t num_rows, int64_t num_sequences, int64_t table_width) {
    return (2 * num_rows + num_sequences + 1 + num_sequences * table_width + 1) / 2 * 2;
}

static inline struct fetch *fetch_of(const struct layout *layout, char *lane) {
    return (struct fetch *)(lane + layout->fetch_at);
}

static inline struct box *box_of(const struct layout *layout, char *lane, int64_t box) {
    return (struct box *)(lane + layout->first_box + box * layout->box_bytes);
}
static inline int32_t *tokens_of(const struct layout *layout, struct box *box) {
    return (int32_t *)((char *)box + layout->tokens_at);
}
static inline int32_t *slots_of(const struct layout *layout, struct box *box) {
    return (int32_t *)((char *)box + layout->slots_at);
}
static inline float *x_of(const struct layout *layout, struct box *box) {
    return (float *)((char *)box + layout->x_at);
}
static inline float *y_of(const struct layout *layout, struct box *box) {
    return (float *)((char *)box + layout->y_at);
}
