/* The hashes of the log: fast ones. They tell accidents, of which a 64-bit hash misses one in 2^64; they are no
   cryptography.

       checksum   of one token's KV bytes: layers in ascending order, planes in ascending order. Folding in one layer
                  after the other as they are computed, or all at once, gives the same.
       chain      of a stream's token ids
       word       of both: what stands beside a token's KV */

#pragma once

#include <stdint.h>
#include <string.h>

#define HASH_ODD UINT64_C(0x9fb21c651e98df25)

static inline uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

/* A bijection in which every bit of x matters to every bit of the result (the finalizer of splitmix64). */
static inline uint64_t scramble(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline uint64_t chain_after(uint64_t chain, int32_t token) {
    return scramble(chain ^ ((uint64_t)(uint32_t)token + 1) * HASH_ODD);
}

/* One word into one lane. The rotation brings down what is in the high bits, for the next multiplication. The word comes
   in a second time, elsewhere: otherwise a flipped high bit, which a multiplication leaves alone, would be taken back by
   one flipped bit of the next word. */
static inline uint64_t hash_word(uint64_t lane, uint64_t word) {
    return rotate((lane ^ word) * HASH_ODD, 32) ^ rotate(word, 41);
}

static inline uint64_t load_word(const char *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

#define NO_CHECKSUM UINT64_C(0x2545f4914f6cdd1d) /* before the first layer */

/* Fold one token's pieces in one layer into its checksum. Four lanes, because multiplications take their time but
   several can be under way. */
static inline uint64_t add_layer(uint64_t checksum, const char *piece, int64_t num_planes, int64_t piece_bytes,
                                 int64_t plane_bytes) {
    uint64_t a = checksum, b = rotate(checksum, 16), c = rotate(checksum, 32), d = rotate(checksum, 48);
    for (int64_t plane = 0; plane < num_planes; plane++, piece += plane_bytes) {
        int64_t i = 0;
        for (; i + 32 <= piece_bytes; i += 32) {
            a = hash_word(a, load_word(piece + i));
            b = hash_word(b, load_word(piece + i + 8));
            c = hash_word(c, load_word(piece + i + 16));
            d = hash_word(d, load_word(piece + i + 24));
        }
        for (; i + 8 <= piece_bytes; i += 8) a = hash_word(a, load_word(piece + i));
        if (i < piece_bytes) {
            uint32_t half;
            memcpy(&half, piece + i, sizeof half);
            b = hash_word(b, half);
        }
    }
    return scramble(a + rotate(b, 13) + rotate(c, 29) + rotate(d, 47));
}

/* Never 0: that is a slot without anything. */
static inline uint64_t word_of(uint64_t checksum, uint64_t chain) {
    uint64_t word = scramble(checksum ^ scramble(chain));
    return word ? word : 1;
}
