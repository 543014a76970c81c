/* Tasks 0..n-1 over a few threads. */

#pragma once

#include <stddef.h>

/* Called from ops.py, always with one pointer to a struct of 8-byte fields that Python has packed: so a call through
   ctypes takes half a microsecond rather than two. */
#define EXPORT __attribute__((visibility("default")))

typedef void (*task_fn)(void *job, size_t task);

/* Run fn(job, 0) .. fn(job, num_tasks - 1), each once, in any order, and return when all are done. `macs` is about how
   many multiply-adds that is: small jobs stay on the calling thread. */
void parallel_for(size_t num_tasks, double macs, task_fn fn, void *job);

/* How many of `total` columns or rows one task should have, where there are `num_groups` such totals: enough tasks for
   balance over the threads, each a multiple of `least`. */
size_t task_size(size_t total, size_t num_groups, size_t least);

/* How many threads may take part in a job. */
size_t max_threads(void);
