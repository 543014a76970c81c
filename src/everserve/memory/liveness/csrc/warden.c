/* The warden: one thread per process that shows its peers that the process lives, and watches theirs.

   The kernel reports death. The warden thread owns the life words of its cell through its robust list. When the
   process ends, by SIGKILL or by returning from main, the kernel sets FUTEX_OWNER_DIED in each word and wakes the
   thread that waits on it, long before it tears down memory and closes sockets.

   A pulse that stands still means silence. The thread advances it every period while the main thread's lease holds. A
   process that is stopped, or has a stuck main thread, falls silent and may come back.

   Judging a peer, at every look (one per period, and one whenever the thread is woken):

                      pulse still for NUM_STILL_LOOKS timely looks,
                   or NUM_STARVED_LOOKS while its thread is not stopped
               ALIVE ------------------------------------------> SILENT
                 |   <------------------------------------------    |
                 |                  pulse moves                     |
                 +------------------->  DIED  <---------------------+
                          FUTEX_OWNER_DIED, and that is final

   A thread that only waits for a core is not silent: on a busy host that may take longer than the detection of a stop,
   and a peer without its shadows is worse than one that is late. So when a pulse stands still the kernel is asked for
   the state of the thread that should have advanced it. Only this host's kernel knows it: a cell without an owner is
   judged by its pulse alone.

   The main thread's lease is counted in the same way: time between two looks counts up to two periods. Where the host
   leaves this process little CPU time its warden looks late, and the lease is longer in the same proportion.

   A look is timely if it comes at most two periods after the one before. If the watcher itself was held up, it cannot
   tell whether its peers were too, and counts afresh. */

#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

#define NUM_STILL_LOOKS 5
#define NUM_STARVED_LOOKS (10 * NUM_STILL_LOOKS)
#define POLL_NS 1000000 /* between looks at the life words, where we cannot wait for several at once */

enum { WAITER_32_BITS = 2, WAITER_PRIVATE = 128 }; /* flags of futex_waitv */

/* Life words. At every instant, a word that names this thread is on its robust list: it is linked before it is taken
   and let go before it is unlinked. So wherever the process is killed, the kernel marks every word that names it. A word
   on the list that does not name the thread is passed over by the kernel. */

static void take_life_words(struct warden *w) {
    struct life *life = w->cell->life;
    for (size_t i = 0; i < NUM_LIFE_WORDS; i++) {
        atomic_store(&life[i].word, 0);
        atomic_store(&life[i].next, (uint64_t)(uintptr_t)(i + 1 < NUM_LIFE_WORDS ? (void *)&life[i + 1] : &w->robust));
    }
    mlock(w->cell, sizeof *w->cell); /* the kernel may not be able to bring a page back for a dying process */
    w->robust.futex_offset = offsetof(struct life, word);
    w->robust.list.next = (struct robust_list *)life;
    /* This takes the place of libc's own list for this thread, which locks no robust mutex. */
    if (syscall(SYS_set_robust_list, &w->robust, sizeof w->robust)) return;
    uint32_t word = (uint32_t)syscall(SYS_gettid) | FUTEX_WAITERS; /* there may always be one: the kernel shall wake */
    for (size_t i = 0; i < NUM_LIFE_WORDS; i++) atomic_store(&life[i].word, word);
    w->holds_life_words = true;
}

static void release_life_words(struct warden *w) {
    if (!w->holds_life_words) return;
    for (size_t i = 0; i < NUM_LIFE_WORDS; i++) atomic_store(&w->cell->life[i].word, 0);
    atomic_signal_fence(memory_order_seq_cst); /* against the compiler: the kernel looks at this thread's own view */
    w->robust.list.next = &w->robust.list;
    w->holds_life_words = false;
}

/* The state of a thread as ps shows it; 0 if it cannot be read. */
static char state_of(uint32_t pid, uint32_t tid) {
    char path[64], text[128];
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length < 0 ? 0 : length] = 0;
    const char *name_end = strrchr(text, ')'); /* a name may contain anything, but it is short */
    return name_end && name_end[1] == ' ' ? name_end[2] : 0;
}

/* Whether the thread that should pulse is runnable, or sleeps beyond its time because its processor is away (a virtual
   one may be). A thread that is stopped (T, t), in the kernel for long (D) or without its main thread's lease is not
   waiting for a core. */
static bool may_be_starved(struct cell *cell) {
    uint32_t pid = atomic_load(&cell->owner_pid), tid = atomic_load(&cell->owner_tid);
    if (!pid || atomic_load(&cell->lease_over)) return false;
    char state = state_of(pid, tid);
    return state == 'R' || state == 'S';
}

/* Looking. All with the mutex held. */

static int judge(struct peer *peer, bool at_pulse, bool timely) {
    peer->life = atomic_load(peer->life_word);
    if (peer->life & FUTEX_OWNER_DIED) return DIED;
    if (!at_pulse) return peer->state;
    uint64_t pulse = atomic_load(&peer->cell->pulse);
    if (pulse != peer->pulse) {
        peer->pulse = pulse;
        peer->num_still = 0;
        return ALIVE;
    }
    if (!timely) peer->num_still = 0;
    else if (peer->num_still < NUM_STARVED_LOOKS) peer->num_still++;
    if (peer->num_still < NUM_STILL_LOOKS || peer->state == SILENT) return peer->state;
    return peer->num_still < NUM_STARVED_LOOKS && may_be_starved(peer->cell) ? ALIVE : SILENT;
}

