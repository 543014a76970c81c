/* The factor of a root-mean-square norm, the same for a hidden state and for one head; and of its deviation from a
   mean, where that is subtracted first. */

#pragma once

#include <math.h>

#include "simd.h"

ALWAYS_INLINE void add_squares(accumulator *squares, const float *x, float mean) {
    UNROLL for (int s = 0; s < PARTS; s++) {
        vf v = load_f32(x + s * VW) - splat(mean);
        squares->part[s] = fma_v(v, v, squares->part[s]);
    }
}

ALWAYS_INLINE float inverse_deviation(const float *x, size_t n, float eps, float mean) {
    accumulator squares[4] = {no_sum(), no_sum(), no_sum(), no_sum()}, all;
    size_t i = 0;
    for (; i + 4 * SUM_WIDTH <= n; i += 4 * SUM_WIDTH)
        UNROLL for (int j = 0; j < 4; j++) add_squares(&squares[j], x + i + j * SUM_WIDTH, mean);
    for (; i < n; i += SUM_WIDTH) {
        float tail[SUM_WIDTH];
        for (size_t j = 0; j < SUM_WIDTH; j++) tail[j] = mean;
        memcpy(tail, x + i, smaller(n - i, SUM_WIDTH) * sizeof(float));
        add_squares(&squares[0], tail, mean);
    }
    UNROLL for (int s = 0; s < PARTS; s++)
        all.part[s] = (squares[0].part[s] + squares[1].part[s]) + (squares[2].part[s] + squares[3].part[s]);
    return 1.0f / sqrtf(sum(all) / (float)n + eps);
}

ALWAYS_INLINE float inverse_rms(const float *x, size_t n, float eps) { return inverse_deviation(x, n, eps, 0.0f); }

ALWAYS_INLINE float mean_of(const float *x, size_t n) {
    accumulator total = no_sum();
    for (size_t i = 0; i < n; i += SUM_WIDTH) {
        float tail[SUM_WIDTH] = {0};
        memcpy(tail, x + i, smaller(n - i, SUM_WIDTH) * sizeof(float));
        UNROLL for (int s = 0; s < PARTS; s++) total.part[s] += load_f32(tail + s * VW);
    }
    return sum(total) / (float)n;
}
