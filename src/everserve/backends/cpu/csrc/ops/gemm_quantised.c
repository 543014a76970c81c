/* One kernel for each kind of quantised weights. */

#include "gemm_quantised.h"

#include <stdbool.h>

#include "dequantise.h"

/* Codes of 8 bits are rounded one by one; for bfloat16, which most are, without asking what to. */
#define GROUP struct factors
#define GROUP_OF factors_of
#define WEIGHTS(group, codes, p) weights_e4m3(BF16, group, codes, p)
#define BITS 8
#define NAME(x) x##_e4m3_bf16
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF factors_of
#define WEIGHTS(group, codes, p) weights_e4m3((group).dtype, group, codes, p)
#define BITS 8
#define NAME(x) x##_e4m3_any
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF factors_of
#define WEIGHTS(group, codes, p) weights_i8(BF16, group, codes, p)
#define BITS 8
#define NAME(x) x##_i8_bf16
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF factors_of
#define WEIGHTS(group, codes, p) weights_i8((group).dtype, group, codes, p)
#define BITS 8
#define NAME(x) x##_i8_any
#include "gemm_quantised.inc.h"

#define GROUP table
#define GROUP_OF table_of
#define WEIGHTS(group, codes, p) look_up(group, (codes) + (p) / 32 * 16 + (p) % 16, (p) & 16 ? 4 : 0)
#define BITS 4
#define NAME(x) x##_4_bits
#include "gemm_quantised.inc.h"

/* The two things that are done with quantised weights. */
struct kernels {
    void (*panel)(const struct rows *, size_t, const struct quantised *, size_t, size_t, size_t, const struct rows *,
                  struct ahead);
    void (*widen)(const struct quantised *, size_t, size_t, float *);
};

static struct kernels kernels_of(const struct quantised *q) {
    bool is_bf16 = q->dtype == BF16;
    switch ((enum codes)q->kind) {
        case E4M3:
            return is_bf16 ? (struct kernels){panel_e4m3_bf16, widen_e4m3_bf16}
                           : (struct kernels){panel_e4m3_any, widen_e4m3_any};
        case INT8:
            return is_bf16 ? (struct kernels){panel_i8_bf16, widen_i8_bf16}
                           : (struct kernels){panel_i8_any, widen_i8_any};
        default: return (struct kernels){panel_4_bits, widen_4_bits};
    }
}

void panel_quantised(const struct rows *a, size_t m, const struct quantised *q, size_t row, size_t n, size_t k,
                     const struct rows *c, struct ahead ahead) {
    kernels_of(q).panel(a, m, q, row, n, k, c, ahead);
}

void widen_quantised(const struct quantised *q, size_t row, size_t k, float *to) {
    kernels_of(q).widen(q, row, k, to);
}
