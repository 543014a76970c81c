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
#define NO_OWNER 0
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

/* Parity: beside pools of one shape, a pool whose pieces are *groups*. Each row of a group is the exclusive or of the rows
   of its members, which are heads of different workers, and its word that of their words. So any one member is that of all
   others, and its word says whether it is right: a parity that is torn, or older than one of its members, is not believed. */

struct parity { /* library.py: ParityAt */
    const struct pool *pool;
    const _Atomic int64_t *members; /* [home][group][max_members]: owners */
    int64_t max_members, blocks_per_home;
};

static const _Atomic int64_t *members_of(const struct parity *parity, int64_t block, int64_t group) {
    int64_t home = block / parity->blocks_per_home;
    return parity->members + (home * parity->pool->num_pieces + group) * parity->max_members;
}

static void add_bytes(char *to, const char *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i++) to[i] ^= from[i];
}

static void add_slots(const struct pool *pool, struct copy *to, const struct copy *from, int64_t num_slots) {
    add_bytes(to->keys, from->keys, num_slots * pool->row_bytes);
    add_bytes(to->keys + plane_bytes(pool), from->keys + plane_bytes(pool), num_slots * pool->row_bytes);
    for (int64_t slot = 0; slot < num_slots; slot++)
        atomic_store_explicit(&to->words[slot],
                              atomic_load_explicit(&to->words[slot], memory_order_relaxed) ^
                                  atomic_load_explicit(&from->words[slot], memory_order_relaxed),
                              memory_order_relaxed);
}

static void copy_from(const struct pool *pool, int64_t block, int64_t piece, int64_t first, int64_t num_slots,
                      struct copy *copy) {
    for (int64_t slot = 0; slot < num_slots; slot++)
        atomic_store_explicit(&copy->words[slot],
                              atomic_load_explicit(words_at(pool, block, piece) + first + slot, memory_order_acquire),
                              memory_order_relaxed);
    copy_slots(pool, copy->keys, keys_at(pool, block, piece, first), num_slots);
}

/* Copy some slots of a head from the source that has the most of them; how many leading ones are right. `pieces`: which
   the head has in each source, if that is known. */
static int64_t copy_best(const struct pool *const *sources, int64_t num_sources, const int64_t *pieces, int64_t owner,
                         int64_t block, int64_t first, const uint64_t *chains, int64_t num_slots, struct copy *copy) {
    int64_t best = 0, best_at = NO_PIECE, best_piece = NO_PIECE;
    for (int64_t s = 0; s < num_sources; s++) {
        int64_t piece = pieces ? pieces[s] : piece_of(sources[s], owner);
        if (piece == NO_PIECE || block >= sources[s]->num_blocks) continue;
        copy_from(sources[s], block, piece, first, num_slots, copy);
        int64_t found = count_right(sources[s], copy->keys, copy->words, owner, chains, num_slots);
        if (found == num_slots) return found;
        if (found > best) best = found, best_at = s, best_piece = piece;
    }
    if (best) copy_from(sources[best_at], block, best_piece, first, best, copy);
    return best;
}

/* Add all members of a group but one, which may be NO_OWNER; up to which slot all of them are right. `pieces`: [member]
   [source], if they are known. */
static int64_t add_members(const _Atomic int64_t *members, int64_t max_members, int64_t but,
                           const struct pool *const *sources, int64_t num_sources, const int64_t *pieces, int64_t block,
                           int64_t first, const uint64_t *chains, int64_t num_slots, struct copy *sum,
                           struct copy *copy) {
    for (int64_t m = 0; m < max_members && num_slots; m++) {
        int64_t owner = atomic_load_explicit(&members[m], memory_order_relaxed);
        if (owner == NO_OWNER || owner == but) continue;
        const int64_t *here = pieces ? pieces + m * num_sources : NULL;
        num_slots = copy_best(sources, num_sources, here, owner, block, first, chains, num_slots, copy);
        add_slots(sources[0], sum, copy, num_slots);
    }
    return num_slots;
}

