/* gemm(): choose a panel of the weights that fits the cache, and the kernel for its type. */

#include "gemm.h"

#include <stdbool.h>

#include "ahead.h"
#include "gemm_quantised.h"

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
#define MIN_COLUMNS 8              /* of a panel, for each of which the rows of a come from the second-level cache */
#define WIDENED_FLOATS 32768       /* of stack, for a panel of half precision weights widened once for many rows */
#define DECODED_FLOATS 131072      /* of stack, of which a product touches what it needs */

static size_t panel_columns(size_t k) {
    size_t columns = k ? PANEL_FLOATS / k / NR * NR : NR;
    return columns < MIN_COLUMNS ? MIN_COLUMNS : columns;
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

/* While columns before `first` are computed with, those from there on are fetched, in so many passes. */
static struct ahead fetch(struct matrix w, size_t first, size_t n, size_t num_passes) {
    if (w.dtype == QUANTISED) {
        const struct quantised *q = w.data;
        const char *codes = (const char *)q->codes + w.first * (size_t)q->stride;
        size_t bits = q->kind == INT4 || q->kind == E2M1 ? 4 : 8, stride = (size_t)q->stride;
        return (struct ahead){codes + first * stride, codes + n * stride, stride / num_passes,
                              NR * SUM_WIDTH * bits / 8 / num_passes};
    }
    size_t element = w.dtype == F32 ? 4 : 2;
    return (struct ahead){matrix_from(w, first).data, matrix_from(w, n).data, w.stride * element / num_passes,
                          NR * SUM_WIDTH * element / num_passes};
}

static void widen_row(struct matrix w, size_t row, size_t k, float *to) {
    if (w.dtype == QUANTISED) widen_quantised(w.data, w.first + row, k, to);
    else widen(matrix_from(w, row).data, (enum dtype)w.dtype, k, to);
}

/* With so many columns at once, in this memory. */
static void gemm_with(float *widened, size_t columns, struct rows a, size_t m, struct matrix w, size_t n, size_t k,
                      struct rows c) {
    for (size_t j = 0; j < n; j += columns) {
        size_t count = smaller(n - j, columns);
        for (size_t r = 0; r < count; r++) widen_row(w, j + r, k, widened + r * k);
        struct rows out = columns_from(c, j);
        panel_f32(&a, m, widened, k, count, k, &out, fetch(w, j + count, n, (m + MR - 1) / MR));
    }
}

static void gemm_widened(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c) {
    float widened[WIDENED_FLOATS];
    gemm_with(widened, panel_columns(k), a, m, w, n, k, c);
}

static void gemm_decoded(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c) {
    float decoded[DECODED_FLOATS];
    gemm_with(decoded, NR, a, m, w, n, k, c);
}

void gemm(struct rows a, size_t m, struct matrix w, size_t n, size_t k, struct rows c) {
    bool is_quantised = w.dtype == QUANTISED;
    if (is_quantised && m > most_fused(w.data) && NR * k <= DECODED_FLOATS) {
        gemm_decoded(a, m, w, n, k, c);
        return;
    }
    if (!is_quantised && w.dtype != F32 && m >= MIN_ROWS_TO_WIDEN && MIN_COLUMNS * k <= WIDENED_FLOATS) {
        gemm_widened(a, m, w, n, k, c);
        return;
    }
    size_t num_passes = (m + MR - 1) / MR, columns = num_passes > 1 ? panel_columns(k) : n;
    size_t tile_columns = 2 * m <= MR ? 2 * NR : NR;
    for (size_t j = 0; j < n; j += columns) {
        size_t count = smaller(n - j, columns);
        const void *part = matrix_from(w, j).data;
        struct rows out = columns_from(c, j);
        struct ahead ahead = fetch(w, num_passes > 1 ? j + count : tile_columns, n, num_passes);
        if (is_quantised) {
            panel_quantised(&a, m, w.data, w.first + j, count, k, &out, ahead);
            continue;
        }
        switch ((enum dtype)w.dtype) {
            case F32: panel_f32(&a, m, part, w.stride, count, k, &out, ahead); break;
            case BF16: panel_bf16(&a, m, part, w.stride, count, k, &out, ahead); break;
            case F16: panel_f16(&a, m, part, w.stride, count, k, &out, ahead); break;
        }
    }
}
