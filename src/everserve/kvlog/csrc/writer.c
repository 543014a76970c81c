/* The owner's side of a log: the rows of a step, commits, and KV that comes from other logs.

   A step:   es_log_begin -> es_log_meanwhile, as often as there is time -> es_log_finish
                         `-> (abandoned: the next es_log_begin forgets it)

   Streams that are followed (writer.py) have one row each in every step, and es_log_finish commits them too.

   Where the pool is the log itself, nothing is copied; checksums and words are the same. */

#define _GNU_SOURCE
#include "log.h"

struct commit { /* packed by writer.py */
    int64_t index;
    uint64_t key[2];
    int64_t num_tokens, num_blocks, num_known_blocks;
};

struct writer { /* writer.py: _Writer */
    struct log *log;
    char *pool;
    uint64_t last_seq;
    /* the step at hand */
    int64_t num_rows, num_seqs, num_layers_done;
    const int32_t *tokens, *slots; /* by row */
    const int32_t *query_starts;   /* by sequence, and one more */
    uint64_t *chains;              /* by sequence: before its rows, and after them once the step is finished */
    uint64_t *checksums;           /* by row, of the layers that are done */
    struct commit *followed;       /* by sequence: what its record says; NULL: none are followed */
};

static bool is_in_log(const struct writer *w) { return w->pool == blocks_of(w->log); }

/* 0, or -1 if these rows are not rows of this pool. The caller has filled the arrays. */
EXPORT int64_t es_log_begin(struct writer *w, int64_t num_rows, int64_t num_seqs) {
    const struct log *log = w->log;
    w->num_rows = w->num_layers_done = 0;
    if (!log->base || w->query_starts[0] != 0 || w->query_starts[num_seqs] != num_rows) return -1;
    for (int64_t s = 0; s < num_seqs; s++)
        if (w->query_starts[s] > w->query_starts[s + 1]) return -1;
    int64_t num_slots = log->num_blocks * log->block_size;
    for (int64_t r = 0; r < num_rows; r++) {
        if (w->slots[r] < 0 || w->slots[r] >= num_slots) return -1;
        w->checksums[r] = NO_CHECKSUM;
    }
    w->num_rows = num_rows;
    w->num_seqs = num_seqs;
    return 0;
}

/* The next token of each stream that is followed, and its slot. */
EXPORT int64_t es_log_begin_next(struct writer *w, const int32_t *tokens, const int32_t *slots) {
    memcpy((int32_t *)w->tokens, tokens, (size_t)w->num_seqs * sizeof *tokens);
    memcpy((int32_t *)w->slots, slots, (size_t)w->num_seqs * sizeof *slots);
    return w->followed ? es_log_begin(w, w->num_seqs, w->num_seqs) : -1;
}

/* How many rows from r on are consecutive slots of one block. */
static int64_t run_from(const struct writer *w, int64_t r) {
    int64_t num = 1, room = w->log->block_size - w->slots[r] % w->log->block_size;
    while (num < room && r + num < w->num_rows && w->slots[r + num] == w->slots[r] + num) num++;
    return num;
}

static void take_layer(struct writer *w, int64_t layer) {
    const struct log *log = w->log;
    for (int64_t r = 0, num; r < w->num_rows; r += num) {
        int64_t block = w->slots[r] / log->block_size, slot = w->slots[r] % log->block_size;
        const char *from = pieces_at(log, w->pool, block, layer, slot);
        num = run_from(w, r);
        if (!is_in_log(w)) copy_layer(log, pieces_at(log, blocks_of(log), block, layer, slot), from, num);
        sum_layer(log, w->checksums + r, from, layer, num);
    }
}

/* The rows' KV in all layers up to this one has been computed: take those that have not been taken yet. Called in the
   gaps in which the worker waits for others (backends/cpu/csrc/lanes/exchange.c), and without the interpreter's lock. */
EXPORT void es_log_meanwhile(struct writer *w, int64_t layer) {
    if (!w->log->base || !w->num_rows) return;
    int64_t end = layer < w->log->num_layers ? layer + 1 : w->log->num_layers;
    for (; w->num_layers_done < end; w->num_layers_done++) take_layer(w, w->num_layers_done);
}

static void write_copy(struct copy *copy, const struct found *what) {
    for (int i = 0; i < 2; i++) atomic_store_explicit(&copy->key[i], what->key[i], memory_order_relaxed);
    atomic_store_explicit(&copy->num_tokens, (uint64_t)what->num_tokens, memory_order_relaxed);
    atomic_store_explicit(&copy->num_blocks, (uint64_t)what->num_blocks, memory_order_relaxed);
    atomic_store_explicit(&copy->check, check_of(what), memory_order_relaxed);
    atomic_store_explicit(&copy->seq, what->seq, memory_order_release);
}

/* The copy of the record that counts is not touched. */
static void write_record(struct writer *w, const struct commit *c) {
    struct found old = {.blocks = NULL};
    struct found new = {.index = c->index, .seq = ++w->last_seq, .key = {c->key[0], c->key[1]},
                        .num_tokens = c->num_tokens, .num_blocks = c->num_blocks};
    write_copy(&record_of(w->log, c->index)->copies[newest_copy(w->log, c->index, &old) == 0], &new);
}

