/* act(q(x) @ W.T * scale + bias) + residual in integers: x is rounded to int8 row by row, in blocks of DOT_BLOCK inputs.
 *
 * A block's scale is its largest magnitude / 127. A tile sums the products of a block exactly, makes a float of the
 * sum, times the block's scale, and adds it to the sums of the blocks before. Products and sums are never fused here:
 * every processor, and the fallback without C, gives the same bits, and a row's are its own.
 *
 * W is packed in panels of PANEL output channels, [panel][in / 4][PANEL][4], as bytes w + 128. Instructions that
 * multiply bytes want one side unsigned; what the 128 adds is the block's sum of q(x), and is taken off beforehand.
 *
 * A rounded row is DOT_WORDS words for every four inputs, then a scale and an int32 to begin with for each block.
 */
#include "norm.h"
#include "product.h"

enum { DOT_BLOCK = 64, GROUP = 4, BLOCK_GROUPS = DOT_BLOCK / GROUP };
enum { ROOM_WORDS = 2 };          /* for four inputs of a rounded row, whatever DOT_WORDS is */

/* The largest number of rows that still leaves the registers to the sums of a block; measured. */
#if defined(__AVX512F__)
enum { DOT_ROWS = 8 };
#define DOT_CASES(F, LINES) F(1, LINES) F(2, LINES) F(3, LINES) F(4, LINES) F(5, LINES) F(6, LINES) F(7, LINES) F(8, LINES)
#elif defined(__AVX2__) || defined(__aarch64__)
enum { DOT_ROWS = 6 };
#define DOT_CASES(F, LINES) F(1, LINES) F(2, LINES) F(3, LINES) F(4, LINES) F(5, LINES) F(6, LINES)
#else
enum { DOT_ROWS = 2 };
#define DOT_CASES(F, LINES) F(1, LINES) F(2, LINES)
#endif
/* Bytes ahead that memory is asked for: into the first-level cache, and with more than FEW_DOT_ROWS into the second. */
enum { NEAR_DOT_BYTES = 1536, FAR_DOT_BYTES = 8192, FEW_DOT_ROWS = 4 };

typedef vi vi_unaligned __attribute__((aligned(1), may_alias));
typedef int32_t word __attribute__((may_alias)); /* of a rounded row, whose words are floats or groups of integers */

INLINE vi load_int(const void *p) { return *(const vi_unaligned *)p; }
INLINE vi splat_int(int32_t x) { return x - (vi){}; }

/* `open_group`: VW channels x four weights, as `dot_group` wants them. `dot_group`: sums of four products each. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
enum { DOT_WORDS = 1 };
typedef vi group;
INLINE group open_group(const uint8_t *p) { return load_int(p); }
INLINE vi dot_group(vi sums, group w, const word *x)
{
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(*x));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(*x));
#endif
}
#elif defined(__SSE2__)
/* Pairs of int16: the instruction for pairs of bytes saturates. Inputs 0 and 2 are a word, 1 and 3 the other. */
enum { DOT_WORDS = 2 };
typedef uint16_t vh __attribute__((vector_size(VW * 4)));
typedef struct {
    vi even, odd;
} group;
INLINE group open_group(const uint8_t *p)
{
    vh w = (vh)load_int(p);
    return (group){(vi)(w & 255), (vi)(w >> 8)};
}
INLINE vi dot_pairs(vi w, vi x)
{
#if defined(__AVX512F__)
    return (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#endif
}
INLINE vi dot_group(vi sums, group w, const word *x)
{
    return sums + dot_pairs(w.even, splat_int(x[0])) + dot_pairs(w.odd, splat_int(x[1]));
}
#else
enum { DOT_WORDS = 1 };
typedef struct {
    vi of_input[GROUP];
} group;
INLINE group open_group(const uint8_t *p)
{
    vu w = (vu)load_int(p);
    return (group){{(vi)(w & 255), (vi)(w >> 8 & 255), (vi)(w >> 16 & 255), (vi)(w >> 24)}};
}
INLINE vi dot_group(vi sums, group w, const word *x)
{
    for (int i = 0; i < GROUP; i++)
        sums += w.of_input[i] * splat_int((int8_t)((uint32_t)*x >> 8 * i));
    return sums;
}
#endif

/* Places in a rounded row, in words. */
INLINE int64_t dot_groups(int64_t in) { return round_up(in, GROUP) / GROUP; }
INLINE int64_t dot_blocks(int64_t in) { return round_up(in, DOT_BLOCK) / DOT_BLOCK; }
INLINE int64_t scales_at(int64_t in) { return ROOM_WORDS * dot_groups(in); }
INLINE int64_t starts_at(int64_t in) { return scales_at(in) + dot_blocks(in); }

INLINE int32_t largest_lane(vi x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];
    for (int i = 1; i < VW; i++)
        largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

INLINE int32_t lane_sum(vi x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < VW; i++)
        sum += x[i];
    return sum;
#endif
}

