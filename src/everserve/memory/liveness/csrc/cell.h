/* The cell of a worker: shared memory in which peers ring it, and see whether it lives and how far it has come.

   The anchor owns the memory; the worker (the owner) and its peers map it. One cell per incarnation, zero at first.

       line 0   doorbell, sleeping           rung by any peer; the owner sleeps here
       line 1   control                      counts the control messages sent to the owner
       line 2   position, progress, idle     written by the owner's main thread, for peers to look at
       line 3   pulse, lease_over, owner     written by the owner's warden thread
       then     life entries                 held by the owner's warden thread for as long as it lives

   Each line is written by different threads, so each has a cache line of its own. cell.py knows these offsets too.

   This file stands alone: other libraries include it to ring and to wait. */

#pragma once

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first include"
#endif

#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CELL_LINE 64
#define CELL_FOREVER INT64_MAX
#define NUM_LIFE_WORDS 260 /* four for each of 64 seats and one for orchestrators; a robust list has at most 2048 */

/* One entry of the owner's robust list: when the owner dies, however it dies, the kernel walks the list, sets
   FUTEX_OWNER_DIED in every word and wakes one waiter of each. Hence one word per watcher. */
struct life {
    _Atomic uint64_t next; /* an address in the owner's process; followed only there and by the kernel */
    _Atomic uint32_t word; /* 0, or the owner's thread id and FUTEX_WAITERS; FUTEX_OWNER_DIED once it is dead */
    uint32_t unused;
};

struct cell {
    _Alignas(CELL_LINE) _Atomic uint32_t doorbell; /* how often it was rung */
    _Atomic uint32_t sleeping;                     /* 1 while the owner blocks, or is about to block, on the doorbell */
    _Alignas(CELL_LINE) _Atomic uint32_t control;
    _Alignas(CELL_LINE) _Atomic int32_t position; /* the layer that is about to be sent; -1 between steps */
    _Atomic uint32_t progress;                    /* turns of the main loop */
    _Atomic uint32_t idle;                        /* 1 while the main thread blocks for work */
    _Alignas(CELL_LINE) _Atomic uint64_t pulse;   /* one more every period */
    _Atomic uint32_t lease_over;                  /* 1 while there is no pulse because the main thread is away */
    _Atomic uint32_t owner_pid, owner_tid;        /* whose pulse it is, for watchers on this host; 0: cannot be asked */
    _Atomic uint32_t letter;                      /* of a worker on another host: the state of its process; 0: not said */
    _Alignas(CELL_LINE) struct life life[NUM_LIFE_WORDS];
};

_Static_assert(sizeof(void *) == 8, "the kernel's list links are as wide as ours");
_Static_assert(sizeof(struct life) == 16, "cell.py knows the layout");
_Static_assert(offsetof(struct cell, life) == 4 * CELL_LINE, "cell.py knows the layout");
_Static_assert(sizeof(struct cell) == 4 * CELL_LINE + 16 * NUM_LIFE_WORDS, "cell.py knows the layout");

static inline int64_t cell_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Why no ring is lost. The ringer adds to `doorbell`, then reads `sleeping`; the owner sets `sleeping`, then reads
   `doorbell`. In the one order of all sequentially consistent operations either the ringer sees the owner asleep and
   wakes it, or the owner sees the ring and does not sleep. If the wake comes before the kernel has put the owner to
   sleep, the kernel finds `doorbell` changed and returns at once.
   `sleeping` is cleared only by the owner: a ringer that cleared it could be killed before it calls the kernel, and
   the rings of other peers would then not wake the owner. */
static inline void cell_ring(struct cell *cell) {
    atomic_fetch_add(&cell->doorbell, 1);
    if (atomic_load(&cell->sleeping)) syscall(SYS_futex, &cell->doorbell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Spin until the doorbell has moved on from `seen`, at most `budget_ns`. The process that is going to ring may be
   waiting for this core: that costs the budget, no more. (sched_yield would offer the core, but any busy process may take it,
   and then keeps it for milliseconds.) */
static inline void cell_spin(struct cell *cell, uint32_t seen, int64_t budget_ns) {
    int64_t start = cell_now_ns();
    for (unsigned turn = 1;; turn++) {
        if (atomic_load_explicit(&cell->doorbell, memory_order_acquire) != seen) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb"); /* `yield` is a no-op on most cores; isb waits a few cycles */
#endif
        if (turn % 16 == 0 && cell_now_ns() - start >= budget_ns) return;
    }
}

/* Owner, from one thread at a time: wait until the doorbell has moved on from `seen`, spinning for `spin_ns` before
   sleeping. Returns the doorbell as it is then. That may still be `seen`: after `timeout_ns` (zero or less: do not
   wait; CELL_FOREVER: no limit), and when a signal came, so that its handler can run.

       seen = doorbell; look for work; if there is none, cell_wait(seen): what came after the look has rung since. */
static inline uint32_t cell_wait(struct cell *cell, uint32_t seen, int64_t timeout_ns, int64_t spin_ns) {
    if (spin_ns > timeout_ns) spin_ns = timeout_ns;
    if (spin_ns > 0) {
        cell_spin(cell, seen, spin_ns);
        timeout_ns -= spin_ns;
    }
    if (timeout_ns > 0 && atomic_load(&cell->doorbell) == seen) {
        struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
        atomic_store(&cell->sleeping, 1);
        if (atomic_load(&cell->doorbell) == seen)
            syscall(SYS_futex, &cell->doorbell, FUTEX_WAIT, seen, &timeout, NULL, 0);
        atomic_store(&cell->sleeping, 0);
    }
    return atomic_load(&cell->doorbell);
}
