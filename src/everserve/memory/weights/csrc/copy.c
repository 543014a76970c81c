/* Copy and sum weights in one pass (checksum.py has the definition), without holding up what else runs.

   After each chunk the thread yields its core, and rests for a share of the time that the chunk took. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK_BYTES (16 << 10)  /* summed while it is in the first-level cache */
#define CHUNK_BYTES (256 << 10) /* between two yields: some ten microseconds */

#define LANES 8

/* By additions only, because vectors have no 64-bit product: lane j takes the words j, j + LANES, j + 2 LANES, ...

       sums[j]     sum of w[r]                 w[r]: word r LANES + j, r = 0 .. n - 1
       running[j]  sum of (n - r) w[r]         so the sum of r w[r] is n sums[j] - running[j] */
static uint64_t sum_block(const char *at, int64_t num_bytes, uint64_t first_word) {
    uint64_t sums[LANES] = {0}, running[LANES] = {0}, words[LANES], sum = 0;
    int64_t n = num_bytes / (8 * LANES);
    for (int64_t r = 0; r < n; r++) {
        memcpy(words, at + r * 8 * LANES, sizeof words);
        for (int j = 0; j < LANES; j++) sums[j] += words[j];
        for (int j = 0; j < LANES; j++) running[j] += sums[j];
    }
    for (int j = 0; j < LANES; j++)
        sum += sums[j] * (2 * (first_word + (uint64_t)j) + 1) + 2 * LANES * ((uint64_t)n * sums[j] - running[j]);
    for (int64_t i = n * 8 * LANES; i < num_bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, at + i, (size_t)(num_bytes - i < 8 ? num_bytes - i : 8));
        sum += word * (2 * (first_word + (uint64_t)i / 8) + 1);
    }
    return sum;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void rest(int64_t rest_ns) {
    sched_yield();
    if (rest_ns > 0) {
        struct timespec time = {rest_ns / 1000000000, rest_ns % 1000000000};
        nanosleep(&time, NULL);
    }
}

/* The sum of what is at `to` afterwards. `from` NULL: only sum. `first_word`: of these bytes in their expert; they
   begin at a multiple of 8 bytes of it. `rest_percent`: of the time of each chunk. */
EXPORT uint64_t es_weights_copy(
    char *to, const char *from, int64_t num_bytes, uint64_t first_word, int64_t rest_percent) {
    uint64_t sum = 0;
    for (int64_t chunk = 0; chunk < num_bytes; chunk += CHUNK_BYTES) {
        int64_t end = chunk + CHUNK_BYTES < num_bytes ? chunk + CHUNK_BYTES : num_bytes, began = now_ns();
        for (int64_t i = chunk; i < end; i += BLOCK_BYTES) {
            int64_t size = end - i < BLOCK_BYTES ? end - i : BLOCK_BYTES;
            if (from) memcpy(to + i, from + i, (size_t)size);
            sum += sum_block(to + i, size, first_word + (uint64_t)i / 8);
        }
        if (end < num_bytes) rest((now_ns() - began) * rest_percent / 100);
    }
    return sum;
}
