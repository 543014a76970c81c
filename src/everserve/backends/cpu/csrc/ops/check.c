/* check.h, for ops.py. */

#include "check.h"
#include "threads.h"

EXPORT int64_t es_check_batch(const struct check_batch_args *args) { return check_batch(args); }
