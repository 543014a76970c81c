/* One vector of floats, as wide as this CPU has them, and the few operations that the kernels need.

   The kernels above this file are plain C over `vf`; only this file knows instruction sets.

       CPU                VW   SUM_WIDTH   tile of a product (MR rows x NR columns of accumulators)
       AVX-512            16   16          6 x 4   of 32 registers: 24 accumulators, 4 columns, 1 row
       AVX2 + FMA + F16C   8   16          3 x 2   of 16 registers: 12 are 6 accumulators, 2 columns, 1 row
       SSE2                4   16          1 x 2   of 16 registers: 8 are 2 accumulators; a multiply-add is 50 instructions
       AArch64 (NEON)      4    4          4 x 4   of 32 registers
       any other           4   16          1 x 2   GCC vector extensions and the C library's fmaf

   All x86-64 CPUs give the same bits, so that a stream may be computed on any of them. Two things make it so:

   - A sum is SUM_WIDTH partial sums, of every SUM_WIDTH-th element each, however wide the registers are. They are
     added up by the same tree (sum4).
   - Everything is compiled with -ffp-contract=off: a multiply-add is fused where `fma_v` is written and nowhere else,
     and there it is fused on every CPU. So the compiler cannot round the same expression differently in two kernels,
     either; batch invariance rests on that. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define SIMD_AVX512
#define VW 16
#define SUM_WIDTH 16
#define MR 6
#define NR 4
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define SIMD_AVX2
#define VW 8
#define SUM_WIDTH 16
#define MR 3
#define NR 2
#elif defined(__aarch64__)
#include <arm_neon.h>
#define SIMD_NEON
#define VW 4
#define SUM_WIDTH 4
#define MR 4
#define NR 4
#else
#if defined(__SSE2__)
#include <immintrin.h>
#define SIMD_SSE2
#endif
#define VW 4
#define SUM_WIDTH 16
#define MR 1
#define NR 2
#endif
#define PARTS (SUM_WIDTH / VW)

/* Before a loop of a constant number of turns (at most 16): do away with the loop. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* GCC would load what two multiply-adds use once for each of them, and then wait for loads. */
#if defined(SIMD_AVX2)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef float v4f __attribute__((vector_size(16)));

/* SUM_WIDTH partial sums, VW in each part. */
typedef struct {
    vf part[PARTS];
} accumulator;

/* Half precision numbers are kept as their bits. */
typedef uint16_t bf16;
typedef uint16_t f16;

ALWAYS_INLINE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

ALWAYS_INLINE vf splat(float x) {
#if defined(SIMD_AVX512)
    return _mm512_set1_ps(x);
#elif defined(SIMD_AVX2)
    return _mm256_set1_ps(x);
#elif defined(SIMD_NEON)
    return vdupq_n_f32(x);
#else
    return (vf){x, x, x, x};
#endif
}

#if defined(SIMD_SSE2)
/* a * b + c for numbers that were float32, so that rounding it to float32 gives what rounding once would give. The
   product of two float32 is exact in double precision; the sum is rounded to odd: of the two doubles around the true
   sum the one whose last bit is 1. So it never lies in the middle of two float32, unless the true sum does. (In
   intrinsics, because GCC 12 drops the rounding to float32 between two of these if they are written as vectors.) */
ALWAYS_INLINE __m128d fma_to_odd(__m128d a, __m128d b, __m128d c) {
    __m128d product = _mm_mul_pd(a, b), sum = _mm_add_pd(product, c), rest = _mm_sub_pd(sum, product);
    __m128d error = _mm_add_pd(_mm_sub_pd(product, _mm_sub_pd(sum, rest)), _mm_sub_pd(c, rest)); /* exactly */
    __m128d zero = _mm_setzero_pd(), is_below = _mm_cmplt_pd(error, zero), is_above = _mm_cmpgt_pd(error, zero);
    __m128d is_inexact = _mm_or_pd(is_below, is_above); /* not where the sum is no number: the error is NaN then */
    __m128d away = _mm_and_pd(_mm_xor_pd(is_below, _mm_cmplt_pd(sum, zero)), is_inexact); /* rounded away from 0 */
    __m128i towards_0 = _mm_add_epi64(_mm_castpd_si128(sum), _mm_castpd_si128(away));     /* one less there */
    __m128i last_bit = _mm_and_si128(_mm_castpd_si128(is_inexact), _mm_set1_epi64x(1));
    return _mm_castsi128_pd(_mm_or_si128(towards_0, last_bit));
}
#endif

