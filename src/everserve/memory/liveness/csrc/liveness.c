/* What Python calls: cells and wardens. A function that takes more than one of these gets a pointer to a struct of
   8-byte fields that Python has packed: so a call through ctypes takes half a microsecond rather than two. */

#define _GNU_SOURCE
#include "warden.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t es_cell_bytes(void) { return sizeof(struct cell); }

/* The address, or minus an error number. The mapping stays until es_cell_unmap: the warden thread goes on using it
   while the interpreter that shuts down has dropped every object. */
EXPORT int64_t es_cell_map(int64_t fd) {
    void *address = mmap(NULL, sizeof(struct cell), PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
    return address == MAP_FAILED ? -errno : (int64_t)(intptr_t)address;
}

EXPORT void es_cell_unmap(struct cell *cell) { munmap(cell, sizeof *cell); }

EXPORT uint32_t es_cell_doorbell(struct cell *cell) { return atomic_load(&cell->doorbell); }

EXPORT uint32_t es_cell_control(struct cell *cell) { return atomic_load(&cell->control); }

EXPORT void es_cell_ring(struct cell *cell) { cell_ring(cell); }

EXPORT void es_cell_ring_control(struct cell *cell) {
    atomic_fetch_add(&cell->control, 1);
    cell_ring(cell);
}

/* In the cell of a worker on another host, whose kernel has said that it is dead: what ours would do. */
EXPORT void es_cell_mark_dead(struct cell *cell) {
    for (size_t i = 0; i < NUM_LIFE_WORDS; i++) {
        atomic_fetch_or(&cell->life[i].word, FUTEX_OWNER_DIED);
        syscall(SYS_futex, &cell->life[i].word, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

struct wait_args {
    struct cell *cell;
    int64_t seen;
    double timeout_s;
    double spin_us;
};

EXPORT uint32_t es_cell_wait(const struct wait_args *args) {
    int64_t timeout_ns = args->timeout_s < 1e9 ? (int64_t)(args->timeout_s * 1e9) : CELL_FOREVER;
    return cell_wait(args->cell, (uint32_t)args->seen, timeout_ns, (int64_t)(args->spin_us * 1e3));
}

EXPORT int64_t es_has_waitv(void) { return warden_has_waitv(); }

struct warden_args {
    struct cell *cell;
    int64_t period_ns;
    int64_t event_fd;
    int64_t use_waitv;
};

/* Never freed: other C code may still hold the address of `alarm`. A process has one. */
EXPORT struct warden *es_warden_new(const struct warden_args *args) {
    struct warden *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->cell = args->cell;
    w->period_ns = args->period_ns;
    w->event_fd = (int)args->event_fd;
    w->use_waitv = args->use_waitv;
    w->lease_ns = CELL_FOREVER;
    w->version = 1;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->version_taken, NULL);
    return w;
}

EXPORT void *es_warden_alarm(struct warden *w) { return &w->alarm; }

/* Of two words: `lease_ns`, `num_renewals`. */
EXPORT void *es_warden_lease(struct warden *w) { return &w->lease_ns; }

EXPORT int64_t es_warden_uses_waitv(struct warden *w) { return w->use_waitv; }

EXPORT int64_t es_warden_holds_life_words(struct warden *w) { return w->holds_life_words; }

/* With the mutex held: the list of peers has changed. */
static void renew_version(struct warden *w) {
    w->version++;
    if (w->running) warden_poke(w);
}

/* With the mutex held: wait until the thread works with the list of peers as it is now. */
static void await_version(struct warden *w) {
    while (w->running && w->version_in_use != w->version) pthread_cond_wait(&w->version_taken, &w->mutex);
}

/* 0 or an error number. When it returns, the life words are taken and the pulse has begun. */
EXPORT int64_t es_warden_start(struct warden *w) {
    sigset_t all, before; /* signals are the business of the process's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, warden_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) return error;
    pthread_setname_np(w->thread, "warden");
    pthread_mutex_lock(&w->mutex);
    w->running = true;
    await_version(w);
    pthread_mutex_unlock(&w->mutex);
    return 0;
}

/* Orderly: the words are let go, so peers see silence, not death. */
EXPORT void es_warden_stop(struct warden *w) {
    if (!w->running) return;
    atomic_store(&w->stopping, true);
    warden_poke(w);
    pthread_join(w->thread, NULL);
    w->running = false;
}

static struct peer *find_peer(struct warden *w, int64_t key) {
    for (size_t i = 0; i < w->num_peers; i++)
        if (w->peers[i].key == key) return &w->peers[i];
    return NULL;
}

static void forget_changes(struct warden *w, int64_t key) {
    size_t num_kept = 0;
    for (size_t i = 0; i < w->num_changes; i++)
        if (w->changes[i].key != key) w->changes[num_kept++] = w->changes[i];
    w->num_changes = num_kept;
}

struct watch_args {
    struct warden *warden;
    int64_t key;
    struct cell *cell;
    int64_t life_word;
};

/* False if there are too many. The caller has seen to it that the key is new. */
EXPORT int64_t es_warden_watch(const struct watch_args *args) {
    struct warden *w = args->warden;
    pthread_mutex_lock(&w->mutex);
    bool fits = w->num_peers < MAX_PEERS;
    if (fits) {
        /* The first look may come at any moment and cannot count as a period: hence -1. */
        w->peers[w->num_peers++] = (struct peer){
            .key = args->key,
            .cell = args->cell,
            .life_word = &args->cell->life[args->life_word].word,
            .pulse = atomic_load(&args->cell->pulse),
            .num_still = -1,
            .state = ALIVE,
        };
        renew_version(w);
    }
    pthread_mutex_unlock(&w->mutex);
    return fits;
}

struct key_args {
    struct warden *warden;
    int64_t key;
};

/* When it returns, the thread does not touch that peer's cell, and nothing will be said about it any more. */
EXPORT void es_warden_unwatch(const struct key_args *args) {
    struct warden *w = args->warden;
    pthread_mutex_lock(&w->mutex);
    struct peer *peer = find_peer(w, args->key);
    if (peer) {
        *peer = w->peers[--w->num_peers];
        forget_changes(w, args->key);
        renew_version(w);
        await_version(w);
    }
    pthread_mutex_unlock(&w->mutex);
}

/* A state, or -1 for a key that is not watched. */
EXPORT int64_t es_warden_state(const struct key_args *args) {
    struct warden *w = args->warden;
    pthread_mutex_lock(&w->mutex);
    struct peer *peer = find_peer(w, args->key);
    int64_t state = peer ? peer->state : -1;
    pthread_mutex_unlock(&w->mutex);
    return state;
}

struct changes_args {
    struct warden *warden;
    struct change *changes; /* room for MAX_CHANGES */
};

EXPORT int64_t es_warden_changes(const struct changes_args *args) {
    struct warden *w = args->warden;
    pthread_mutex_lock(&w->mutex);
    int64_t num_changes = (int64_t)w->num_changes;
    memcpy(args->changes, w->changes, w->num_changes * sizeof *w->changes);
    w->num_changes = 0;
    pthread_mutex_unlock(&w->mutex);
    return num_changes;
}
