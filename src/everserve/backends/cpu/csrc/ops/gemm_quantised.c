/* One kernel for each kind of quantised weights. */

#include "gemm_quantised.h"

#include <stdbool.h>

#include "dequantise.h"

/* bfloat16 is what most weights are decoded to: one kernel for each kind of codes, and others for what is left. */
#define GROUP struct e4m3
#define GROUP_OF(q, at) e4m3_of(q, at)
#define WEIGHTS(group, codes, p) weights_e4m3_bf16(group, codes, p)
#define BITS 8
#define FUSED MR
#define NAME(x) x##_e4m3_bf16
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF(q, at) factors_of(q, at)
#define WEIGHTS(group, codes, p) weights_i8(BF16, group, codes, p)
#define BITS 8
#define FUSED MR
#define NAME(x) x##_i8_bf16
#include "gemm_quantised.inc.h"

#define GROUP table
#define GROUP_OF(q, at) table_of(INT4, (q)->scale_dtype, BF16, q, at)
#define WEIGHTS(group, codes, p) look_up(group, (codes) + (p) / 32 * 16 + (p) % 16, (p) & 16 ? 4 : 0)
#define BITS 4
#define FUSED MR
#define NAME(x) x##_i4_bf16
#include "gemm_quantised.inc.h"

#define GROUP table
#define GROUP_OF(q, at) table_of(E2M1, E8M0, BF16, q, at)
#define WEIGHTS(group, codes, p) look_up(group, (codes) + (p) / 32 * 16 + (p) % 16, (p) & 16 ? 4 : 0)
#define BITS 4
#define FUSED MR
#define NAME(x) x##_e2m1_bf16
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF(q, at) factors_of(q, at)
#define WEIGHTS(group, codes, p) weights_e4m3((group).dtype, group, codes, p)
#define BITS 8
#define FUSED 1
#define NAME(x) x##_e4m3
#include "gemm_quantised.inc.h"

#define GROUP struct factors
#define GROUP_OF(q, at) factors_of(q, at)
#define WEIGHTS(group, codes, p) weights_i8((group).dtype, group, codes, p)
#define BITS 8
#define FUSED 1
#define NAME(x) x##_i8
#include "gemm_quantised.inc.h"

#define GROUP table
#define GROUP_OF(q, at) table_of((enum codes)(q)->kind, (q)->scale_dtype, (enum dtype)(q)->dtype, q, at)
#define WEIGHTS(group, codes, p) look_up(group, (codes) + (p) / 32 * 16 + (p) % 16, (p) & 16 ? 4 : 0)
#define BITS 4
#define FUSED 1
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
    if (is_bf16 && q->kind == E4M3) return (struct kernels){panel_e4m3_bf16, widen_e4m3_bf16};
    if (is_bf16 && q->kind == INT8) return (struct kernels){panel_i8_bf16, widen_i8_bf16};
    if (is_bf16 && q->kind == INT4) return (struct kernels){panel_i4_bf16, widen_i4_bf16};
    if (is_bf16 && q->kind == E2M1 && q->scale_dtype == E8M0) return (struct kernels){panel_e2m1_bf16, widen_e2m1_bf16};
    switch ((enum codes)q->kind) {
        case E4M3:
        case E4M3_TINY: return (struct kernels){panel_e4m3, widen_e4m3};
        case INT8: return (struct kernels){panel_i8, widen_i8};
        default: return (struct kernels){panel_4_bits, widen_4_bits};
    }
}

size_t most_fused(const struct quantised *q) {
    if (q->dtype != BF16 || q->kind == E4M3_TINY) return 1;
    return MR;
}

void panel_quantised(const struct rows *a, size_t m, const struct quantised *q, size_t row, size_t n, size_t k,
                     const struct rows *c, struct ahead ahead) {
    kernels_of(q).panel(a, m, q, row, n, k, c, ahead);
}

void widen_quantised(const struct quantised *q, size_t row, size_t k, float *to) {
    kernels_of(q).widen(q, row, k, to);
}