/* a * b + c, rounded once. */
ALWAYS_INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(SIMD_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(SIMD_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(SIMD_NEON)
    return vfmaq_f32(c, a, b);
#elif defined(SIMD_SSE2)
#define HIGH(v) _mm_movehl_ps(v, v)
    __m128 low = _mm_cvtpd_ps(fma_to_odd(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c)));
    __m128 high = _mm_cvtpd_ps(fma_to_odd(_mm_cvtps_pd(HIGH(a)), _mm_cvtps_pd(HIGH(b)), _mm_cvtps_pd(HIGH(c))));
    return _mm_movelh_ps(low, high);
#undef HIGH
#else
    return (vf){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
#endif
}

/* Lane by lane: mask (all ones or all zeros) ? a : b. */
ALWAYS_INLINE vf select_v(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
ALWAYS_INLINE vf max_v(vf a, vf b) { return select_v(a > b, a, b); }

/* Loads of VW numbers at any address, widened to float32; widening is exact. memcpy compiles to one unaligned load. */
ALWAYS_INLINE vf load_f32(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

ALWAYS_INLINE void store_f32(float *p, vf v) { memcpy(p, &v, sizeof v); }

ALWAYS_INLINE vf load_bf16(const bf16 *p) {
#if defined(SIMD_AVX512)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
#elif defined(SIMD_AVX2)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
#elif defined(SIMD_NEON)
    uint16x4_t bits;
    memcpy(&bits, p, sizeof bits);
    /* A zip with zeros is a shift left by 16; a Neoverse N1 has two pipes for zips but one for shifts. */
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), vcombine_u16(bits, vdup_n_u16(0))));
#else
    vi v;
    for (int i = 0; i < VW; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)v;
#endif
}

ALWAYS_INLINE float f16_to_f32(f16 bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    float x;
    if (rest >= 0x7c00) { /* infinity, NaN */
        rest = 0x7f800000 | (rest & 0x3ff) << 13 | (rest & 0x3ff ? 0x400000 : 0) | sign;
        memcpy(&x, &rest, sizeof x);
        return x;
    }
    /* Read as a float32, the shifted bits are the number times 2^-112, subnormals included. */
    rest <<= 13;
    memcpy(&x, &rest, sizeof x);
    x *= 0x1p112f;
    return sign ? -x : x;
}

ALWAYS_INLINE vf load_f16(const f16 *p) {
#if defined(SIMD_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif defined(SIMD_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#elif defined(SIMD_NEON)
    uint16x4_t bits;
    memcpy(&bits, p, sizeof bits);
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
#else
    return (vf){f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
#endif
}

/* Narrowing, to nearest even. */
ALWAYS_INLINE bf16 f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

ALWAYS_INLINE f16 f32_to_f16(float x) {
#if defined(SIMD_AVX512) || defined(SIMD_AVX2)
    return (f16)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(SIMD_NEON)
    __fp16 half = (__fp16)x;
    f16 bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (f16)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (f16)(sign | 0x7c00); /* 65520 and more round to infinity */
    if (rest < 0x38800000) { /* subnormal: the addition rounds at the right bit */
        float y, half_ulp = 0.5f;
        memcpy(&y, &rest, sizeof y);
        y += half_ulp;
        memcpy(&rest, &y, sizeof rest);
        return (f16)(sign | (rest - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return (f16)(sign | (rest - 0x38000000) >> 13);
#endif
}

/* {sum a, sum b, sum c, sum d}. Each is the same tree, which is part of every product's definition: halves are folded
   until four partial sums are left, then (0 + 1) + (2 + 3). */
ALWAYS_INLINE v4f sum4(accumulator a, accumulator b, accumulator c, accumulator d) {
#if defined(SIMD_NEON)
    return vpaddq_f32(vpaddq_f32(a.part[0], b.part[0]), vpaddq_f32(c.part[0], d.part[0]));
#elif defined(SIMD_AVX512) || defined(SIMD_AVX2)
#if defined(SIMD_AVX512)
#define FOLD_8(v) _mm256_add_ps(_mm512_castps512_ps256(v.part[0]), _mm512_extractf32x8_ps(v.part[0], 1))
#else
#define FOLD_8(v) (v.part[0] + v.part[1])
#endif
#define FOLD_4(v) _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1))
    __m256 a8 = FOLD_8(a), b8 = FOLD_8(b), c8 = FOLD_8(c), d8 = FOLD_8(d);
    return _mm_hadd_ps(_mm_hadd_ps(FOLD_4(a8), FOLD_4(b8)), _mm_hadd_ps(FOLD_4(c8), FOLD_4(d8)));
#undef FOLD_4
#undef FOLD_8
#else
#define FOLD_4(v) ((v.part[0] + v.part[2]) + (v.part[1] + v.part[3]))
#define FOLD_1(v) ((v[0] + v[1]) + (v[2] + v[3]))
    vf a4 = FOLD_4(a), b4 = FOLD_4(b), c4 = FOLD_4(c), d4 = FOLD_4(d);
    return (v4f){FOLD_1(a4), FOLD_1(b4), FOLD_1(c4), FOLD_1(d4)};
#undef FOLD_1
#undef FOLD_4
#endif
}

ALWAYS_INLINE float sum(accumulator a) { return sum4(a, a, a, a)[0]; }

ALWAYS_INLINE accumulator no_sum(void) {
    accumulator zeros;
    UNROLL for (int s = 0; s < PARTS; s++) zeros.part[s] = splat(0.0f);
    return zeros;
}

ALWAYS_INLINE float largest(vf a) {
    float m = a[0];
    for (int i = 1; i < VW; i++) m = a[i] > m ? a[i] : m;
    return m;
}
