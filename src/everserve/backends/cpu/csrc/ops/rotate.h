/* What the halves between projections and attention share: rotation, and rows of the pool. */

#pragma once

#include "attention.h"

/* In two halves, as Hugging Face does: (a, b) -> (a cos - b sin, b cos + a sin). */
ALWAYS_INLINE void rotate_halves(const float *x, const float *cos, const float *sin, size_t size, float *restrict out) {
    size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
}

static inline void store_row(void *to, enum dtype dtype, const float *from, size_t n) {
    switch (dtype) {
        case F32: memcpy(to, from, n * sizeof(float)); break;
        case BF16:
            for (size_t i = 0; i < n; i++) ((bf16 *)to)[i] = f32_to_bf16(from[i]);
            break;
        case F16:
            for (size_t i = 0; i < n; i++) ((f16 *)to)[i] = f32_to_f16(from[i]);
            break;
    }
}
