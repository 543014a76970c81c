/* State shared by the warden's thread (warden.c) and the functions called from Python (liveness.c). */

#pragma once

#include "cell.h"

#include <pthread.h>
#include <stdbool.h>

#define MAX_PEERS 120 /* futex_waitv takes 128 words */
#define MAX_CHANGES 1024

enum { ALIVE, SILENT, DIED }; /* PeerState in warden.py */

struct peer {
    int64_t key;
    struct cell *cell;
    _Atomic uint32_t *life_word; /* in that cell */
    uint32_t life;               /* the life word and */
    uint64_t pulse;              /* the pulse as seen last */
    int num_still;               /* consecutive timely looks that found the same pulse */
    int state;
};

struct change {
    int64_t key;
    int64_t state;
};

/* As in linux/futex.h since 5.16. */
struct waiter {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

struct warden {
    _Atomic uint32_t alarm;   /* one more at every change of a peer's state; other C code reads it too */
    /* The main thread's lease: how long it is, and how often it was renewed. warden.py writes both. */
    _Atomic int64_t lease_ns;
    _Atomic uint64_t num_renewals;
    struct cell *cell;        /* its own, or NULL */
    int64_t period_ns;
    int event_fd; /* or -1 */
    _Atomic bool use_waitv;
    bool holds_life_words;
    pthread_t thread;
    bool running;
    _Atomic bool stopping;
    _Atomic uint32_t wake; /* what the thread sleeps on, besides the peers' life words */

    /* The thread holds the mutex while it reads the cells of peers and gathers the words to wait on, and lets go of
       it while it waits. `version` changes with the list of peers; `version_in_use` follows when the thread has
       gathered again, and from then on it does not touch what is no longer in the list. */
    pthread_mutex_t mutex;
    pthread_cond_t version_taken;
    uint64_t version, version_in_use;
    size_t num_peers;
    struct peer peers[MAX_PEERS];
    size_t num_changes;
    struct change changes[MAX_CHANGES];

    /* The thread's own. */
    struct robust_list_head robust;
    int64_t last_look_ns, next_look_ns;
    uint64_t renewals_seen;
    int64_t lease_used_ns; /* since the lease was renewed, as far as it counts */
    size_t num_waiters;
    struct waiter waiters[1 + MAX_PEERS];
};

/* What the thread runs, until `stopping` is set and it is poked. */
void *warden_main(void *warden);

/* Whether the kernel lets us wait for several words at once. */
bool warden_has_waitv(void);

/* Make the thread look again, at once. */
void warden_poke(struct warden *w);
