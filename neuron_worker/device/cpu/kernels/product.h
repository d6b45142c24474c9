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

/* What comes after the sums of one row of a tile; `channel` counts in the order of the panels. */
static void finish_row(const struct step *s, const struct op *op, int64_t channel, int64_t row, const float *tile)
{
    vf sums[NV];
    int64_t column = channel;
    int vectors = NV;
    for (int v = 0; v < NV; v++) {
        sums[v] = load(tile + v * VW);
        vf bias = op->bias ? load(op->bias + channel + v * VW) : splat(0.0f);
        sums[v] = (op->scale ? sums[v] * load(op->scale + channel + v * VW) : sums[v]) + bias;
    }
    if (op->activation == ACT_SILU_GATE || op->activation == ACT_GELU_GATE) {
        column /= 2;
        vectors = GATE_VECTORS;
        for (int v = 0; v < GATE_VECTORS; v++)
            sums[v] = (op->activation == ACT_SILU_GATE ? silu(sums[v]) : gelu(sums[v])) * sums[v + GATE_VECTORS];
    } else if (op->activation == ACT_GELU_TANH) {
        for (int v = 0; v < NV; v++)
            sums[v] = gelu_tanh(sums[v]);
    } else if (op->activation == ACT_GELU) {
        for (int v = 0; v < NV; v++)
            sums[v] = gelu(sums[v]);
    }
    float *y = target_row(s, op->y, op->y_stride, row) + column;
    const float *residual = op->residual == NO_VALUE
                                ? NULL : value_row(s, op->residual, op->residual_stride, row) + column;
    for (int v = 0; v < vectors; v++)
        store(y + v * VW, residual ? sums[v] + load(residual + v * VW) : sums[v]);
}

/* Rows are cut for more threads only where there are few panels for them. */
INLINE int64_t row_blocks(const struct step *s, const struct op *op, int64_t tile_rows)
{
    int64_t rows = num_rows(s, op), panels = round_up(op->out, PANEL) / PANEL;
    int64_t wanted = (4 * s->num_threads + panels - 1) / panels;
    return larger(smaller(wanted, rows / tile_rows), 1);
}

#endif
