/* What all products share: how rows are cut into items, and what comes after the sums of a tile. */
#ifndef NEURONSERVE_PRODUCT_H
#define NEURONSERVE_PRODUCT_H

#include "simd.h"

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp_(-x)); }

INLINE vf gelu(vf x)
{
    vf y;
    for (int i = 0; i < VW; i++)
        y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

INLINE vf gelu_tanh(vf x)
{
    /* 0.5 x (1 + tanh(u)) = x / (1 + e^-2u) */
    vf u = splat(0.79788456f) * fma_(splat(0.044715f) * x * x, x, x);
    return x / (splat(1.0f) + exp_(splat(-2.0f) * u));
}

INLINE int is_gate(int activation) { return activation == ACT_SILU_GATE || activation == ACT_GELU_GATE; }

INLINE int64_t target_column(int64_t channel, int activation) { return is_gate(activation) ? channel / 2 : channel; }

/* What `finish_rows` will write, so that it is near when the sums are: another thread had it last, or a step before. */
INLINE void ask_for_targets(const struct step *s, const struct op *op, int64_t channel, int64_t first, int64_t end)
{
    const int64_t floats = is_gate(op->activation) ? PANEL / 2 : PANEL;
    const float *y = target_row(s, op->y, op->y_stride, first) + target_column(channel, op->activation);
    for (int64_t row = first; row < end; row++, y += op->y_stride)
        for (int64_t line = 0; line < floats; line += 64 / (int64_t)sizeof(float))
            __builtin_prefetch(y + line, 1);
}

/* What comes after the sums of a tile's rows `first` to `end`; `channel` counts in the order of the panels. `activation`
 * is a constant where this is inlined.
 */
INLINE void finish_as(const struct step *s, const struct op *op, int64_t channel, int64_t first, int64_t end,
                      const float *tile, const int activation)
{
    const int vectors = is_gate(activation) ? GATE_VECTORS : NV;
    const int64_t column = target_column(channel, activation);
    float *y = target_row(s, op->y, op->y_stride, first) + column;
    const float *residual = op->residual == NO_VALUE
                                ? NULL : value_row(s, op->residual, op->residual_stride, first) + column;
    vf scale[NV], bias[NV];
    for (int v = 0; v < NV; v++) {
        scale[v] = op->scale ? load(op->scale + channel + v * VW) : splat(1.0f);
        bias[v] = op->bias ? load(op->bias + channel + v * VW) : splat(0.0f);
    }
    for (int64_t row = first; row < end; row++, tile += PANEL, y += op->y_stride) {
        vf sums[NV];
        for (int v = 0; v < NV; v++)
            sums[v] = load(tile + v * VW) * scale[v] + bias[v];
        for (int v = 0; v < vectors; v++) {
            switch (activation) {
            case ACT_SILU_GATE: sums[v] = silu(sums[v]) * sums[v + GATE_VECTORS]; break;
            case ACT_GELU_GATE: sums[v] = gelu(sums[v]) * sums[v + GATE_VECTORS]; break;
            case ACT_GELU_TANH: sums[v] = gelu_tanh(sums[v]); break;
            case ACT_GELU: sums[v] = gelu(sums[v]); break;
            }
            store(y + v * VW, residual ? sums[v] + load(residual + v * VW) : sums[v]);
        }
        if (residual)
            residual += op->residual_stride;
    }
}

#define FINISH_CASE(ACTIVATION) case ACTIVATION: finish_as(s, op, channel, first, end, tile, ACTIVATION); break;
static void finish_rows(const struct step *s, const struct op *op, int64_t channel, int64_t first, int64_t end,
                        const float *tile)
{
    switch (op->activation) {
    FINISH_CASE(ACT_NONE)
    FINISH_CASE(ACT_SILU_GATE)
    FINISH_CASE(ACT_GELU_GATE)
    FINISH_CASE(ACT_GELU)
    FINISH_CASE(ACT_GELU_TANH)
    }
}

/* A choice: blocks of fewer would pass the weights more often than they save passes over their inputs. */
enum { TILES_WORTH_A_PASS = 4 };

INLINE int64_t num_panels(const struct op *op) { return round_up(op->out, PANEL) / PANEL; }

/* Rows are cut for more threads where there are few panels for them, else for the cache where blocks of `least_tiles` fit,
 * which are high enough to be worth another pass over the weights. 3 parts in 10 of the cache did best of four shares
 * (`docs/performance.md`). Fewer rows must not make more items: `advance_draft`. */
INLINE struct split split_of(const struct step *s, const struct op *op, int64_t tile_rows, int64_t least_tiles,
                             int64_t row_bytes, int64_t panel_bytes)
{
    struct split split = {.rows = num_rows(s, op), .panels = num_panels(op), .panel_bytes = panel_bytes};
    int64_t most = (s->cache_bytes * 3 / 10 - 2 * panel_bytes) / row_bytes, least = least_tiles * tile_rows;
    int64_t blocks = (4 * s->num_threads + split.panels - 1) / split.panels;
    split.is_for_threads = blocks > 1;
    if (split.is_for_threads)
        blocks = smaller(blocks, split.rows / tile_rows);
    else if (most >= least)
        blocks = smaller((split.rows + most - 1) / most, split.rows / least);
    split.blocks = larger(blocks, 1);
    split.is_near = 2 * panel_bytes + split.rows / split.blocks * row_bytes <= s->cache_bytes * 5 / 8;
    return split;
}

INLINE int64_t num_items(struct split split) { return split.rows ? split.panels * split.blocks : 0; }

/* What an item computes: rows `first` to `end` of one panel. */
struct piece {
    int64_t panel, first, end;
};

/* Threads share a panel while it is near. For the cache a block of rows goes through all panels before the next one does:
 * its inputs stay there. */
INLINE struct piece piece_of(const struct split *split, int64_t item)
{
    if (split->blocks == 1)       /* without divisions: a panel of one row takes but a few thousand cycles */
        return (struct piece){item, 0, split->rows};
    int64_t run = split->is_for_threads ? split->blocks : split->panels, quotient = item / run;
    int64_t panel = split->is_for_threads ? quotient : item - quotient * run;
    int64_t block = split->is_for_threads ? item - quotient * run : quotient;
    return (struct piece){panel, block * split->rows / split->blocks, (block + 1) * split->rows / split->blocks};
}

/* What a tile asks memory for while it computes: `pace` bytes with each of its steps. */
struct ahead {
    const char *at;
    int64_t pace;
};

/* A thread's first tile asks for more of its panel, `own`; so do all where no item is known to follow. The others share
 * in bringing the panel of the thread's next item, of `step_bytes`; where it would be gone again before it is used, or
 * some have too few rows to ask, the last one does, which has the most. */
INLINE struct ahead ahead_of(const struct op *op, const struct thread *thread, int64_t tile, int64_t num_tiles,
                             int64_t step_bytes, int is_shared, struct ahead own)
{
    const struct split *split = &thread->split;
    int64_t first = split->is_near && is_shared ? thread->is_first : larger(num_tiles - 1, 1), sharers = num_tiles - first;
    if (tile < first || thread->next == NO_VALUE)
        return own;
    const char *next = (const char *)op->weight + piece_of(split, thread->next).panel * split->panel_bytes;
    return (struct ahead){next + (tile - first) * split->panel_bytes / sharers, (step_bytes + sharers - 1) / sharers};
}

/* Cache lines to ask for in each step, so that none is left out; one is enough where tiles share a panel. High tiles wait
 * for their instructions: one fewer in each step is worth 2 %. */
INLINE int lines_of(struct ahead ahead) { return ahead.pace > 64 ? 2 : 1; }

/* `lines` is a constant where this is inlined. */
INLINE void ask_for(struct ahead *ahead, const int lines)
{
    __builtin_prefetch(ahead->at, 0, 2);
    if (lines > 1)
        __builtin_prefetch(ahead->at + (ahead->pace >> 1), 0, 2);
    ahead->at += ahead->pace;
}

#endif