static bool is_member(const _Atomic int64_t *members, int64_t max_members, int64_t owner) {
    for (int64_t m = 0; m < max_members; m++)
        if (atomic_load_explicit(&members[m], memory_order_relaxed) == owner) return true;
    return false;
}

/* Take over what all others of its group and their parity make of a block, if that is more than `num_right`. */
static int64_t rebuild(const struct pool *own, int64_t piece, int64_t to, const struct parity *const *parities,
                       int64_t num_parities, const struct pool *const *sources, int64_t num_sources, int64_t from,
                       const uint64_t *chains, int64_t num_slots, int64_t num_right, struct copy *sum,
                       struct copy *copy) {
    int64_t owner = owner_of(own, piece);
    for (int64_t i = 0; i < num_parities; i++) {
        const struct pool *pool = parities[i]->pool;
        for (int64_t group = 0; group < pool->num_pieces && from < pool->num_blocks; group++) {
            const _Atomic int64_t *members = members_of(parities[i], from, group);
            if (!is_member(members, parities[i]->max_members, owner)) continue;
            copy_from(pool, from, group, 0, num_slots, sum);
            int64_t found = add_members(members, parities[i]->max_members, owner, sources, num_sources, NULL, from, 0,
                                        chains, num_slots, sum, copy);
            found = count_right(own, sum->keys, sum->words, owner, chains, found);
            if (found <= num_right) continue;
            copy_slots(own, keys_at(own, to, piece, 0), sum->keys, found);
            for (int64_t slot = 0; slot < found; slot++)
                atomic_store_explicit(words_at(own, to, piece) + slot,
                                      atomic_load_explicit(&sum->words[slot], memory_order_relaxed),
                                      memory_order_release);
            num_right = found;
        }
    }
    return num_right;
}

static struct copy new_copy(const struct pool *pool) {
    size_t num_words = (size_t)pool->block_size;
    struct copy copy = {malloc((size_t)(2 * plane_bytes(pool))), malloc(num_words * sizeof(*copy.words))};
    if (!copy.keys || !copy.words) abort();
    return copy;
}

static void free_copy(struct copy copy) {
    free(copy.words);
    free(copy.keys);
}

static bool write_group(const struct parity *parity, int64_t group, const struct pool *const *sources,
                        int64_t num_sources, const int64_t *pieces, int64_t block, int64_t slot, uint64_t chain,
                        struct copy *sum, struct copy *copy) {
    const struct pool *pool = parity->pool;
    memset(sum->keys, 0, (size_t)(2 * plane_bytes(pool)));
    atomic_store_explicit(&sum->words[0], 0, memory_order_relaxed);
    if (!add_members(members_of(parity, block, group), parity->max_members, NO_OWNER, sources, num_sources, pieces, block,
                     slot, &chain, 1, sum, copy))
        return false;
    copy_slots(pool, keys_at(pool, block, group, slot), sum->keys, 1);
    uint64_t word = atomic_load_explicit(&sum->words[0], memory_order_relaxed);
    atomic_store_explicit(words_at(pool, block, group) + slot, word, memory_order_release);
    return true;
}

/* These rows, of one home, have these chains: write the parity of a group, from what the workers of its members have in the
   same blocks. `is_done`, by row: cleared where a member does not have it. */
static void write_rows(const struct parity *parity, int64_t group, const struct pool *const *sources,
                       int64_t num_sources, int64_t *pieces, const int32_t *kv_slots, const uint64_t *chains,
                       int64_t num_rows, uint8_t *is_done, struct copy *sum, struct copy *copy) {
    int64_t block_size = parity->pool->block_size;
    const _Atomic int64_t *members = members_of(parity, kv_slots[0] / block_size, group);
    if (atomic_load_explicit(&members[0], memory_order_relaxed) == NO_OWNER) return;
    for (int64_t m = 0; m < parity->max_members; m++)
        for (int64_t s = 0; s < num_sources; s++)
            pieces[m * num_sources + s] =
                piece_of(sources[s], atomic_load_explicit(&members[m], memory_order_relaxed));
    for (int64_t t = 0; t < num_rows; t++)
        is_done[t] &= write_group(parity, group, sources, num_sources, pieces, kv_slots[t] / block_size,
                                  kv_slots[t] % block_size, chains[t], sum, copy);
}

