/* The weighted sum of value rows, for one type of pool. The includer defines WEIGHT, LOAD(p), NAME(x) as for
   gemm.inc.h.

   out[i][e] = out[i][e] * decay[i] + p[i][0] * values[0][e] + p[i][1] * values[1][e] + ..., from left to right: mr
   queries by nv vectors of e, both constants, are accumulators in registers. Rows of values are `stride` apart, of which
   the first `width` are used; rows of out are as wide as that. */

ALWAYS_INLINE void NAME(value_tile)(const int mr, const int nv, const float *p, const float *decay,
                                    const WEIGHT *values, size_t num_values, size_t stride, size_t width, float *out) {
    vf acc[QR][2 * NV];
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int v = 0; v < nv; v++)
            acc[i][v] = load_f32(out + (size_t)i * width + (size_t)v * VW) * splat(decay[i]);
    for (size_t j = 0; j < num_values; j++) {
        vf weight[QR];
        UNROLL for (int i = 0; i < mr; i++) weight[i] = splat(p[(size_t)i * TILE + j]);
        UNROLL for (int v = 0; v < nv; v++) {
            vf value = LOAD(values + j * stride + (size_t)v * VW);
            UNROLL for (int i = 0; i < mr; i++) acc[i][v] = fma_v(weight[i], value, acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int v = 0; v < nv; v++) store_f32(out + (size_t)i * width + (size_t)v * VW, acc[i][v]);
}

ALWAYS_INLINE void NAME(value_strip)(const int mr, const float *p, const float *decay, const WEIGHT *values,
                                     size_t num_values, size_t stride, size_t width, float *out) {
    size_t e = 0;
    if (2 * mr <= QR)
        for (; e + 2 * NV * VW <= width; e += 2 * NV * VW)
            NAME(value_tile)(mr, 2 * NV, p, decay, values + e, num_values, stride, width, out + e);
    for (; e + NV * VW <= width; e += NV * VW)
        NAME(value_tile)(mr, NV, p, decay, values + e, num_values, stride, width, out + e);
    for (; e < width; e += VW) NAME(value_tile)(mr, 1, p, decay, values + e, num_values, stride, width, out + e);
}

/* For mr <= QR queries that see the same keys of this tile. */
static void NAME(add_values)(size_t mr, const float *p, const float *decay, const void *values, size_t num_values,
                             size_t stride, size_t width, float *out) {
    switch (mr) {
        case 1: NAME(value_strip)(1, p, decay, values, num_values, stride, width, out); break;
#if QR >= 2
        case 2: NAME(value_strip)(2, p, decay, values, num_values, stride, width, out); break;
#endif
#if QR >= 3
        case 3: NAME(value_strip)(3, p, decay, values, num_values, stride, width, out); break;
#endif
#if QR >= 4
        case 4: NAME(value_strip)(4, p, decay, values, num_values, stride, width, out); break;
#endif
    }
}

#undef WEIGHT
#undef LOAD
#undef NAME
