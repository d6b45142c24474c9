/* Vectors of the instruction set this file is compiled for, and the arithmetic every kernel shares.
 *
 * Products are fused with `fma` here and nowhere by the compiler (-ffp-contract=off), and sums over a row go
 * through 16 lanes in a fixed order whatever the vector's width, so a result does not depend on how a loop was
 * tiled. (The base variant of x86 has no fused product: its last bits differ from the other variants'.)
 */
#ifndef NEURONSERVE_SIMD_H
#define NEURONSERVE_SIMD_H

#include "cpu.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { VW = 16, NV = 2, MAX_ROWS = 12 };
#elif defined(__AVX2__)
enum { VW = 8, NV = 2, MAX_ROWS = 6 };
#elif defined(__aarch64__)
enum { VW = 4, NV = 4, MAX_ROWS = 6 };
#else
enum { VW = 4, NV = 4, MAX_ROWS = 3 };
#endif
/* What products widen in no time to speak of: an instruction or two for a vector in two bytes; five for three bytes, which
 * tiles of few rows have to spare where vectors are long. */
#if defined(__AVX512F__)
enum { KEEPS = 1 << TYPE_FLOAT16 | 1 << TYPE_BFLOAT16 | 1 << TYPE_FLOAT24 };
#elif defined(__AVX2__) || defined(__aarch64__)
enum { KEEPS = 1 << TYPE_FLOAT16 | 1 << TYPE_BFLOAT16 };
#else
enum { KEEPS = 0 };
#endif
/* A tile of a product is MAX_ROWS x PANEL values, all in registers. LANES / VW vectors make a fixed-order sum. */
enum { PANEL = VW * NV, LANES = 16, LV = LANES / VW };
enum { GATE_CHANNELS = PANEL / 2, GATE_VECTORS = NV / 2 };

/* CASES(f, ...) expands f(rows, ...) for every height of a tile, HALF_CASES up to half of the highest. */
#if defined(__AVX512F__)
#define CASES(F, ...) \
    F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__) F(4, __VA_ARGS__) F(5, __VA_ARGS__) F(6, __VA_ARGS__) \
    F(7, __VA_ARGS__) F(8, __VA_ARGS__) F(9, __VA_ARGS__) F(10, __VA_ARGS__) F(11, __VA_ARGS__) F(12, __VA_ARGS__)
#define HALF_CASES(F, ...) \
    F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__) F(4, __VA_ARGS__) F(5, __VA_ARGS__) F(6, __VA_ARGS__)
#elif defined(__AVX2__) || defined(__aarch64__)
#define HALF_CASES(F, ...) F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__)
#define CASES(F, ...) \
    F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__) F(4, __VA_ARGS__) F(5, __VA_ARGS__) F(6, __VA_ARGS__)
#else
#define HALF_CASES(F, ...) F(1, __VA_ARGS__)
#define CASES(F, ...) F(1, __VA_ARGS__) F(2, __VA_ARGS__) F(3, __VA_ARGS__)
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef float vf_unaligned __attribute__((vector_size(VW * 4), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void store(float *p, vf v) { *(vf_unaligned *)p = v; }
INLINE vf splat(float x) { return x - (vf){}; }

INLINE vf fma_(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* Both give `b` where neither is more, as x86's instructions do. */
INLINE vf max_(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vf min_(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return choose(a < b, a, b);
#endif
}

/* e^x to about 1 unit in the last place; 0 below -87, large above 88. */
INLINE vf exp_(vf x)
{
    const vf low = splat(-87.0f), magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi vanished = x < low;
    vf y = min_(max_(x, low), splat(88.0f));
    vf rounded = fma_(y, splat(1.44269504088896341f), magic);
    vf n = rounded - magic;
    vf r = fma_(n, splat(-0.693359375f), y);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r) + splat(1.0f);
    vi power = (vi)(((vu)rounded - (vu)magic + 127u) << 23);
    return (vf)(~vanished & (vi)(p * (vf)power));
}

/* Sums of 16 lanes, folded in halves. */
INLINE float fold(const vf sums[LV])
{
    float lane[LANES];
    for (int i = 0; i < LV; i++)
        store(lane + i * VW, sums[i]);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

INLINE float bfloat16_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

INLINE float float16_value(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff), wide;
    float value;
    if (rest >= 0x7c00)
        wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400)
        wide = sign | ((rest << 13) + 0x38000000);
    else {
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &wide, 4);
    return value;
}

/* VW stored values, starting at element `at`, as float32; exact for every type. Of 24 bits `base` is one input of a panel: the
 * first two bytes of its channels, then the third of each. */
INLINE vf widen(const void *base, size_t at, int type)
{
    if (type == TYPE_FLOAT32)
        return load((const float *)base + at);
#if defined(__AVX512F__)
    if (type == TYPE_FLOAT24) {
        const uint16_t *high = (const uint16_t *)base + at;
        const uint8_t *third = (const uint8_t *)base + 2 * PANEL + at;
        __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high)), 16);
        __m512i rest = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)third)), 8);
        return (vf)_mm512_or_si512(first, rest);
    }
