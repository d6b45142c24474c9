/* Turning weights into panels, once, when a model is loaded. The layout is described in `linear.h`. */
#include "simd.h"

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Round to nearest, ties to even, as every converter does. */
INLINE uint16_t to_float16(float value)
{
    uint32_t bits, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {      /* below the smallest normal number: a multiple of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return (uint16_t)(sign | (uint32_t)rintf(magnitude * 0x1p24f));
    }
    bits -= 0x38000000;
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* Symmetric int8: the largest magnitude of the row becomes 127. */
static float int8_scale(const float *row, int64_t in)
{
    vf most = splat(0.0f);
    float lanes[VW], largest = 0.0f;
    int64_t k = 0;
    for (; k + VW <= in; k += VW)
        most = max_((vf)((vi)load(row + k) & 0x7fffffff), most);
    store(lanes, most);
    for (int i = 0; i < VW; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    for (; k < in; k++)
        largest = fabsf(row[k]) > largest ? fabsf(row[k]) : largest;
    return largest > 0.0f ? largest / 127.0f : 1.0f;
}

INLINE int8_t to_int8(float value) { return (int8_t)(value > 127.0f ? 127.0f : value < -128.0f ? -128.0f : value); }

enum { PACK_COLUMNS = 16 };

/* Left to itself the compiler gathers from the rows, which takes longer than one number after the other. */
#if defined(__GNUC__) && !defined(__clang__)
#define ONE_BY_ONE __attribute__((noinline, optimize("no-tree-vectorize")))
#else
#define ONE_BY_ONE __attribute__((noinline))
#endif

/* `rows` of consecutive channels of one panel, a few columns at a time: reads and writes both run along memory. */
#define DEFINE_PACK(NAME, TYPE, CONVERT) \
    ONE_BY_ONE static void NAME##_turned(TYPE piece[PANEL][PACK_COLUMNS], int64_t columns, int64_t rows, TYPE *to) \
    { \
        for (int64_t c = 0; c < columns; c++) \
            for (int64_t r = 0; r < rows; r++) \
                to[c * PANEL + r] = piece[r][c]; \
    } \
    static void NAME(const float *source, int64_t in, int64_t rows, const float *scale, TYPE *to) \
    { \
        (void)scale; \
        for (int64_t k = 0; k < in; k += PACK_COLUMNS) { \
            TYPE piece[PANEL][PACK_COLUMNS]; \
            const int64_t columns = smaller(PACK_COLUMNS, in - k); \
            for (int64_t r = 0; r < rows; r++) \
                for (int64_t c = 0; c < columns; c++) { \
                    const float value = source[r * in + k + c]; \
                    piece[r][c] = CONVERT; \
                } \
            NAME##_turned(piece, columns, rows, to + k * PANEL); \
        } \
    }
DEFINE_PACK(pack_float32, float, value)
DEFINE_PACK(pack_float16, uint16_t, to_float16(value))
DEFINE_PACK(pack_bfloat16, uint16_t, to_bfloat16(value))
DEFINE_PACK(pack_int8, int8_t, to_int8(rintf(value / scale[r])))

/* Four inputs of a channel side by side: see `dot.h`. */
static void pack_uint8(const float *source, int64_t in, int64_t rows, const float *scale, uint8_t *to)
{
    for (int64_t k = 0; k < in; k += 4)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < smaller(4, in - k); c++)
                to[k * PANEL + r * 4 + c] =
                    (uint8_t)(128 + to_int8(rintf(source[r * in + k + c] / scale[r])));
}

/* The first two bytes of all channels, then the third of each; the last is zero. `to` is the panel. */
static void pack_float24(const float *source, int64_t in, int64_t rows, int64_t channel, uint8_t *to)
{
    for (int64_t k = 0; k < in; k++, to += 3 * PANEL)
        for (int64_t r = 0; r < rows; r++) {
            uint32_t bits;
            uint16_t high;
            memcpy(&bits, source + r * in + k, 4);
            high = (uint16_t)(bits >> 16);
            memcpy(to + 2 * (channel + r), &high, 2);
            to[2 * PANEL + channel + r] = (uint8_t)(bits >> 8);
        }
}

static void pack_run(const struct pack_job *job, const float *source, int64_t channel, int64_t rows)
{
    const int64_t in = job->in, panel = channel / PANEL, at = panel * in * PANEL + channel % PANEL;
    if (job->type == TYPE_INT8 || job->type == TYPE_UINT8)
        for (int64_t r = 0; r < rows; r++)
            job->scale[channel + r] = int8_scale(source + r * in, in);
    switch (job->type) {
    case TYPE_FLOAT32: pack_float32(source, in, rows, NULL, (float *)job->panels + at); break;
    case TYPE_FLOAT16: pack_float16(source, in, rows, NULL, (uint16_t *)job->panels + at); break;
    case TYPE_BFLOAT16: pack_bfloat16(source, in, rows, NULL, (uint16_t *)job->panels + at); break;
    case TYPE_FLOAT24:
        pack_float24(source, in, rows, channel % PANEL, (uint8_t *)job->panels + panel * in * PANEL * 3);
        break;
    case TYPE_INT8: pack_int8(source, in, rows, job->scale + channel, (int8_t *)job->panels + at); break;
    default:
        pack_uint8(source, in, rows, job->scale + channel,
                   (uint8_t *)job->panels + panel * round_up(in, 4) * PANEL + channel % PANEL * 4);
    }
}

static void pack(const struct pack_job *job, int64_t first, int64_t rows)
{
    const int64_t together = job->is_gate ? GATE_CHANNELS : PANEL;
    for (int64_t i = first; i < first + rows;) {
        int64_t channel = job->first_row + i, count = smaller(together - channel % together, first + rows - i);
        if (job->is_gate)
            channel = channel / together * PANEL + channel % together + job->gate_half * together;
        pack_run(job, job->source + i * job->in, channel, count);
        i += count;
    }
}
