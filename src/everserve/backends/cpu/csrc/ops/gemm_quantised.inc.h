/* The micro-kernels for one kind of quantised weights: gemm.inc.h, group by group. The includer defines

       GROUP                   what turns codes of a group into weights
       GROUP_OF(q, at)         that of the group whose scale is there
       WEIGHTS(group, codes, p)  VW weights of a row, from column p on
       BITS                    of a code
       FUSED                   rows for which codes are decoded in registers
       NAME(x)                 x with the kind's suffix */

/* The weights of a row from column p to k, fewer than SUM_WIDTH, and zeros. */
static __attribute__((noinline)) void NAME(tail)(GROUP group, const uint8_t *codes, size_t p, size_t k, float *weights) {
    uint8_t last[32] = {0}; /* codes behind them may not be there */
    size_t first = BITS == 4 ? p / 32 * 16 : p, num_bytes = BITS == 4 ? smaller(k - p / 32 * 32, 16) : k - p;
    memcpy(last, codes + first, num_bytes);
    for (size_t s = 0; s < PARTS; s++) store_f32(weights + s * VW, WEIGHTS(group, last, (BITS == 4 ? p % 32 : 0) + s * VW));
    memset(weights + (k - p), 0, (SUM_WIDTH - (k - p)) * sizeof(float));
}

ALWAYS_INLINE void NAME(tile)(const int mr, const int nr, const float *const *a, const struct quantised *q, size_t row,
                              size_t k, float *const *c, size_t column, const struct ahead *ahead) {
    accumulator acc[FUSED][2 * NR];
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j++) acc[i][j] = no_sum();

    const size_t stride = (size_t)q->stride;
    const uint8_t *codes = (const uint8_t *)q->codes + row * stride;
    size_t scales[2 * NR];
    UNROLL for (int j = 0; j < nr; j++) scales[j] = scale_at(q, row + (size_t)j);
    const char *next = ahead->following + column * ahead->column_bytes;
    const size_t most = nr * SUM_WIDTH * BITS / 8;
    size_t advance = next < ahead->end ? ahead->step_bytes * (size_t)nr / NR : 0, p = 0, fetched = 0;
    for (size_t g = 0; p < k; g++) {
        size_t end = smaller((g + 1) * (size_t)q->group, k);
        GROUP group[2 * NR];
        UNROLL for (int j = 0; j < nr; j++) group[j] = GROUP_OF(q, scales[j] + g);
        for (; p + SUM_WIDTH <= end; p += SUM_WIDTH) {
            UNROLL for (size_t line = 0; line < most; line += 64)
                if (line < advance) __builtin_prefetch(next + fetched + line, 0, 2);
            fetched += advance;
            UNROLL for (int s = 0; s < PARTS; s++) {
                vf b[2 * NR];
                UNROLL for (int j = 0; j < nr; j++)
                    b[j] = WEIGHTS(group[j], codes + (size_t)j * stride, p + (size_t)s * VW);
                UNROLL for (int i = 0; i < mr; i++) {
                    vf ai = load_f32(a[i] + p + s * VW);
                    IN_REGISTER(ai);
                    UNROLL for (int j = 0; j < nr; j++) acc[i][j].part[s] = fma_v(ai, b[j], acc[i][j].part[s]);
                }
            }
        }
        if (p == end) continue;
        float w_tail[2 * NR][SUM_WIDTH];
        for (int j = 0; j < nr; j++) NAME(tail)(group[j], codes + (size_t)j * stride, p, end, w_tail[j]);
        UNROLL for (int i = 0; i < mr; i++) {
            float a_tail[SUM_WIDTH] = {0};
            memcpy(a_tail, a[i] + p, (end - p) * sizeof(float));
            UNROLL for (int j = 0; j < nr; j++)
                UNROLL for (int s = 0; s < PARTS; s++)
                    acc[i][j].part[s] =
                        fma_v(load_f32(a_tail + s * VW), load_f32(w_tail[j] + s * VW), acc[i][j].part[s]);
        }
        p = end;
    }

    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j += 4) {
            const int count = nr - j < 4 ? nr - j : 4;
            const accumulator *of = &acc[i][j];
            v4f sums = sum4(of[0], of[1 % count], of[2 % count], of[3 % count]);
            memcpy(c[i] + column + j, &sums, (size_t)count * sizeof(float));
        }
}

/* All n columns for mr <= FUSED rows. */
ALWAYS_INLINE void NAME(strip)(const int mr, const float *const *a, const struct quantised *q, size_t row, size_t n,
                               size_t k, float *const *c, const struct ahead *ahead) {
    size_t j = 0;
    if (2 * mr <= MR)
        for (; j + 2 * NR <= n; j += 2 * NR) NAME(tile)(mr, 2 * NR, a, q, row + j, k, c, j, ahead);
    for (; j + NR <= n; j += NR) NAME(tile)(mr, NR, a, q, row + j, k, c, j, ahead);
    for (; j < n; j++) NAME(tile)(mr, 1, a, q, row + j, k, c, j, ahead);
}

static void NAME(panel)(const struct rows *a, size_t m, const struct quantised *q, size_t row_0, size_t n, size_t k,
                        const struct rows *c, struct ahead ahead) {
    for (size_t i = 0; i < m; i += FUSED) {
        size_t mr = smaller(m - i, FUSED);
        const float *a_rows[FUSED];
        float *c_rows[FUSED];
        for (size_t r = 0; r < FUSED; r++) {
            size_t at = i + smaller(r, mr - 1); /* beyond mr the last row again, which is not used */
            a_rows[r] = row(a, at), c_rows[r] = row(c, at);
        }
        switch (mr) {
            case 1: NAME(strip)(1, a_rows, q, row_0, n, k, c_rows, &ahead); break;
#if FUSED >= 2
            case 2: NAME(strip)(2, a_rows, q, row_0, n, k, c_rows, &ahead); break;
#endif
#if FUSED >= 3
            case 3: NAME(strip)(3, a_rows, q, row_0, n, k, c_rows, &ahead); break;
#endif
#if FUSED >= 4
            case 4: NAME(strip)(4, a_rows, q, row_0, n, k, c_rows, &ahead); break;
#endif
#if FUSED >= 6
            case 5: NAME(strip)(5, a_rows, q, row_0, n, k, c_rows, &ahead); break;
            case 6: NAME(strip)(6, a_rows, q, row_0, n, k, c_rows, &ahead); break;
#endif
        }
        ahead.following += n * ahead.column_bytes;
    }
}

/* A row as float32. */
static void NAME(widen)(const struct quantised *q, size_t row, size_t k, float *to) {
    const uint8_t *codes = (const uint8_t *)q->codes + row * (size_t)q->stride;
    size_t scales = scale_at(q, row), p = 0;
    for (size_t g = 0; p < k; g++) {
        size_t end = smaller((g + 1) * (size_t)q->group, k);
        GROUP group = GROUP_OF(q, scales + g);
        for (; p + SUM_WIDTH <= end; p += SUM_WIDTH)
            UNROLL for (int s = 0; s < PARTS; s++)
                store_f32(to + p + s * VW, WEIGHTS(group, codes, p + (size_t)s * VW));
        if (p == end) continue;
        float last[SUM_WIDTH];
        NAME(tail)(group, codes, p, end, last);
        memcpy(to + p, last, (end - p) * sizeof(float));
        p = end;
    }
}

#undef GROUP
#undef GROUP_OF
#undef WEIGHTS
#undef BITS
#undef FUSED
#undef NAME