#endif
    if (type == TYPE_BFLOAT16) {
        const uint16_t *p = (const uint16_t *)base + at;
#if defined(__AVX512F__)
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
        return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__aarch64__)
        return (vf)vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16);
#else
        vf v;
        for (int i = 0; i < VW; i++)
            v[i] = bfloat16_value(p[i]);
        return v;
#endif
    }
    if (type == TYPE_FLOAT16) {
        const uint16_t *p = (const uint16_t *)base + at;
#if defined(__AVX512F__)
        return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
        return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
        return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
        vf v;
        for (int i = 0; i < VW; i++)
            v[i] = float16_value(p[i]);
        return v;
#endif
    }
    const int8_t *p = (const int8_t *)base + at;
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vf v;
    for (int i = 0; i < VW; i++)
        v[i] = p[i];
    return v;
#endif
}

INLINE size_t type_size(int type)
{
    return type == TYPE_FLOAT32 ? 4 : type == TYPE_FLOAT24 ? 3 : type == TYPE_INT8 ? 1 : 2;
}

INLINE const float *value_row(const struct step *s, int64_t offset, int64_t stride, int64_t row)
{
    return (const float *)(s->workspace + offset) + row * stride;
}

INLINE float *target_row(const struct step *s, int64_t offset, int64_t stride, int64_t row)
{
    return (float *)(s->workspace + offset) + row * stride;
}

/* One value of each row of a tile, and the next ones. An address of x86 reaches 1, 2, 4 or 8 times what a register holds:
 * with the odd multiples of the stride, in bytes, one pointer serves all rows and one addition moves it on.
 */
enum { ODDS = MAX_ROWS / 2 };
struct column {
    const char *at;
    int64_t odd[ODDS];
};

INLINE struct column column_of(const float *first, int64_t stride, const int rows)
{
    struct column column = {.at = (const char *)first};
#pragma GCC unroll 8
    for (int i = 0; i < rows / 2; i++)
        column.odd[i] = (2 * i + 1) * stride * (int64_t)sizeof(float);
    return column;
}

INLINE float in_row(const struct column *column, const int row)
{
    const int twos = row ? __builtin_ctz(row) : 0;
    return *(const float *)(column->at + (row ? column->odd[row >> (twos + 1)] << twos : 0));
}

INLINE void next_column(struct column *column, const int rows)
{
    column->at += sizeof(float);
    /* Hides where they came from, or the compiler would keep a register for each row after all; others than x86 have
     * enough. */
    __asm__("" : "+r"(column->at));
#if defined(__x86_64__)
#pragma GCC unroll 8
    for (int i = 0; i < rows / 2; i++)
        __asm__("" : "+r"(column->odd[i]));
#else
    (void)rows;
#endif
}

/* Rows an operation works on in this step. */
INLINE int64_t num_rows(const struct step *s, const struct op *op)
{
    if (op->rows == ROWS_TOKENS)
        return s->num_tokens;
    if (op->rows == ROWS_SELECTED)
        return s->num_selected;
    return smaller(larger(s->num_scored - op->slice * SLICE_ROWS, 0), SLICE_ROWS);
}

#endif
