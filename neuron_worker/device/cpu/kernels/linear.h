/* act(x @ W.T * scale + bias) + residual.
 *
 * W is packed in panels of PANEL output channels, [panel][in][PANEL]; one item of work is one panel (or a panel for
 * part of the rows). A tile of rows x PANEL sums stays in registers while `in` runs from first to last, one fused
 * product at a time: the same chain for an output element whatever the rows beside it. With rows for many tiles
 * a narrow panel is widened once into the thread's scratch, which changes no number.
 *
 * A gate's panel holds PANEL / 2 gate channels, then the same channels of the up projection.
 */
#include "product.h"

/* Measured. Widening inside the tile is all but free where one instruction does it: ten tiles still bear it. Of float32
 * weights, tiles of few rows wait for memory and have no instruction to spare; the others hide it best when it is asked
 * for twice. Which are few differs by maker: on Intel's processors with AVX-512 a single row, on AMD's four.
 */
#if defined(__AVX512F__)
enum { TILES_WORTH_WIDENING = 10, FEW_ROWS = 4, FEW_ROWS_OF_INTEL = 1 };
#elif defined(__AVX2__) || defined(__aarch64__)
enum { TILES_WORTH_WIDENING = 10, FEW_ROWS = 2, FEW_ROWS_OF_INTEL = FEW_ROWS };
#else
enum { TILES_WORTH_WIDENING = 2, FEW_ROWS = 2, FEW_ROWS_OF_INTEL = FEW_ROWS };
#endif
enum { NEAR_BYTES = 1536, NEAR_BYTES_OF_24_BITS = 4096, FAR_BYTES = 8192 };

/* One input: `rows` values times one vector of the panel after the other. `x` goes on to the next input. */
INLINE void add_products(vf sums[MAX_ROWS][NV], struct column *x, const char *at, const int rows, const int type)
{
    vf w[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++)
        w[v] = widen(at, v * VW, type);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf value = splat(in_row(x, r));
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            sums[r][v] = fma_(value, w[v], sums[r][v]);
    }
    next_column(x, rows);
}

/* `rows` and `type` are constants where this is inlined: the sums live in registers. Memory is asked for as the panel
 * goes by: what is `ahead` into the second-level cache, and the panel's own into the first where there is time for it.
 */
INLINE void tile_of(const float *x, int64_t x_stride, const void *panel, struct ahead ahead, int64_t in, float *sums_out,
                    const int rows, const int type, const int few_rows, const int lines)
{
    vf sums[MAX_ROWS][NV];
    const int step_bytes = PANEL * (int)type_size(type), is_wide = type == TYPE_FLOAT32 || type == TYPE_FLOAT24;
    const int steps = rows <= few_rows && step_bytes < 64 ? 64 / step_bytes : 1;
    const char *at = panel;
    struct column column = column_of(x, x_stride, rows);
    int64_t k = 0;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            sums[r][v] = splat(0.0f);
    for (; k + steps <= in; k += steps) {
#pragma GCC unroll 2
        for (int line = 0; line < steps * step_bytes; line += 64)
            if (rows > few_rows || !is_wide)
                __builtin_prefetch(at + NEAR_BYTES + line);
        if (rows > few_rows || is_wide)
            ask_for(&ahead, lines);
#pragma GCC unroll 4
        for (int step = 0; step < steps; step++)
            add_products(sums, &column, at + step * step_bytes, rows, type);
        at += steps * step_bytes;
    }
    for (; k < in; k++, at += step_bytes)
        add_products(sums, &column, at, rows, type);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            store(sums_out + r * PANEL + v * VW, sums[r][v]);
}

#define TILE_CASE(R, TYPE, FEW, LINES) case R: tile_of(x, x_stride, panel, ahead, in, sums, R, TYPE, FEW, LINES); break;
#define DEFINE_TILES(NAME, TYPE, FEW, LINES) \
    static void NAME(const float *x, int64_t x_stride, const void *panel, struct ahead ahead, int64_t in, int64_t rows, \
                     float *sums) \
    { \
        switch (rows) { CASES(TILE_CASE, TYPE, FEW, LINES) } \
    }
DEFINE_TILES(tiles_float16, TYPE_FLOAT16, FEW_ROWS, 1)
DEFINE_TILES(tiles_bfloat16, TYPE_BFLOAT16, FEW_ROWS, 1)
DEFINE_TILES(tiles_int8, TYPE_INT8, FEW_ROWS, 1)
DEFINE_TILES(tiles_float32, TYPE_FLOAT32, FEW_ROWS, 1)
#if defined(__AVX512F__)
DEFINE_TILES(tiles_float24, TYPE_FLOAT24, FEW_ROWS, 2)
DEFINE_TILES(tiles_float32_by_two_lines, TYPE_FLOAT32, FEW_ROWS, 2)
DEFINE_TILES(tiles_float32_of_intel, TYPE_FLOAT32, FEW_ROWS_OF_INTEL, 1)
DEFINE_TILES(tiles_float32_of_intel_by_two_lines, TYPE_FLOAT32, FEW_ROWS_OF_INTEL, 2)
#else
_Static_assert(!(KEEPS & 1 << TYPE_FLOAT24), "weights of 24 bits have no tiles here");
#endif

