/* Codes of quantised weights as vectors of float32 (quantised.h), VW of them at any multiple of VW. */

#pragma once

#include "gemm.h"

/* To nearest even; both are exact where the number has such a form already. No NaN whose lowest bits are set. */
ALWAYS_INLINE vf round_bf16(vf x) {
    vi bits = (vi)x;
    return (vf)((bits + (((bits >> 16) & 1) + 0x7fff)) & (int32_t)0xffff0000);
}

ALWAYS_INLINE vf round_f16(vf x) {
#if defined(SIMD_AVX512)
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(SIMD_AVX2)
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(SIMD_NEON)
    return vcvt_f32_f16(vcvt_f16_f32(x));
#else
    vf rounded;
    for (int i = 0; i < VW; i++) rounded[i] = f16_to_f32(f32_to_f16(x[i]));
    return rounded;
#endif
}

ALWAYS_INLINE vf round_to(const enum dtype dtype, vf x) {
    return dtype == BF16 ? round_bf16(x) : dtype == F16 ? round_f16(x) : x;
}

/* fp8 numbers, each times 2^-8: their bits are those of a half precision number with another bias. */
ALWAYS_INLINE vf load_e4m3(const uint8_t *p) {
#if defined(SIMD_AVX512)
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(SIMD_AVX2)
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xbfff)));
#elif defined(SIMD_NEON)
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    uint16x4_t wide = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
    wide = vorr_u16(vand_u16(vshl_n_u16(wide, 8), vdup_n_u16(0x8000)),
                    vand_u16(vshl_n_u16(wide, 7), vdup_n_u16(0x3f80)));
    return vcvt_f32_f16(vreinterpret_f16_u16(wide));
#else
    vf x;
    for (int i = 0; i < VW; i++) x[i] = f16_to_f32((f16)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    return x;
#endif
}

ALWAYS_INLINE vf load_i8(const uint8_t *p) {
#if defined(SIMD_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#elif defined(SIMD_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
#elif defined(SIMD_NEON)
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes))))));
#else
    vf x;
    for (int i = 0; i < VW; i++) x[i] = (float)(int8_t)p[i];
    return x;
#endif
}

/* The 16 weights of a group. */
typedef struct {
#if defined(SIMD_AVX512)
    __m512 all;
#elif defined(SIMD_AVX2)
    __m256 low, high;
#elif defined(SIMD_NEON)
    uint8x16x4_t bytes;
#else
    float all[16];
#endif
} table;

ALWAYS_INLINE table load_table(const float *of) {
    table t;
    memcpy(&t, of, sizeof t);
    return t;
}

/* Which of them are in these halves of bytes. */
ALWAYS_INLINE vf look_up(table t, const uint8_t *p, int shift) {
#if defined(SIMD_AVX512)
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, _mm512_set1_epi32(shift)), t.all);
#elif defined(SIMD_AVX2)
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    codes = _mm256_srlv_epi32(codes, _mm256_set1_epi32(shift));
    __m256 low = _mm256_permutevar8x32_ps(t.low, codes), high = _mm256_permutevar8x32_ps(t.high, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
#elif defined(SIMD_NEON)
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    uint32x4_t codes = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes >> shift & 0x0f0f0f0f)))));
    uint32x4_t at = vmlaq_u32(vdupq_n_u32(0x03020100), codes, vdupq_n_u32(0x04040404)); /* the four bytes of each */
    return vreinterpretq_f32_u8(vqtbl4q_u8(t.bytes, vreinterpretq_u8_u32(at)));
#else
    vf x;
    for (int i = 0; i < VW; i++) x[i] = t.all[p[i] >> shift & 15];
    return x;
#endif
}

/* Where the scale of a row's first group is. */
ALWAYS_INLINE size_t scale_at(const struct quantised *q, size_t row) {
    return ((size_t)q->first_row + row) / (size_t)q->rows_per_scale * (size_t)q->scale_stride;
}