/* A stream that is followed has one more token, in this slot. */
static int64_t advance(struct writer *w, struct commit *c, int64_t slot) {
    const struct log *log = w->log;
    if (c->num_tokens == c->num_blocks * log->block_size) {
        if (c->num_blocks >= log->max_blocks) return -1;
        atomic_store_explicit(&list_of(log, c->index)[c->num_blocks++], (int32_t)(slot / log->block_size),
                              memory_order_relaxed);
    }
    c->num_tokens++;
    write_record(w, c);
    return 0;
}

/* Take what is left, write the words, and commit streams that are followed. 0, or -1 if the log is closed or a record
   has no room. */
EXPORT int64_t es_log_finish(struct writer *w) {
    const struct log *log = w->log;
    if (!log->base) return -1;
    es_log_meanwhile(w, log->num_layers - 1);
    atomic_thread_fence(memory_order_release); /* KV before words: a reader that sees a word usually finds it right */
    for (int64_t s = 0; w->num_rows && s < w->num_seqs; s++) {
        uint64_t chain = w->chains[s];
        for (int64_t r = w->query_starts[s]; r < w->query_starts[s + 1]; r++) {
            chain = chain_after(chain, w->tokens[r]);
            atomic_store_explicit(word_at(log, 0, w->slots[r]), word_of(w->checksums[r], chain), memory_order_relaxed);
        }
        w->chains[s] = chain;
    }
    int64_t error = 0;
    for (int64_t s = 0; w->followed && w->num_rows && s < w->num_seqs; s++)
        error |= advance(w, &w->followed[s], w->slots[w->query_starts[s]]);
    w->num_rows = 0;
    return error;
}

static bool is_possible(const struct log *log, const struct commit *c) {
    return c->index >= 0 && c->index < log->num_records && c->num_known_blocks >= 0 && c->num_blocks >= 0 &&
           c->num_blocks <= log->max_blocks && c->num_tokens >= 0 &&
           c->num_tokens <= c->num_blocks * log->block_size;
}

/* `blocks` are the new blocks of all commits, concatenated. 0, or -1 if a record or a block is none of the log's; of
   records nothing is written then. */
EXPORT int64_t es_log_commit(struct writer *w, const struct commit *commits, int64_t num_commits,
                             const int32_t *blocks) {
    const struct log *log = w->log;
    if (!log->base) return -1;
    for (int64_t i = 0; i < num_commits; i++)
        if (!is_possible(log, &commits[i])) return -1;
    for (int64_t i = 0; i < num_commits; i++) {
        const struct commit *c = &commits[i];
        for (int64_t b = c->num_known_blocks; b < c->num_blocks; b++, blocks++) {
            if (*blocks < 0 || *blocks >= log->num_blocks) return -1;
            atomic_store_explicit(&list_of(log, c->index)[b], *blocks, memory_order_relaxed);
        }
        write_record(w, c);
    }
    return 0;
}

/* The copy that counts goes last: otherwise the one before it, perhaps another stream's, would count again. */
EXPORT int64_t es_log_clear(struct writer *w, int64_t index) {
    const struct log *log = w->log;
    if (!log->base) return -1;
    struct found found = {.blocks = NULL};
    struct copy *copies = record_of(log, index)->copies;
    int64_t last = newest_copy(log, index, &found) == 1;
    atomic_store_explicit(&copies[!last].seq, 0, memory_order_release);
    atomic_store_explicit(&copies[last].seq, 0, memory_order_release);
    return 0;
}

static void copy_slots(const struct log *log, char *to, char *from, int64_t num_slots) {
    if (to == from) return;
    if (num_slots == log->block_size) {
        memcpy(to, from, (size_t)block_bytes(log));
        return;
    }
    for (int64_t layer = 0; layer < log->num_layers; layer++)
        copy_layer(log, to + layer * layer_bytes(log), from + layer * layer_bytes(log), num_slots);
}

/* The first slots of a block of some log into a block of the pool and of our log; returns how many are right. What is
   checked is what has arrived: the source may change while it is read. */
static int64_t copy_block(struct writer *w, const struct log *source, int64_t source_block, int64_t num_slots,
                          const uint64_t *chains, int64_t block) {
    const struct log *log = w->log;
    uint64_t words[MAX_BLOCK_SIZE];
    read_words(source, source_block, num_slots, words);
    char *arrived = pieces_at(log, w->pool, block, 0, 0);
    copy_slots(log, arrived, pieces_at(source, blocks_of(source), source_block, 0, 0), num_slots);
    atomic_signal_fence(memory_order_seq_cst); /* the compiler must not look at the source again */
    int64_t num_right = count_right(log, w->pool, block, num_slots, words, chains);
    if (!is_in_log(w)) copy_slots(log, pieces_at(log, blocks_of(log), block, 0, 0), arrived, num_right);
    atomic_thread_fence(memory_order_release);
    for (int64_t i = 0; i < num_right; i++)
        atomic_store_explicit(word_at(log, block, i), words[i], memory_order_relaxed);
    return num_right;
}

/* The leading tokens of a stream, block by block, up to the first one that is not right; returns how many are. */
EXPORT int64_t es_log_copy_in(struct writer *w, const struct log *source, const int32_t *source_blocks,
                              int64_t num_tokens, const uint64_t *chains, const int32_t *blocks) {
    int64_t num_right = 0, size = w->log->block_size;
    if (!w->log->base || !source->base) return -1;
    for (int64_t start = 0; start < num_tokens && num_right == start; start += size) {
        int64_t num_slots = num_tokens - start < size ? num_tokens - start : size;
        num_right += copy_block(w, source, *source_blocks++, num_slots, chains + start, *blocks++);
    }
    return num_right;
}
