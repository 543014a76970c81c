/* e^x for a vector, within 1 ulp of the true value where that is normal; NaN stays NaN.

   x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r; e^r is 1 + r + r^2 q(r), q a polynomial fitted so that the
   relative error over the interval is 4e-9. The result for 0 is exactly 1. */

#pragma once

#include "simd.h"

ALWAYS_INLINE vf exp_v(vf x) {
    const vf largest_x = splat(89.0f), smallest_x = splat(-104.0f); /* beyond, the result is infinity or 0 anyway */
    x = select_v(x > largest_x, largest_x, x);
    x = select_v(x < smallest_x, smallest_x, x);

    const vf magic = splat(0x1.8p23f); /* adding it rounds to an integer, which is then in the low bits */
    vf shifted = fma_v(x, splat(0x1.715476p0f), magic);
    vi n = (vi)shifted - (vi)magic;
    vf n_float = shifted - magic;
    vf r = fma_v(n_float, splat(-0x1.62e400p-1f), x); /* ln 2 in two parts: n * the first is exact */
    r = fma_v(n_float, splat(-0x1.7f7d1cp-20f), r);

    vf q = splat(0x1.6a23cep-10f);
    q = fma_v(q, r, splat(0x1.123a20p-7f));
    q = fma_v(q, r, splat(0x1.5558f2p-5f));
    q = fma_v(q, r, splat(0x1.555492p-3f));
    q = fma_v(q, r, splat(0x1.fffffcp-2f));
    vf e_r = fma_v(q, r * r, r) + splat(1.0f);

    /* 2^n in two steps, because n reaches 128 and -150, which one exponent field does not hold. */
    vi half = n >> 1;
    vf scale_1 = (vf)((half + 127) << 23), scale_2 = (vf)((n - half + 127) << 23);
    return e_r * scale_1 * scale_2;
}

ALWAYS_INLINE vf sigmoid_v(vf x) { return splat(1.0f) / (splat(1.0f) + exp_v(-x)); }

/* Within 2e-7 of the true value. */
ALWAYS_INLINE vf tanh_v(vf x) {
    vf e = exp_v(splat(-2.0f) * max_v(x, -x));
    vf positive = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select_v(x < splat(0.0f), -positive, positive);
}

/* Of one number. */
ALWAYS_INLINE float exp_f(float x) { return exp_v(splat(x))[0]; }