ALWAYS_INLINE float scale_of(const struct quantised *q, int64_t dtype, size_t at) {
    const uint16_t *halves = q->scales;
    switch (dtype) {
        case F32: return ((const float *)q->scales)[at];
#if defined(SIMD_AVX512) || defined(SIMD_AVX2)
        case F16: return _cvtsh_ss(halves[at]);
#else
        case F16: return f16_to_f32(halves[at]);
#endif
        default: break;
    }
    uint32_t bits;
    float scale;
    if (dtype == BF16) bits = (uint32_t)halves[at] << 16;
    else bits = (uint32_t)((const uint8_t *)q->scales)[at] << 23;
    if (dtype == E8M0 && !bits) bits = 1 << 22; /* 2^-127 */
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

ALWAYS_INLINE float zero_of(const struct quantised *q, size_t at) {
    return q->zeros ? (float)((const int8_t *)q->zeros)[at] : 0.0f;
}

/* What turns codes of 8 bits into weights. */
struct factors {
    vf scale, zero;
    enum dtype dtype;
};

ALWAYS_INLINE struct factors factors_of(const struct quantised *q, size_t at) {
    return (struct factors){splat(scale_of(q, q->scale_dtype, at) * (q->kind == INT8 ? 1.0f : 0x1p8f)), splat(zero_of(q, at)),
                            (enum dtype)q->dtype};
}

static const float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float FLOATS[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

/* `kind`, and perhaps `scale_dtype` and `dtype`, are constants at a call. */
ALWAYS_INLINE table table_of(const enum codes kind, const int64_t scale_dtype, const enum dtype dtype,
                             const struct quantised *q, size_t at) {
    vf scale = splat(scale_of(q, scale_dtype, at)), zero = splat(kind == INT4 ? zero_of(q, at) : 0.0f);
    float weights[16];
    for (int i = 0; i < 16; i += VW) {
        vf numbers = load_f32((kind == INT4 ? INTEGERS : FLOATS) + i);
        /* A power of two times one of FLOATS is a bfloat16. */
        if (scale_dtype == E8M0 && dtype == BF16) store_f32(weights + i, numbers * scale);
        else store_f32(weights + i, round_to(dtype, (numbers - zero) * scale));
    }
    return load_table(weights);
}

ALWAYS_INLINE vf weights_e4m3(const enum dtype dtype, struct factors f, const uint8_t *codes, size_t p) {
    return round_to(dtype, load_e4m3(codes + p) * f.scale);
}

ALWAYS_INLINE vf weights_i8(const enum dtype dtype, struct factors f, const uint8_t *codes, size_t p) {
    return round_to(dtype, (load_i8(codes + p) - f.zero) * f.scale);
}

/* fp8 to bfloat16, if scales are 0 or not below 2^-117. A weight is one of 16 that have been rounded, by the last bit of
   the exponent and the fraction, times a power of two: with so large a scale that is exact.

       s eee e fff     sixteen[e fff] * powers[s eee], with a table of its own where eee is 0: there e = 0 is subnormal */
#if defined(SIMD_AVX512)
struct e4m3 {
    __m512 sixteen, first;
};

static const float SIXTEEN[16] = {
    0x1p-7f, 0x1.2p-7f, 0x1.4p-7f, 0x1.6p-7f, 0x1.8p-7f, 0x1.ap-7f, 0x1.cp-7f, 0x1.ep-7f,
    0x1p-6f, 0x1.2p-6f, 0x1.4p-6f, 0x1.6p-6f, 0x1.8p-6f, 0x1.ap-6f, 0x1.cp-6f, 0x1.ep-6f,
};
static const float FIRST[16] = {
    0x0p+0f, 0x1p-9f, 0x1p-8f, 0x1.8p-8f, 0x1p-7f, 0x1.4p-7f, 0x1.8p-7f, 0x1.cp-7f,
    0x1p-6f, 0x1.2p-6f, 0x1.4p-6f, 0x1.6p-6f, 0x1.8p-6f, 0x1.ap-6f, 0x1.cp-6f, 0x1.ep-6f,
};
static const float POWERS[16] = {
    0x1p0f, 0x1p2f, 0x1p4f, 0x1p6f, 0x1p8f, 0x1p10f, 0x1p12f, 0x1p14f,
    -0x1p0f, -0x1p2f, -0x1p4f, -0x1p6f, -0x1p8f, -0x1p10f, -0x1p12f, -0x1p14f,
};

ALWAYS_INLINE struct e4m3 e4m3_of(const struct quantised *q, size_t at) {
    vf scale = splat(scale_of(q, q->scale_dtype, at));
    return (struct e4m3){round_bf16(load_f32(SIXTEEN) * scale), round_bf16(load_f32(FIRST) * scale)};
}

ALWAYS_INLINE vf weights_e4m3_bf16(struct e4m3 group, const uint8_t *codes, size_t p) {
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(codes + p)));
    __mmask16 is_first = _mm512_testn_epi32_mask(code, _mm512_set1_epi32(0x70));
    __m512 sixteen = _mm512_permutexvar_ps(code, group.sixteen);
    sixteen = _mm512_mask_permutexvar_ps(sixteen, is_first, code, group.first);
    return sixteen * _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), load_f32(POWERS));
}
#else
#define e4m3 factors
#define e4m3_of factors_of
ALWAYS_INLINE vf weights_e4m3_bf16(struct factors group, const uint8_t *codes, size_t p) {
    return weights_e4m3(BF16, group, codes, p);
}
#endif
