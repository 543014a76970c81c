/* The KV of some heads, in memory that certifies itself (memory/kv_pieces.py has the picture).

   Beside the keys and values of each token in each piece stands a word, made of a checksum of their bytes, of the (layer,
   head) that the piece belongs to, and of the token's chain. A process that knows the chains of a stream can tell which of its
   tokens are right, wherever they lie, and whatever else has been written there since.

   Memory of other processes is read while they write. So nothing is believed where it lies there: it is copied first, and
   the copy is checked. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"

#define EXPORT __attribute__((visibility("default")))
#define NOBODY 0
#define NO_PIECE (-1)

struct pool { /* library.py: PoolAt */
    char *blocks;                  /* [block][piece][keys, values][block_size][row_bytes] */
    _Atomic uint64_t *words;       /* [block][piece][block_size] */
    const _Atomic int64_t *owners; /* by piece: which (layer, head) */
    int64_t num_blocks, num_pieces, block_size, row_bytes;
};

static int64_t plane_bytes(const struct pool *pool) { return pool->block_size * pool->row_bytes; }

static char *keys_at(const struct pool *pool, int64_t block, int64_t piece, int64_t slot) {
    return pool->blocks + (block * pool->num_pieces + piece) * 2 * plane_bytes(pool) + slot * pool->row_bytes;
}

static _Atomic uint64_t *words_at(const struct pool *pool, int64_t block, int64_t piece) {
    return pool->words + (block * pool->num_pieces + piece) * pool->block_size;
}

/* `keys`: of one token; its values are a plane behind them. */
static uint64_t word_for(const struct pool *pool, const char *keys, int64_t owner, uint64_t chain) {
    return word_of(add_layer(NO_CHECKSUM, keys, owner, 2, pool->row_bytes, plane_bytes(pool)), chain);
}

static int64_t owner_of(const struct pool *pool, int64_t piece) {
    return atomic_load_explicit(&pool->owners[piece], memory_order_relaxed);
}

/* The keys and values of these rows are stored in all of these pieces: write their words. */
EXPORT void es_pieces_sign(const struct pool *pool, const int32_t *kv_slots, const uint64_t *chains, int64_t num_rows,
                           const int32_t *pieces, int64_t num_pieces) {
    for (int64_t p = 0; p < num_pieces; p++) {
        int64_t owner = owner_of(pool, pieces[p]);
        for (int64_t t = 0; t < num_rows; t++) {
            int64_t block = kv_slots[t] / pool->block_size, slot = kv_slots[t] % pool->block_size;
            uint64_t word = word_for(pool, keys_at(pool, block, pieces[p], slot), owner, chains[t]);
            atomic_store_explicit(words_at(pool, block, pieces[p]) + slot, word, memory_order_release);
        }
    }
}

static void copy_slots(const struct pool *pool, char *to, const char *from, int64_t num_slots) {
    memcpy(to, from, (size_t)(num_slots * pool->row_bytes));
    memcpy(to + plane_bytes(pool), from + plane_bytes(pool), (size_t)(num_slots * pool->row_bytes));
}

/* These rows of these pieces, with their words, into a pool of the same shape. */
EXPORT void es_pieces_mirror(const struct pool *from, const struct pool *to, const int32_t *kv_slots, int64_t num_rows,
                             const int32_t *pieces, int64_t num_pieces) {
    for (int64_t t = 0; t < num_rows; t++) {
        int64_t block = kv_slots[t] / from->block_size, slot = kv_slots[t] % from->block_size;
        for (int64_t p = 0; p < num_pieces; p++) {
            int64_t piece = pieces[p];
            copy_slots(from, keys_at(to, block, piece, slot), keys_at(from, block, piece, slot), 1);
            uint64_t word = atomic_load_explicit(words_at(from, block, piece) + slot, memory_order_relaxed);
            atomic_store_explicit(words_at(to, block, piece) + slot, word, memory_order_release);
        }
    }
}

static int64_t piece_of(const struct pool *pool, int64_t owner) {
    for (int64_t piece = 0; piece < pool->num_pieces; piece++)
        if (owner_of(pool, piece) == owner) return piece;
    return NO_PIECE;
}

/* How many leading slots are right. `words` are copies, or where they stand. */
static int64_t count_right(const struct pool *pool, const char *keys, const _Atomic uint64_t *words, int64_t owner,
                           const uint64_t *chains, int64_t num_slots) {
    int64_t slot = 0;
    while (slot < num_slots && atomic_load_explicit(&words[slot], memory_order_relaxed) ==
                                   word_for(pool, keys + slot * pool->row_bytes, owner, chains[slot]))
        slot++;
    return slot;
}