/* Keep only the last change of each peer: never more than there are peers. */
static void compact_changes(struct warden *w) {
    size_t num_kept = 0;
    for (size_t i = 0; i < w->num_changes; i++) {
        bool is_last = true;
        for (size_t j = i + 1; j < w->num_changes; j++) is_last &= w->changes[j].key != w->changes[i].key;
        if (is_last) w->changes[num_kept++] = w->changes[i];
    }
    w->num_changes = num_kept;
}

/* True if the state of any peer changed. */
static bool look_at_peers(struct warden *w, bool at_pulse, bool timely) {
    bool changed = false;
    for (size_t i = 0; i < w->num_peers; i++) {
        struct peer *peer = &w->peers[i];
        int state = peer->state == DIED ? DIED : judge(peer, at_pulse, timely);
        if (state == peer->state) continue;
        peer->state = state;
        if (w->num_changes == MAX_CHANGES) compact_changes(w);
        w->changes[w->num_changes++] = (struct change){peer->key, state};
        changed = true;
    }
    if (changed) atomic_fetch_add(&w->alarm, 1);
    return changed;
}

/* The words to wait on, with the values as judged: if one has changed since, waiting ends at once. */
static void gather_waiters(struct warden *w, uint32_t wake) {
    w->waiters[0] = (struct waiter){wake, (uint64_t)(uintptr_t)&w->wake, WAITER_32_BITS | WAITER_PRIVATE, 0};
    w->num_waiters = 1;
    for (struct peer *peer = w->peers; peer < w->peers + w->num_peers; peer++) {
        if (peer->state == DIED) continue;
        uint64_t address = (uint64_t)(uintptr_t)peer->life_word;
        w->waiters[w->num_waiters++] = (struct waiter){peer->life, address, WAITER_32_BITS, 0};
    }
    if (w->version_in_use != w->version) {
        w->version_in_use = w->version;
        pthread_cond_broadcast(&w->version_taken);
    }
}

/* Whether the main thread's lease holds, `passed_ns` after the last look at the pulse. */
static bool has_lease(struct warden *w, int64_t passed_ns) {
    uint64_t num_renewals = atomic_load(&w->num_renewals);
    if (num_renewals != w->renewals_seen) {
        w->renewals_seen = num_renewals;
        w->lease_used_ns = 0;
    } else {
        w->lease_used_ns += passed_ns < 2 * w->period_ns ? passed_ns : 2 * w->period_ns;
    }
    return w->lease_used_ns < atomic_load(&w->lease_ns);
}

static void look(struct warden *w, uint32_t wake) {
    int64_t now = cell_now_ns();
    bool at_pulse = now >= w->next_look_ns, timely = now - w->last_look_ns <= 2 * w->period_ns;
    if (at_pulse) {
        if (w->cell) {
            bool holds = has_lease(w, now - w->last_look_ns);
            atomic_store(&w->cell->lease_over, !holds);
            if (holds) atomic_fetch_add(&w->cell->pulse, 1);
        }
        w->last_look_ns = now;
        w->next_look_ns = now + w->period_ns;
    }
    pthread_mutex_lock(&w->mutex);
    bool changed = look_at_peers(w, at_pulse, timely);
    gather_waiters(w, wake);
    pthread_mutex_unlock(&w->mutex);
    if (!changed) return;
    if (w->cell) cell_ring(w->cell);
    if (w->event_fd >= 0) {
        uint64_t one = 1;
        ssize_t ignored = write(w->event_fd, &one, sizeof one); /* full: it is readable already */
        (void)ignored;
    }
}

/* Until the next look is due, a peer dies, or warden_poke() is called. */
static void rest(struct warden *w) {
    if (w->use_waitv) {
        struct timespec until = {w->next_look_ns / 1000000000, w->next_look_ns % 1000000000};
        long result = syscall(SYS_futex_waitv, w->waiters, w->num_waiters, 0, &until, CLOCK_MONOTONIC);
        bool slept = result >= 0 || errno == ETIMEDOUT || errno == EAGAIN || errno == EINTR;
        if (!slept) w->use_waitv = false; /* forbidden since we asked: rather poll than spin */
    } else {
        int64_t left = w->next_look_ns - cell_now_ns();
        if (w->num_waiters > 1 && left > POLL_NS) left = POLL_NS;
        if (left <= 0) return;
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        syscall(SYS_futex, &w->wake, FUTEX_WAIT_PRIVATE, w->waiters[0].value, &timeout, NULL, 0);
    }
}

void warden_poke(struct warden *w) {
    atomic_fetch_add(&w->wake, 1);
    syscall(SYS_futex, &w->wake, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

bool warden_has_waitv(void) {
    return syscall(SYS_futex_waitv, NULL, 0, 0, NULL, CLOCK_MONOTONIC) == -1 && errno == EINVAL;
}

void *warden_main(void *argument) {
    struct warden *w = argument;
    if (w->cell) {
        take_life_words(w);
        atomic_store(&w->cell->owner_tid, (uint32_t)syscall(SYS_gettid));
        atomic_store(&w->cell->owner_pid, (uint32_t)getpid());
    }
    for (;;) {
        uint32_t wake = atomic_load(&w->wake); /* before anything that a poke is about */
        if (atomic_load(&w->stopping)) break;
        look(w, wake);
        rest(w);
    }
    if (w->cell) atomic_store(&w->cell->owner_pid, 0);
    release_life_words(w);
    return NULL;
}
