/* The hashes of the log: fast ones. They tell accidents, of which a 64-bit hash misses one in 2^64; they are no
   cryptography.

       checksum   of one token's KV bytes: a sum over its words, each mixed with its number. So layers may come in any
                  order, and many threads of a device may add to it at once (backends/cuda/log does so)
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

static inline uint64_t load_word(const char *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

#define NO_CHECKSUM UINT64_C(0) /* of no layers */

/* A bijection, so that one changed word always changes the sum. The first fold brings down what is in the high bits, which
   a multiplication leaves alone; the rotations come after the multiplication, because what is linear at the end would
   let a flipped bit in one word be taken back by one in another. */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 32) * UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ rotate(x, 25) ^ rotate(x, 47);
}

/* Add one token's pieces in one layer to its checksum. Words are numbered through all layers and planes; where a piece
   is no whole number of words, zeros are behind it. */
static inline uint64_t add_layer(uint64_t checksum, const char *piece, int64_t layer, int64_t num_planes,
                                 int64_t piece_bytes, int64_t plane_bytes) {
    int64_t num_whole = piece_bytes / 8, num_words = (piece_bytes + 7) / 8;
    uint64_t key = ((uint64_t)(layer * num_planes * num_words) + 1) * HASH_ODD;
    for (int64_t plane = 0; plane < num_planes; plane++, piece += plane_bytes) {
        for (int64_t i = 0; i < num_whole; i++)
            checksum += mixed(load_word(piece + 8 * i) ^ (key + (uint64_t)i * HASH_ODD));
        if (num_whole < num_words) {
            uint32_t half;
            memcpy(&half, piece + 8 * num_whole, sizeof half);
            checksum += mixed(half ^ (key + (uint64_t)num_whole * HASH_ODD));
        }
        key += (uint64_t)num_words * HASH_ODD;
    }
    return checksum;
}

/* Never 0: that is a slot without anything. */
static inline uint64_t word_of(uint64_t checksum, uint64_t chain) {
    uint64_t word = scramble(checksum ^ scramble(chain));
    return word ? word : 1;
}
