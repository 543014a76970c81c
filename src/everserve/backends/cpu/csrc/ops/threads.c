/* A small pool of threads, instead of OpenMP, for three reasons:

   - How long an idle thread spins decides everything when processes outnumber cores, and must be set at run time.
     libgomp fixes it when it is loaded, and torch has loaded it before us.
   - The caller never waits for a thread that has not started: it takes tasks itself until none is left, then waits only
     for the tasks in flight. A helper that gets no core costs little; an OpenMP region would wait for it.
   - Workers are forked from a zygote. No thread is started before the first job that wants one, and the child of a fork
     starts its own.

   A job is published as one 64-bit ticket:

       |  number of the job  (32 bits)  |  next task, or CLOSED  (32 bits)  |

   A thread reads the ticket, then the job's fields, then claims the task by a compare-and-swap of the ticket. The
   fields change only while the ticket is CLOSED, and no ticket value comes back, so if the swap succeeds the fields
   belong to it. All atomics are sequentially consistent: there are a few per task of microseconds. */

#define _GNU_SOURCE
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define MIN_MACS 100e3 /* of a job worth sharing: about 10 microseconds, as much as waking a sleeping helper */
#define CLOSED UINT32_MAX

static struct {
    _Atomic uint64_t ticket;
    _Atomic uint32_t num_done;      /* tasks reported as done; what the caller waits for */
    _Atomic uint32_t caller_sleeps; /* on num_done */
    _Atomic uint32_t job_number;    /* what helpers wait for */
    _Atomic uint32_t num_sleepers;  /* helpers asleep on job_number */
    _Atomic(task_fn) fn;
    _Atomic(void *) job;
    _Atomic uint32_t num_tasks;
} pool = {.ticket = CLOSED};

static pthread_mutex_t pool_in_use = PTHREAD_MUTEX_INITIALIZER;
static size_t num_helpers; /* started so far; guarded by pool_in_use */
static _Atomic int num_threads = 1;
static _Atomic int64_t spin_ns = 0;

static void futex_wait(_Atomic uint32_t *word, uint32_t while_equal) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, while_equal, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` is a no-op on most cores; isb waits a few cycles */
#endif
}

/* Spin until *word != value, at most spin_ns. True if it changed. The thread that changes it may need this very core:
   yield every microsecond or so. */
static bool spin_until_changed(_Atomic uint32_t *word, uint32_t value) {
    int64_t budget = atomic_load_explicit(&spin_ns, memory_order_relaxed), start = 0;
    if (budget <= 0) return atomic_load(word) != value;
    for (unsigned turn = 0;; turn++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
        relax();
        if (turn % 64 == 63) {
            sched_yield();
            int64_t now = now_ns();
            if (!start) start = now;
            else if (now - start > budget) return false;
        }
    }
}

/* Take tasks of the current job until none is left, then report how many. Until the report the job cannot end. */
static void take_tasks(void) {
    uint32_t num_taken = 0;
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        task_fn fn = atomic_load(&pool.fn);
        void *job = atomic_load(&pool.job);
        uint32_t task = (uint32_t)ticket;
        if (task >= atomic_load(&pool.num_tasks)) break;
        if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) continue;
        fn(job, task);
        num_taken++;
    }
    if (num_taken) {
        atomic_fetch_add(&pool.num_done, num_taken);
        if (atomic_load(&pool.caller_sleeps)) futex_wake(&pool.num_done, 1);
    }
}

static void *helper_main(void *argument) {
    int index = (int)(intptr_t)argument; /* 1, 2, ...; the caller is 0 */
    for (;;) {
        uint32_t seen = atomic_load(&pool.job_number);
        if (index < atomic_load(&num_threads)) take_tasks();
        if (spin_until_changed(&pool.job_number, seen)) continue;
        atomic_fetch_add(&pool.num_sleepers, 1);
        futex_wait(&pool.job_number, seen);
        atomic_fetch_sub(&pool.num_sleepers, 1);
    }
    return NULL;
}

/* A fork copies the pool but not its threads. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool_in_use, NULL);
    num_helpers = 0;
    pool.ticket = (uint64_t)pool.job_number << 32 | CLOSED;
    pool.num_sleepers = 0;
    pool.caller_sleeps = 0;
}

static void start_helpers(size_t wanted) {
    static bool registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    sigset_t all, before; /* signals are the business of the process's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (num_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper_main, (void *)(intptr_t)(num_helpers + 1))) break; /* fewer will do */
        pthread_detach(thread);
        num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void share(size_t num_tasks, task_fn fn, void *job) {
    atomic_store(&pool.ticket, (uint64_t)atomic_load(&pool.job_number) << 32 | CLOSED);
    atomic_store(&pool.fn, fn);
    atomic_store(&pool.job, job);
    atomic_store(&pool.num_tasks, (uint32_t)num_tasks);
    atomic_store(&pool.num_done, 0);
    uint32_t number = atomic_load(&pool.job_number) + 1;
    atomic_store(&pool.ticket, (uint64_t)number << 32);
    atomic_store(&pool.job_number, number);
    uint32_t sleepers = atomic_load(&pool.num_sleepers);
    if (sleepers) futex_wake(&pool.job_number, (int)(sleepers < num_tasks - 1 ? sleepers : num_tasks - 1));

    take_tasks();
    uint32_t done;
    while ((done = atomic_load(&pool.num_done)) != num_tasks) {
        if (spin_until_changed(&pool.num_done, done)) continue;
        atomic_store(&pool.caller_sleeps, 1);
        futex_wait(&pool.num_done, done);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

void parallel_for(size_t num_tasks, double macs, task_fn fn, void *job) {
    size_t threads = max_threads();
    bool worth_sharing = threads > 1 && num_tasks > 1 && num_tasks < CLOSED && macs >= MIN_MACS;
    if (!worth_sharing || pthread_mutex_trylock(&pool_in_use)) { /* the pool serves one caller at a time */
        for (size_t task = 0; task < num_tasks; task++) fn(job, task);
        return;
    }
    if (num_helpers < threads - 1) start_helpers(threads - 1);
    share(num_tasks, fn, job);
    pthread_mutex_unlock(&pool_in_use);
}

size_t max_threads(void) { return (size_t)atomic_load_explicit(&num_threads, memory_order_relaxed); }

size_t task_size(size_t total, size_t num_groups, size_t least) {
    size_t wanted = max_threads() > 1 ? 4 * max_threads() : 1; /* tasks in all: some threads are slower than others */
    if (!num_groups) num_groups = 1; /* nothing to do is divided too */
    size_t per_group = (wanted + num_groups - 1) / num_groups;
    size_t size = (total + per_group - 1) / per_group;
    size = (size + least - 1) / least * least;
    return size ? size : least;
}

struct set_threads_args {
    int64_t num_threads;
    double spin_us;
};

EXPORT void es_set_threads(const struct set_threads_args *args) {
    atomic_store(&num_threads, (int)(args->num_threads < MAX_THREADS ? args->num_threads : MAX_THREADS));
    atomic_store(&spin_ns, (int64_t)(args->spin_us * 1e3));
}