struct copy { /* of one block in one piece */
    char *keys;
    _Atomic uint64_t *words;
};

/* Copy what a source has of a block, and take over what is right of it, if that is more than `num_right`. */
static int64_t take(const struct pool *own, int64_t piece, int64_t to, const struct pool *source, int64_t source_piece,
                    int64_t from, const uint64_t *chains, int64_t num_slots, int64_t num_right, struct copy *copy) {
    for (int64_t slot = 0; slot < num_slots; slot++)
        atomic_store_explicit(&copy->words[slot],
                              atomic_load_explicit(words_at(source, from, source_piece) + slot, memory_order_acquire),
                              memory_order_relaxed);
    copy_slots(own, copy->keys, keys_at(source, from, source_piece, 0), num_slots);
    int64_t found = count_right(own, copy->keys, copy->words, owner_of(own, piece), chains, num_slots);
    if (found <= num_right) return num_right;
    copy_slots(own, keys_at(own, to, piece, 0), copy->keys, found);
    for (int64_t slot = 0; slot < found; slot++)
        atomic_store_explicit(words_at(own, to, piece) + slot,
                              atomic_load_explicit(&copy->words[slot], memory_order_relaxed), memory_order_release);
    return found;
}

/* One block of one piece, from the first source that has all of it; how many leading slots are right then. */
static int64_t fetch_block(const struct pool *own, const struct pool *const *sources, const int64_t *source_pieces,
                           int64_t num_sources, int64_t piece, int64_t from, int64_t to, const uint64_t *chains,
                           int64_t num_slots, struct copy *copy, int64_t *num_copied) {
    int64_t num_right = 0;
    for (int64_t s = 0; s < num_sources && num_right < num_slots; s++) {
        if (source_pieces[s] == NO_PIECE) continue;
        if (sources[s] == own && from == to) {
            int64_t owner = owner_of(own, piece);
            num_right = count_right(own, keys_at(own, to, piece, 0), words_at(own, to, piece), owner, chains, num_slots);
            continue;
        }
        int64_t found = take(own, piece, to, sources[s], source_pieces[s], from, chains, num_slots, num_right, copy);
        if (found > num_right) *num_copied += found;
        num_right = found;
    }
    return num_right;
}

/* Have the first tokens of a stream, which has these chains, in the blocks `to` of our own pool. In each source they would
   be in the blocks `from`; all pools have the same shape. Sources are tried in order; one that is our own pool, with the
   same block, is looked at where it is. Returns how many leading tokens are right in all pieces. `num_copied`: by piece,
   tokens that were copied. */
EXPORT int64_t es_pieces_fetch(const struct pool *own, const struct pool *const *sources, int64_t num_sources,
                               const int32_t *pieces, int64_t num_pieces, const int32_t *from, const int32_t *to,
                               int64_t num_tokens, const uint64_t *chains, int64_t *num_copied) {
    size_t num_words = (size_t)own->block_size;
    struct copy copy = {malloc((size_t)(2 * plane_bytes(own))), malloc(num_words * sizeof(*copy.words))};
    int64_t *source_pieces = malloc((size_t)(num_sources + 1) * sizeof(int64_t)), num_right = num_tokens;
    if (!copy.keys || !copy.words || !source_pieces) abort();
    for (int64_t p = 0; p < num_pieces; p++) {
        int64_t owner = owner_of(own, pieces[p]), reached = 0;
        num_copied[p] = 0;
        for (int64_t s = 0; s < num_sources; s++)
            source_pieces[s] = owner != NOBODY ? piece_of(sources[s], owner) : NO_PIECE;
        for (int64_t b = 0; b * own->block_size < num_right; b++) {
            int64_t first = b * own->block_size, left = num_right - first;
            int64_t num_slots = left < own->block_size ? left : own->block_size;
            int64_t found = fetch_block(own, sources, source_pieces, num_sources, pieces[p], from[b], to[b],
                                        chains + first, num_slots, &copy, &num_copied[p]);
            reached = first + found;
            if (found < num_slots) break;
        }
        num_right = reached;
        if (!num_right) break;
    }
    free(source_pieces);
    free(copy.words);
    free(copy.keys);
    return num_pieces ? num_right : num_tokens;
}