/* As bits, magnitudes are in order, and whatever is no number is larger than all of them. */
INLINE float largest_magnitude(const float *x)
{
    vi most = splat_int(0);
    for (int64_t i = 0; i < DOT_BLOCK; i += VW) {
        vi magnitude = (vi)load(x + i) & 0x7fffffff, is_larger = magnitude > most;
        most = (is_larger & magnitude) | (~is_larger & most);
    }
    const int32_t largest = largest_lane(most);
    float value;
    memcpy(&value, &largest, 4);
    return value;
}

union packed {
    int8_t bytes[DOT_BLOCK];
    int16_t pairs[DOT_BLOCK];
};

/* Whole numbers as `dot_group` reads them. */
INLINE void pack_block(union packed *to, const int32_t *rounded)
{
    if (DOT_WORDS == 1)
#if defined(__AVX512F__)
        for (int i = 0; i < DOT_BLOCK; i += VW)
            _mm_storeu_si128((__m128i *)(to->bytes + i), _mm512_cvtepi32_epi8(_mm512_load_si512(rounded + i)));
#else
        for (int i = 0; i < DOT_BLOCK; i++)
            to->bytes[i] = (int8_t)rounded[i];
#endif
    else
        for (int i = 0; i < DOT_BLOCK; i += GROUP) {
            to->pairs[i] = (int16_t)rounded[i];
            to->pairs[i + 1] = (int16_t)rounded[i + 2];
            to->pairs[i + 2] = (int16_t)rounded[i + 1];
            to->pairs[i + 3] = (int16_t)rounded[i + 3];
        }
}

/* DOT_BLOCK values to `groups` groups, whose sum is returned. Adding `magic` rounds to an integer, ties to even. */
INLINE int32_t round_block(word *to, const float *x, float inverse, int64_t groups)
{
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23 */
    vi sums = splat_int(0);
    int32_t rounded[DOT_BLOCK] __attribute__((aligned(64)));
    union packed packed;
    for (int64_t i = 0; i < DOT_BLOCK; i += VW) {
        vi q = (vi)(load(x + i) * splat(inverse) + magic) - (vi)magic;
        sums += q;
        *(vi *)(rounded + i) = q;
    }
    pack_block(&packed, rounded);
    if (groups == BLOCK_GROUPS)
        memcpy(to, &packed, BLOCK_GROUPS * DOT_WORDS * sizeof *to);
    else
        memcpy(to, &packed, (size_t)(groups * DOT_WORDS) * sizeof *to);
    return lane_sum(sums);
}

static void round_row(word *to, const float *x, int64_t in)
{
    float *scales = (float *)(to + scales_at(in));
    word *starts = to + starts_at(in);
    for (int64_t block = 0; block < dot_blocks(in); block++) {
        const int64_t first = block * DOT_BLOCK, values = smaller(in - first, DOT_BLOCK);
        const float *from = x + first;
        float whole[DOT_BLOCK];
        if (values < DOT_BLOCK) {
            memset(whole, 0, sizeof whole);
            from = memcpy(whole, from, (size_t)values * sizeof *x);
        }
        const float largest = largest_magnitude(from);
        const int is_zero = largest < 0x1p-100f; /* its inverse might be none */
        scales[block] = is_zero ? 1.0f : largest / 127.0f;
        starts[block] = -128 * round_block(to + first / GROUP * DOT_WORDS, from, is_zero ? 0.0f : 127.0f / largest,
                                           dot_groups(values));
    }
}

/* With `weight` the row's norm is rounded. */
static void run_round(const struct step *s, const struct op *op, int64_t row, struct thread *thread)
{
    const float *x = value_row(s, op->x, op->x_stride, row);
    if (op->weight) {
        norm_row(x, thread->scratch, op->weight, op->bias, op->in, (float)op->number, op->kind_of_norm);
        x = thread->scratch;
    }
    round_row((word *)target_row(s, op->y, op->y_stride, row), x, op->in);
}

