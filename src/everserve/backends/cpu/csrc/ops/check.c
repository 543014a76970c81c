/* Is a batch consistent with itself and with the pool? Asked once per step: a wrong index would overwrite another
   request's keys. */

#include "kv_pool.h"
#include "threads.h"

struct check_batch_args {
    const int32_t *positions, *kv_slots, *query_starts, *block_tables;
    int64_t num_rows, num_sequences, table_width, num_blocks, block_size;
};

enum { BAD_QUERY_STARTS = -1, BAD_POSITION = -2, BAD_BLOCK = -3, BAD_KV_SLOT = -4 };

/* The highest position, or what is wrong. */
EXPORT int64_t es_check_batch(const struct check_batch_args *args) {
    const int32_t *starts = args->query_starts;
    int64_t highest = 0;
    if (starts[0] != 0 || starts[args->num_sequences] != args->num_rows) return BAD_QUERY_STARTS;
    for (int64_t s = 0; s < args->num_sequences; s++) {
        if (starts[s + 1] < starts[s]) return BAD_QUERY_STARTS;
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
            if (table[b] < 0 || table[b] >= args->num_blocks) return BAD_BLOCK;
        highest = before > highest ? before : highest;
    }
    return highest;
}
