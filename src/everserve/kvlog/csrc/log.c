/* Reading a log: this process's own, or that of another process, which may be writing or dead. */

#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "log.h"

#define MAX_TRIES 4 /* at a record that its writer replaces faster than we read */

/* The address, or minus an error number. */
EXPORT int64_t es_log_map(int64_t fd, int64_t num_bytes) {
    void *address = mmap(NULL, (size_t)num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
    return address == MAP_FAILED ? -errno : (int64_t)(intptr_t)address;
}

EXPORT int64_t es_log_unmap(char *base, int64_t num_bytes) { return munmap(base, (size_t)num_bytes) ? -errno : 0; }

/* The index is part of it, so that a record counts only where it was written. */
uint64_t check_of(const struct found *found) {
    uint64_t check = scramble((uint64_t)found->index ^ HASH_ODD);
    check = scramble(check ^ found->seq);
    check = scramble(check ^ found->key[0]);
    check = scramble(check ^ found->key[1]);
    check = scramble(check ^ (uint64_t)found->num_tokens);
    return scramble(check ^ (uint64_t)found->num_blocks);
}

static bool is_whole(const struct log *log, struct copy *copy, struct found *found) {
    found->seq = atomic_load_explicit(&copy->seq, memory_order_acquire);
    if (!found->seq) return false;
    for (int i = 0; i < 2; i++) found->key[i] = atomic_load_explicit(&copy->key[i], memory_order_relaxed);
    found->num_tokens = (int64_t)atomic_load_explicit(&copy->num_tokens, memory_order_relaxed);
    found->num_blocks = (int64_t)atomic_load_explicit(&copy->num_blocks, memory_order_relaxed);
    if (atomic_load_explicit(&copy->check, memory_order_relaxed) != check_of(found)) return false;
    return found->num_blocks >= 0 && found->num_blocks <= log->max_blocks && found->num_tokens >= 0 &&
           found->num_tokens <= found->num_blocks * log->block_size;
}

static bool is_empty(struct record *record) {
    return !atomic_load(&record->copies[0].seq) && !atomic_load(&record->copies[1].seq);
}

/* Which copy of a record counts, 0 or 1, and what it says; -1 if there is none. The caller has set found->blocks. */
int64_t newest_copy(const struct log *log, int64_t index, struct found *found) {
    struct record *record = record_of(log, index);
    for (int tries = 0; tries < MAX_TRIES && !is_empty(record); tries++) {
        struct found copies[2] = {{.index = index, .blocks = found->blocks}, {.index = index, .blocks = found->blocks}};
        bool whole[2] = {is_whole(log, &record->copies[0], &copies[0]), is_whole(log, &record->copies[1], &copies[1])};
        if (!whole[0] && !whole[1]) continue;
        int64_t newest = !whole[0] || (whole[1] && copies[1].seq > copies[0].seq);
        *found = copies[newest];
        return newest;
    }
    return -1;
}

/* The record's blocks, as far as these are numbers of blocks: lists are not covered by a check, KV is by its words. */
static void read_list(const struct log *log, struct found *found) {
    _Atomic int32_t *list = list_of(log, found->index);
    for (int64_t i = 0; i < found->num_blocks; i++) {
        int32_t block = atomic_load_explicit(&list[i], memory_order_relaxed);
        if (block < 0 || block >= log->num_blocks) found->num_blocks = i;
        else found->blocks[i] = block;
    }
    int64_t room = found->num_blocks * log->block_size;
    if (found->num_tokens > room) found->num_tokens = room;
}

/* 1 if there is a record at this index. */
EXPORT int64_t es_log_read(const struct log *log, int64_t index, struct found *found) {
    if (newest_copy(log, index, found) < 0) return 0;
    read_list(log, found);
    return 1;
}

static bool has_key(struct record *record, const uint64_t *key) {
    for (int i = 0; i < 2; i++) {
        struct copy *copy = &record->copies[i];
        if (atomic_load_explicit(&copy->key[0], memory_order_relaxed) == key[0] &&
            atomic_load_explicit(&copy->key[1], memory_order_relaxed) == key[1])
            return true;
    }
    return false;
}

/* 1 if there is a record of this stream; the newest if there are several. */
EXPORT int64_t es_log_find(const struct log *log, const char *packed_key, struct found *found) {
    uint64_t key[2];
    memcpy(key, packed_key, sizeof key);
    struct found best = {.seq = 0}, candidate = {.blocks = found->blocks};
    for (int64_t index = 0; index < log->num_records; index++) {
        if (!has_key(record_of(log, index), key) || newest_copy(log, index, &candidate) < 0) continue;
        bool is_ours = candidate.key[0] == key[0] && candidate.key[1] == key[1];
        if (is_ours && candidate.seq > best.seq) best = candidate;
    }
    if (!best.seq) return 0;
    *found = best;
    read_list(log, found);
    return 1;
}

EXPORT uint64_t es_log_last_seq(const struct log *log) {
    uint64_t last = 0;
    struct found found = {.blocks = NULL};
    for (int64_t index = 0; index < log->num_records; index++)
        if (newest_copy(log, index, &found) >= 0 && found.seq > last) last = found.seq;
    return last;
}

void read_words(const struct log *log, int64_t block, int64_t num_slots, uint64_t *words) {
    for (int64_t i = 0; i < num_slots; i++)
        words[i] = atomic_load_explicit(word_at(log, block, i), memory_order_relaxed);
}

/* How many leading slots of a block, in a log or in a pool of the same layout, hold what these words and chains say. */
int64_t count_right(const struct log *log, char *blocks, int64_t block, int64_t num_slots, const uint64_t *words,
                    const uint64_t *chains) {
    uint64_t checksums[MAX_BLOCK_SIZE];
    int64_t num_right = 0;
    for (int64_t i = 0; i < num_slots; i++) checksums[i] = NO_CHECKSUM;
    for (int64_t layer = 0; layer < log->num_layers; layer++)
        sum_layer(log, checksums, pieces_at(log, blocks, block, layer, 0), layer, num_slots);
    while (num_right < num_slots && words[num_right] == word_of(checksums[num_right], chains[num_right])) num_right++;
    return num_right;
}

/* How many leading tokens of a stream, with these chains, are intact in these blocks, where they lie. */
EXPORT int64_t es_log_count_intact(const struct log *log, const int32_t *blocks, int64_t num_tokens,
                                   const uint64_t *chains) {
    uint64_t words[MAX_BLOCK_SIZE];
    int64_t num_right = 0;
    for (int64_t start = 0; start < num_tokens && num_right == start; start += log->block_size, blocks++) {
        int64_t num_slots = num_tokens - start < log->block_size ? num_tokens - start : log->block_size;
        read_words(log, *blocks, num_slots, words);
        num_right += count_right(log, blocks_of(log), *blocks, num_slots, words, chains + start);
    }
    return num_right;
}

EXPORT uint64_t es_log_chains(const int32_t *tokens, int64_t num_tokens, uint64_t before, uint64_t *chains) {
    for (int64_t i = 0; i < num_tokens; i++) chains[i] = before = chain_after(before, tokens[i]);
    return before;
}

/* Of the rows of a step, by sequence: `chains` has the chain before each sequence's first row, and gets the one after its
   last; `by_row` gets all of them. */
EXPORT void es_log_chains_of_rows(const int32_t *tokens, const int32_t *query_starts, int64_t num_seqs,
                                  uint64_t *chains, uint64_t *by_row) {
    for (int64_t s = 0; s < num_seqs; s++) {
        int64_t first = query_starts[s], end = query_starts[s + 1];
        chains[s] = es_log_chains(tokens + first, end - first, chains[s], by_row + first);
    }
}