EXPORT void es_pieces_parity(const struct parity *parity, const struct pool *const *sources, int64_t num_sources,
                             const int32_t *kv_slots, const uint64_t *chains, int64_t num_rows, uint8_t *is_done) {
    struct copy sum = new_copy(parity->pool), copy = new_copy(parity->pool);
    int64_t *pieces = malloc((size_t)(parity->max_members * num_sources + 1) * sizeof(int64_t));
    if (!pieces) abort();
    memset(is_done, true, (size_t)num_rows);
    for (int64_t group = 0; group < parity->pool->num_pieces && num_rows; group++)
        write_rows(parity, group, sources, num_sources, pieces, kv_slots, chains, num_rows, is_done, &sum, &copy);
    free(pieces);
    free_copy(copy);
    free_copy(sum);
}

/* One block of one piece, from the first source that has all of it; how many leading slots are right then. */
static int64_t fetch_block(const struct pool *own, const struct pool *const *sources, const int64_t *source_pieces,
                           int64_t num_sources, int64_t piece, int64_t from, int64_t to, const uint64_t *chains,
                           int64_t num_slots, struct copy *copy, int64_t *num_copied) {
    int64_t num_right = 0;
    for (int64_t s = 0; s < num_sources && num_right < num_slots; s++) {
        if (source_pieces[s] == NO_PIECE || from >= sources[s]->num_blocks) continue;
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
   be in the blocks `from`; all pools have the same shape, but some may have more blocks. Sources are tried in order; one
   that is our own pool, with the same block, is looked at where it is. What no source has is rebuilt, if a parity covers
   it. Returns how many leading tokens are right in all pieces. `num_copied`: by piece, tokens that were copied. */
EXPORT int64_t es_pieces_fetch(const struct pool *own, const struct pool *const *sources, int64_t num_sources,
                               const struct parity *const *parities, int64_t num_parities, const int32_t *pieces,
                               int64_t num_pieces, const int32_t *from, const int32_t *to, int64_t num_tokens,
                               const uint64_t *chains, int64_t *num_copied) {
    struct copy copy = new_copy(own), sum = new_copy(own);
    int64_t *source_pieces = malloc((size_t)(num_sources + 1) * sizeof(int64_t)), num_right = num_tokens;
    if (!source_pieces) abort();
    for (int64_t p = 0; p < num_pieces; p++) {
        int64_t owner = owner_of(own, pieces[p]), reached = 0;
        num_copied[p] = 0;
        for (int64_t s = 0; s < num_sources; s++)
            source_pieces[s] = owner != NO_OWNER ? piece_of(sources[s], owner) : NO_PIECE;
        for (int64_t b = 0; b * own->block_size < num_right; b++) {
            int64_t first = b * own->block_size, left = num_right - first;
            int64_t num_slots = left < own->block_size ? left : own->block_size;
            int64_t found = fetch_block(own, sources, source_pieces, num_sources, pieces[p], from[b], to[b],
                                        chains + first, num_slots, &copy, &num_copied[p]);
            if (found < num_slots && owner != NO_OWNER) {
                int64_t rebuilt = rebuild(own, pieces[p], to[b], parities, num_parities, sources, num_sources, from[b],
                                          chains + first, num_slots, found, &sum, &copy);
                if (rebuilt > found) num_copied[p] += rebuilt;
                found = rebuilt;
            }
            reached = first + found;
            if (found < num_slots) break;
        }
        num_right = reached;
        if (!num_right) break;
    }
    free(source_pieces);
    free_copy(sum);
    free_copy(copy);
    return num_pieces ? num_right : num_tokens;
}
