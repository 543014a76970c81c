/* The micro-kernels for one weight type. The includer defines

       WEIGHT     the element type
       LOAD(p)    VW of them, widened to float32
       NAME(x)    x with the type's suffix

       k ->      w[0]  w[1]  w[2]  w[3]
                  |     |     |     |
       a[0] ---  acc   acc   acc   acc     MR x NR accumulators, each a vector along k (or PARTS of it):
       a[1] ---  acc   acc   acc   acc     at every step MR + NR loads feed MR * NR multiply-adds
       a[2] ---  acc   acc   acc   acc
       a[3] ---  acc   acc   acc   acc     */

/* mr and nr are constants at every call, and the loops over them unroll, so the accumulators are registers (left to
   itself GCC 12 stores them at every step: half the speed). */
ALWAYS_INLINE void NAME(tile)(const int mr, const int nr, const float *const *a, const WEIGHT *w, size_t stride,
                              size_t k, float *const *c, size_t column, const struct ahead *ahead) {
    accumulator acc[MR][2 * NR];
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j++) acc[i][j] = no_sum();

    const char *next = ahead->following + column * ahead->column_bytes;
    const size_t most = nr * SUM_WIDTH * sizeof(WEIGHT); /* bytes of weights in a step: more is never fetched */
    size_t advance = next < ahead->end ? ahead->step_bytes * (size_t)nr / NR : 0, p = 0;
    for (; p + SUM_WIDTH <= k; p += SUM_WIDTH) {
        UNROLL for (size_t line = 0; line < most; line += 64)
            if (line < advance) __builtin_prefetch(next + line, 0, 2);
        next += advance;
        UNROLL for (int s = 0; s < PARTS; s++) {
            vf b[2 * NR];
            UNROLL for (int j = 0; j < nr; j++) b[j] = LOAD(w + (size_t)j * stride + p + s * VW);
            UNROLL for (int i = 0; i < mr; i++) {
                vf ai = load_f32(a[i] + p + s * VW);
                IN_REGISTER(ai);
                UNROLL for (int j = 0; j < nr; j++) acc[i][j].part[s] = fma_v(ai, b[j], acc[i][j].part[s]);
            }
        }
    }
    if (p < k) { /* the tail, padded with zeros */
        WEIGHT w_tail[2 * NR][SUM_WIDTH] = {0};
        UNROLL for (int j = 0; j < nr; j++) memcpy(w_tail[j], w + (size_t)j * stride + p, (k - p) * sizeof(WEIGHT));
        UNROLL for (int i = 0; i < mr; i++) {
            float a_tail[SUM_WIDTH] = {0};
            memcpy(a_tail, a[i] + p, (k - p) * sizeof(float));
            UNROLL for (int j = 0; j < nr; j++)
                UNROLL for (int s = 0; s < PARTS; s++)
                    acc[i][j].part[s] =
                        fma_v(load_f32(a_tail + s * VW), LOAD(w_tail[j] + s * VW), acc[i][j].part[s]);
        }
    }

    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j += 4) {
            const int count = nr - j < 4 ? nr - j : 4;
            const accumulator *of = &acc[i][j];
            v4f sums = sum4(of[0], of[1 % count], of[2 % count], of[3 % count]);
            memcpy(c[i] + column + j, &sums, (size_t)count * sizeof(float));
        }
}

/* All n columns for mr <= MR rows. */
ALWAYS_INLINE void NAME(strip)(const int mr, const float *const *a, const WEIGHT *w, size_t stride, size_t n,
                               size_t k, float *const *c, const struct ahead *ahead) {
    size_t j = 0;
    if (2 * mr <= MR) /* twice the columns: enough accumulators to hide the latency of a multiply-add */
        for (; j + 2 * NR <= n; j += 2 * NR) NAME(tile)(mr, 2 * NR, a, w + j * stride, stride, k, c, j, ahead);
    for (; j + NR <= n; j += NR) NAME(tile)(mr, NR, a, w + j * stride, stride, k, c, j, ahead);
    for (; j < n; j++) NAME(tile)(mr, 1, a, w + j * stride, stride, k, c, j, ahead);
}

/* w[0..n) stays in the first-level cache while the rows of a stream by. */
static void NAME(panel)(const struct rows *a, size_t m, const WEIGHT *w, size_t stride, size_t n, size_t k,
                        const struct rows *c, struct ahead ahead) {
    for (size_t i = 0; i < m; i += MR) {
        size_t mr = smaller(m - i, MR);
        const float *a_rows[MR];
        float *c_rows[MR];
        for (size_t r = 0; r < MR; r++) {
            size_t at = i + smaller(r, mr - 1); /* beyond mr the last row again, which is not used */
            a_rows[r] = row(a, at), c_rows[r] = row(c, at);
        }
        switch (mr) {
            case 1: NAME(strip)(1, a_rows, w, stride, n, k, c_rows, &ahead); break;
    #if MR >= 2
        case 2: NAME(strip)(2, a_rows, w, stride, n, k, c_rows, &ahead); break;
#endif
#if MR >= 3
            case 3: NAME(strip)(3, a_rows, w, stride, n, k, c_rows, &ahead); break;
#endif
#if MR >= 4
            case 4: NAME(strip)(4, a_rows, w, stride, n, k, c_rows, &ahead); break;
#endif
#if MR >= 6
            case 5: NAME(strip)(5, a_rows, w, stride, n, k, c_rows, &ahead); break;
            case 6: NAME(strip)(6, a_rows, w, stride, n, k, c_rows, &ahead); break;
#endif
        }
        ahead.following += n * ahead.column_bytes;
    }
}

#undef WEIGHT
#undef LOAD
#undef NAME
