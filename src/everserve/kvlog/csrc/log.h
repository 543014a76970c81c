/* A log in memory (layout.py has the picture), and the two things that are done with KV: copy it and sum it up.

   The writer may die between any two stores, and a reader may read while the writer writes. Whatever is read is
   therefore checked: a record by its own check, KV by its word. Nothing here relies on the order in which others see
   stores, but records come after what they count, so that in the ordinary case what they say is true. */

#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "hash.h"

#define EXPORT __attribute__((visibility("default")))
#define LINE 64
#define MAX_BLOCK_SIZE 1024 /* layout.py knows it too */

struct log { /* layout.py: Layout */
    int64_t num_blocks, block_size, num_layers, num_planes, piece_bytes, num_records, max_blocks;
    int64_t records_at, lists_at, words_at, blocks_at;
    char *base; /* NULL: closed */
};

/* One of the two copies of a record. All of it is words, loaded and stored one by one. */
struct copy {
    _Alignas(LINE) _Atomic uint64_t seq; /* stored last; 0: nothing here */
    _Atomic uint64_t key[2], num_tokens, num_blocks;
    _Atomic uint64_t check;
};

struct record {
    struct copy copies[2];
};

_Static_assert(sizeof(struct record) == 2 * LINE, "layout.py knows the layout");

/* What a reader gets to see of a record; log.py: _Found. */
struct found {
    int64_t index;
    uint64_t seq;
    uint64_t key[2];
    int64_t num_tokens, num_blocks;
    int32_t *blocks; /* room for max_blocks */
};

static inline struct record *record_of(const struct log *log, int64_t index) {
    return (struct record *)(log->base + log->records_at) + index;
}

static inline _Atomic int32_t *list_of(const struct log *log, int64_t index) {
    return (_Atomic int32_t *)(log->base + log->lists_at) + index * log->max_blocks;
}

static inline _Atomic uint64_t *word_at(const struct log *log, int64_t block, int64_t slot) {
    return (_Atomic uint64_t *)(log->base + log->words_at) + block * log->block_size + slot;
}

static inline char *blocks_of(const struct log *log) { return log->base + log->blocks_at; }

static inline int64_t plane_bytes(const struct log *log) { return log->block_size * log->piece_bytes; }

static inline int64_t layer_bytes(const struct log *log) { return log->num_planes * plane_bytes(log); }

static inline int64_t block_bytes(const struct log *log) { return log->num_layers * layer_bytes(log); }

/* Where the first piece of a slot in a layer is, in `blocks`: a log's or a pool's. */
static inline char *pieces_at(const struct log *log, char *blocks, int64_t block, int64_t layer, int64_t slot) {
    return blocks + block * block_bytes(log) + layer * layer_bytes(log) + slot * log->piece_bytes;
}

/* One layer of consecutive slots of a block. */
static inline void copy_layer(const struct log *log, char *to, const char *from, int64_t num_slots) {
    for (int64_t plane = 0; plane < log->num_planes; plane++)
        memcpy(to + plane * plane_bytes(log), from + plane * plane_bytes(log), (size_t)(num_slots * log->piece_bytes));
}

static inline void sum_layer(const struct log *log, uint64_t *checksums, const char *pieces, int64_t layer,
                             int64_t num_slots) {
    for (int64_t i = 0; i < num_slots; i++, pieces += log->piece_bytes)
        checksums[i] = add_layer(checksums[i], pieces, layer, log->num_planes, log->piece_bytes, plane_bytes(log));
}

/* log.c */
uint64_t check_of(const struct found *found);
int64_t newest_copy(const struct log *log, int64_t index, struct found *found);
int64_t count_right(const struct log *log, char *blocks, int64_t block, int64_t num_slots, const uint64_t *words,
                    const uint64_t *chains);
void read_words(const struct log *log, int64_t block, int64_t num_slots, uint64_t *words);
