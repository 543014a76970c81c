/* Waiting for a device, which cannot ring a doorbell: it stores a number in host memory. */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <time.h>

#include "cell.h"

#define EXPORT __attribute__((visibility("default")))

enum { ARRIVED = 0, ATTEND = 1, TIMEOUT = 2 }; /* seam/outcomes.py has the same numbers */

/* What is due is awaited without sleep from a little earlier on, and for a little longer. */
enum { SPIN_NS = 300000 };

/* Until *word reaches `want`, the alarm or the control word changes, or time is up. Between two looks the thread sleeps
   for nap_ns, because processes may outnumber cores, but not when the word is due, at due_ns of the monotonic clock.
   `own` and `alarm` may be NULL: then they are not watched. */
EXPORT int64_t es_device_wait(const _Atomic int64_t *word, int64_t want, const struct cell *own, uint32_t control_seen,
                              const _Atomic uint32_t *alarm, uint32_t alarm_seen, int64_t timeout_ns, int64_t nap_ns,
                              int64_t due_ns) {
    struct timespec nap = {0, nap_ns};
    int64_t deadline = cell_now_ns() + timeout_ns;
    for (;;) {
        if (atomic_load_explicit(word, memory_order_acquire) >= want) return ARRIVED;
        if (own && atomic_load(&own->control) != control_seen) return ATTEND;
        if (alarm && atomic_load(alarm) != alarm_seen) return ATTEND;
        int64_t now = cell_now_ns();
        if (now >= deadline) return TIMEOUT;
        if (nap_ns && (now < due_ns - SPIN_NS || now > due_ns + SPIN_NS)) nanosleep(&nap, NULL);
    }
}