INLINE void add_groups(vi sums[DOT_ROWS][NV], const word *x, int64_t x_stride, const uint8_t *at, struct ahead *ahead,
                       const int groups, const int rows, const int lines)
{
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
        group w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const int64_t place = (g * NV + v) * VW * GROUP;
            w[v] = open_group(at + place);
            if (place % 64 == 0)
                __builtin_prefetch(at + NEAR_DOT_BYTES + place);
        }
        if (rows > FEW_DOT_ROWS)
            ask_for(ahead, lines);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                sums[r][v] = dot_group(sums[r][v], w[v], x + r * x_stride + g * DOT_WORDS);
    }
}

/* `rows` is a constant where this is inlined: the sums of a block live in registers. */
INLINE void dot_tile_of(const word *x, int64_t x_stride, const uint8_t *panel, struct ahead ahead, int64_t in,
                        float *sums_out, const int rows, const int lines)
{
    const int64_t groups = dot_groups(in);
    const float *scales = (const float *)(x + scales_at(in));
    const word *starts = x + starts_at(in);
    vf sums[DOT_ROWS][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            sums[r][v] = splat(0.0f);
    for (int64_t first = 0, block = 0; first < groups; first += BLOCK_GROUPS, block++) {
        const word *values = x + first * DOT_WORDS;
        const uint8_t *at = panel + first * GROUP * PANEL;
        vi products[DOT_ROWS][NV];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                products[r][v] = splat_int(starts[r * x_stride + block]);
        if (first + BLOCK_GROUPS <= groups)
            add_groups(products, values, x_stride, at, &ahead, BLOCK_GROUPS, rows, lines);
        else
            for (int64_t g = 0; g < groups - first; g++, values += DOT_WORDS, at += GROUP * PANEL)
                add_groups(products, values, x_stride, at, &ahead, 1, rows, lines);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                sums[r][v] += __builtin_convertvector(products[r][v], vf) * splat(scales[r * x_stride + block]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            store(sums_out + r * PANEL + v * VW, sums[r][v]);
}

#define DOT_CASE(R, LINES) case R: dot_tile_of(x, x_stride, panel, ahead, in, sums, R, LINES); break;

static void dot_tile(const word *x, int64_t x_stride, const uint8_t *panel, struct ahead ahead, int64_t in, int64_t rows,
                     float *sums)
{
    if (PANEL * GROUP > 64 && lines_of(ahead) > 1)
        switch (rows) { DOT_CASES(DOT_CASE, 2) }
    else
        switch (rows) { DOT_CASES(DOT_CASE, 1) }
}

INLINE struct split split_dot(const struct step *s, const struct op *op)
{
    const int64_t row_words = DOT_WORDS * dot_groups(op->in) + 2 * dot_blocks(op->in);
    return split_of(s, op, DOT_ROWS, TILES_WORTH_A_PASS, row_words * (int64_t)sizeof(word),
                    dot_groups(op->in) * GROUP * PANEL);
}

static int64_t count_dot(const struct step *s, const struct op *op) { return num_items(split_dot(s, op)); }

static void run_dot(const struct step *s, const struct op *op, int64_t item, struct thread *thread)
{
    if (thread->is_first)
        thread->split = split_dot(s, op);
    const struct piece piece = piece_of(&thread->split, item);
    int64_t rows = piece.end - piece.first, num_tiles = (rows + DOT_ROWS - 1) / DOT_ROWS;
    const uint8_t *weights = (const uint8_t *)op->weight + piece.panel * thread->split.panel_bytes;
    float sums[DOT_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t i = 0; i < num_tiles; i++) {
        int64_t first = piece.first + i * rows / num_tiles, last = piece.first + (i + 1) * rows / num_tiles;
        const struct ahead own = {(const char *)weights + FAR_DOT_BYTES, PANEL * GROUP};
        const struct ahead ahead = ahead_of(op, thread, i, num_tiles, PANEL * GROUP, rows / num_tiles > FEW_DOT_ROWS, own);
        ask_for_targets(s, op, piece.panel * PANEL, first, last);
        dot_tile((const word *)value_row(s, op->x, op->x_stride, first), op->x_stride, weights, ahead, op->in,
                 last - first, sums);
        finish_rows(s, op, piece.panel * PANEL, first, last, sums);
    }
}
