/* The factor of a root-mean-square norm, the same for a hidden state and for one head. */

#pragma once

#include <math.h>

#include "simd.h"

ALWAYS_INLINE float inverse_rms(const float *x, size_t n, float eps) {
    vf squares[4] = {splat(0), splat(0), splat(0), splat(0)};
    size_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW)
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = load_f32(x + i + j * VW);
            squares[j] = fma_v(v, v, squares[j]);
        }
    for (; i < n; i += VW) {
        float tail[VW] = {0};
        memcpy(tail, x + i, (n - i < VW ? n - i : VW) * sizeof(float));
        vf v = load_f32(tail);
        squares[0] = fma_v(v, v, squares[0]);
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n;
    return 1.0f / sqrtf(mean + eps);
}