typedef void (*tiles_function)(const float *, int64_t, const void *, struct ahead, int64_t, int64_t, float *);

static int is_intel(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

static tiles_function tiles_of(int64_t type, int of_intel, int lines)
{
    switch (type) {
    case TYPE_FLOAT16: return tiles_float16;
    case TYPE_BFLOAT16: return tiles_bfloat16;
    case TYPE_INT8: return tiles_int8;
    }
#if defined(__AVX512F__)
    if (type == TYPE_FLOAT24)
        return tiles_float24;
    if (of_intel)
        return lines > 1 ? tiles_float32_of_intel_by_two_lines : tiles_float32_of_intel;
    return lines > 1 ? tiles_float32_by_two_lines : tiles_float32;
#else
    (void)of_intel, (void)lines; /* a step is a line at most, and few rows are as many by any maker */
    return tiles_float32;
#endif
}

INLINE void widen_panel_as(float *to, const void *panel, int64_t values, const int type)
{
    const char *at = panel;
    for (int64_t i = 0; i < values; i += PANEL, at += PANEL * type_size(type))
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            store(to + i + v * VW, widen(at, v * VW, type));
}

static void widen_panel(float *to, const void *panel, int64_t values, int64_t type)
{
    switch (type) {
    case TYPE_FLOAT16: widen_panel_as(to, panel, values, TYPE_FLOAT16); break;
    case TYPE_BFLOAT16: widen_panel_as(to, panel, values, TYPE_BFLOAT16); break;
#if defined(__AVX512F__)
    case TYPE_FLOAT24: widen_panel_as(to, panel, values, TYPE_FLOAT24); break;
#endif
    default: widen_panel_as(to, panel, values, TYPE_INT8);
    }
}

INLINE struct split split_linear(const struct step *s, const struct op *op)
{
    int64_t least_tiles = op->weight_type == TYPE_FLOAT32 ? TILES_WORTH_A_PASS : TILES_WORTH_WIDENING;
    return split_of(s, op, MAX_ROWS, least_tiles, op->x_stride * (int64_t)sizeof(float),
                    op->in * PANEL * (int64_t)type_size(op->weight_type));
}

static int64_t count_linear(const struct step *s, const struct op *op) { return num_items(split_linear(s, op)); }

static void run_linear(const struct step *s, const struct op *op, int64_t item, struct thread *thread)
{
    if (thread->is_first)
        thread->split = split_linear(s, op);
    const struct piece piece = piece_of(&thread->split, item);
    int64_t rows = piece.end - piece.first, num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, type = op->weight_type;
    const int64_t step_bytes = PANEL * (int64_t)type_size(type);
    const char *weights = (const char *)op->weight + piece.panel * thread->split.panel_bytes;
    float sums[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    if (num_tiles >= TILES_WORTH_WIDENING && type != TYPE_FLOAT32) {
        widen_panel(thread->scratch, weights, op->in * PANEL, type);
        weights = (const char *)thread->scratch;
        type = TYPE_FLOAT32;
    }
    const int of_intel = type == TYPE_FLOAT32 && is_intel(), few_rows = of_intel ? FEW_ROWS_OF_INTEL : FEW_ROWS;
    for (int64_t i = 0; i < num_tiles; i++) {
        int64_t first = piece.first + i * rows / num_tiles, last = piece.first + (i + 1) * rows / num_tiles;
        const int64_t near = type == TYPE_FLOAT24 ? NEAR_BYTES_OF_24_BITS : NEAR_BYTES;
        const struct ahead own = {weights + (last - first > few_rows ? FAR_BYTES : near),
                                  PANEL * (int64_t)type_size(type)};
        const struct ahead ahead = ahead_of(op, thread, i, num_tiles, step_bytes, rows / num_tiles > few_rows, own);
        const tiles_function run = tiles_of(type, of_intel, lines_of(ahead));
        ask_for_targets(s, op, piece.panel * PANEL, first, last);
        run(value_row(s, op->x, op->x_stride, first), op->x_stride, weights, ahead, op->in, last - first, sums);
        finish_rows(s, op, piece.panel * PANEL, first, last, sums);
    }
}
