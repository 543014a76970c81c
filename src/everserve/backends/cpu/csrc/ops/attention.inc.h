/* The weighted sum of value rows, for one type of pool. The includer defines WEIGHT, LOAD(p), NAME(x) as for
   gemm.inc.h.

   out[i][e] = out[i][e] * decay[i] + p[i][0] * values[0][e] + p[i][1] * values[1][e] + ..., from left to right: mr
   queries by nv vectors of e, both constants, are accumulators in registers. */

ALWAYS_INLINE void NAME(value_tile)(const int mr, const int nv, const float *p, const float *decay,
                                    const WEIGHT *values, size_t num_values, size_t head_size, float *out) {
    vf acc[QR][2 * NR];
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int v = 0; v < nv; v++)
            acc[i][v] = load_f32(out + (size_t)i * head_size + (size_t)v * VW) * splat(decay[i]);
    for (size_t j = 0; j < num_values; j++) {
        vf weight[QR];
        UNROLL for (int i = 0; i < mr; i++) weight[i] = splat(p[(size_t)i * TILE + j]);
        UNROLL for (int v = 0; v < nv; v++) {
            vf value = LOAD(values + j * head_size + (size_t)v * VW);
            UNROLL for (int i = 0; i < mr; i++) acc[i][v] = fma_v(weight[i], value, acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int v = 0; v < nv; v++) store_f32(out + (size_t)i * head_size + (size_t)v * VW, acc[i][v]);
}

ALWAYS_INLINE void NAME(value_strip)(const int mr, const float *p, const float *decay, const WEIGHT *values,
                                     size_t num_values, size_t head_size, float *out) {
    size_t e = 0;
    if (2 * mr <= QR)
        for (; e + 2 * NR * VW <= head_size; e += 2 * NR * VW)
            NAME(value_tile)(mr, 2 * NR, p, decay, values + e, num_values, head_size, out + e);
    for (; e + NR * VW <= head_size; e += NR * VW)
        NAME(value_tile)(mr, NR, p, decay, values + e, num_values, head_size, out + e);
    for (; e < head_size; e += VW) NAME(value_tile)(mr, 1, p, decay, values + e, num_values, head_size, out + e);
}

/* For mr <= QR queries that see the same keys of this tile. */
static void NAME(add_values)(size_t mr, const float *p, const float *decay, const void *values, size_t num_values,
                             size_t head_size, float *out) {
    switch (mr) {
        case 1: NAME(value_strip)(1, p, decay, values, num_values, head_size, out); break;
        case 2: NAME(value_strip)(2, p, decay, values, num_values, head_size, out); break;
#if QR >= 3
        case 3: NAME(value_strip)(3, p, decay, values, num_values, head_size, out); break;
#endif
#if QR >= 4
        case 4: NAME(value_strip)(4, p, decay, values, num_values, head_size, out); break;
#endif
    }
}

#undef WEIGHT
#undef LOAD
#undef NAME
