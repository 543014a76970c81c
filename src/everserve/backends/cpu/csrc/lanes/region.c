/* One range of addresses in which lanes come and go. All rows of all lanes are whole numbers of rows apart, so that one
   kernel call can work on several lanes at once. */

#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "lane.h"

static int64_t address_or_error(void *address) { return address == MAP_FAILED ? -errno : (int64_t)address; }

/* The address of `num_bytes` that cannot be read or written yet, or -errno. */
EXPORT int64_t es_region_reserve(int64_t num_bytes) {
    return address_or_error(
        mmap(NULL, (size_t)num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

/* Shared memory at this address of the region. */
EXPORT int64_t es_region_map(int64_t address, int64_t num_bytes, int64_t fd) {
    return address_or_error(
        mmap((void *)address, (size_t)num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)fd, 0));
}

/* Nothing there again; the range stays ours. */
EXPORT int64_t es_region_unmap(int64_t address, int64_t num_bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return address_or_error(mmap((void *)address, (size_t)num_bytes, PROT_NONE, flags, -1, 0));
}

EXPORT int64_t es_region_release(int64_t address, int64_t num_bytes) {
    return munmap((void *)address, (size_t)num_bytes) ? -errno : 0;
}
