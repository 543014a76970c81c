/* gemm(): choose a panel of the weights that fits the cache, and the kernel for its type. */

#include "gemm.h"

#define WEIGHT float
#define LOAD load_f32
#define NAME(x) x##_f32
#include "gemm.inc.h"

#define WEIGHT bf16
#define LOAD load_bf16
#define NAME(x) x##_bf16
#include "gemm.inc.h"

#define WEIGHT f16
#define LOAD load_f16
#define NAME(x) x##_f16
#include "gemm.inc.h"

#define PANEL_FLOATS 8192          /* 32 KiB: half of the first-level cache here, all of it on older x86 */
#define WIDENED_FLOATS 32768       /* of stack, for a panel of half precision weights widened once for many rows */
#define MIN_ROWS_TO_WIDEN (3 * MR) /* with fewer rows, widening in registers is cheaper */

static size_t panel_columns(size_t k) {
    size_t columns = k ? PANEL_FLOATS / k / NR * NR : NR;
    return columns < 2 * NR ? 2 * NR : columns;
}

void widen(const void *from, enum dtype dtype, size_t n, float *to) {
    size_t i = 0;
    switch (dtype) {
        case F32: memcpy(to, from, n * sizeof(float)); return;
        case BF16:
            for (; i + VW <= n; i += VW) store_f32(to + i, load_bf16((const bf16 *)from + i));
            break;
        case F16:
            for (; i + VW <= n; i += VW) store_f32(to + i, load_f16((const f16 *)from + i));
            break;
    }
    uint16_t tail[VW] = {0};
    memcpy(tail, (const uint16_t *)from + i, (n - i) * sizeof(uint16_t));
    vf widened = dtype == BF16 ? load_bf16(tail) : load_f16(tail);
    memcpy(to + i, &widened, (n - i) * sizeof(float));
}

static void gemm_widened(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c) {
    float widened[WIDENED_FLOATS];
    size_t columns = panel_columns(k);
    for (size_t j = 0; j < n; j += columns) {
        size_t count = smaller(n - j, columns);
        for (size_t r = 0; r < count; r++) widen(matrix_from(w, j + r).data, w.dtype, k, widened + r * k);
        struct rows out = columns_from(c, j);
        panel_f32(&a, m, widened, k, count, k, &out, widened);
    }
}

void gemm(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c) {
    if (w.dtype != F32 && m >= MIN_ROWS_TO_WIDEN && 2 * NR * k <= WIDENED_FLOATS) {
        gemm_widened(a, m, w, n, k, c);
        return;
    }
    const void *end = matrix_from(w, n).data;
    size_t columns = m <= MR ? n : panel_columns(k);
    for (size_t j = 0; j < n; j += columns) {
        size_t count = smaller(n - j, columns);
        const void *part = matrix_from(w, j).data;
        struct rows out = columns_from(c, j);
        switch (w.dtype) {
            case F32: panel_f32(&a, m, part, w.stride, count, k, &out, end); break;
            case BF16: panel_bf16(&a, m, part, w.stride, count, k, &out, end); break;
            case F16: panel_f16(&a, m, part, w.stride, count, k, &out, end); break;
        }
    }
}
