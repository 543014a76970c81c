/* Is a batch consistent with itself and with the pool? Asked once per step, by the process that owns the pool: a wrong index would
   overwrite another request's keys. */

#pragma once

#include <stdint.h>

struct check_batch_args {
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    int64_t num_rows, num_sequences, table_width, first_block, num_blocks, block_size;
};

enum { BAD_QUERY_STARTS = -1, BAD_POSITION = -2, BAD_BLOCK = -3, BAD_KV_SLOT = -4 };

/* The highest position, or what is wrong. Blocks must be among the `num_blocks` from `first_block` on. */
static inline int64_t check_batch(const struct check_batch_args *args) {
    const int32_t *starts = args->query_starts;
    int64_t highest = 0, end = args->first_block + args->num_blocks;
    if (starts[0] != 0 || starts[args->num_sequences] != args->num_rows) return BAD_QUERY_STARTS;
    for (int64_t s = 0; s < args->num_sequences; s++) /* all of them, before one is used */
        if (starts[s + 1] < starts[s]) return BAD_QUERY_STARTS;
    for (int64_t s = 0; s < args->num_sequences; s++) {
        const int32_t *table = args->block_tables + s * args->table_width;
        int64_t before = -1;
        for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
            int64_t position = args->positions[t], entry = position / args->block_size;
            if (position <= before || entry >= args->table_width) return BAD_POSITION;
            int64_t kv_slot = table[entry] * args->block_size + position % args->block_size;
            if (args->kv_slots[t] != kv_slot) return BAD_KV_SLOT;
            before = position;
        }
        for (int64_t b = 0; b <= before / args->block_size && before >= 0; b++)
            if (table[b] < args->first_block || table[b] >= end) return BAD_BLOCK;
        highest = before > highest ? before : highest;
    }
    return highest;
}
