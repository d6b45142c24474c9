/* A row by itself: parts of vectors at its end, and its norm. */
#ifndef NEURONSERVE_NORM_H
#define NEURONSERVE_NORM_H

#include "simd.h"

/* VW of the `left` floats at p, zeros beyond; rows of weights may end anywhere. */
INLINE vf load_part(const float *p, int64_t left)
{
    float lanes[VW] = {0};
    if (left >= VW)
        return load(p);
    memcpy(lanes, p, (size_t)left * sizeof(float));
    return load(lanes);
}

INLINE void store_part(float *p, vf v, int64_t left)
{
    float lanes[VW];
    if (left >= VW) {
        store(p, v);
        return;
    }
    store(lanes, v);
    memcpy(p, lanes, (size_t)left * sizeof(float));
}

static int64_t count_rows(const struct step *s, const struct op *op) { return num_rows(s, op); }

enum { NORM_RMS, NORM_LAYER };

/* x may be y. Sums run through 16 lanes: the same order for every width of vectors. */
INLINE void norm_row(const float *x, float *y, const float *weight, const float *bias, int64_t width, float epsilon,
                     int64_t kind)
{
    vf sums[LV] = {{0}};
    float mean = 0.0f;
    if (kind == NORM_LAYER) {
        for (int64_t i = 0; i < width; i += LANES)
            for (int v = 0; v < LV; v++)
                sums[v] += load_part(x + i + v * VW, larger(width - i - v * VW, 0));
        mean = fold(sums) / (float)width;
    }
    for (int v = 0; v < LV; v++)
        sums[v] = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES)
        for (int v = 0; v < LV; v++) {
            int64_t left = larger(width - i - v * VW, 0);
            vf d = load_part(x + i + v * VW, left) - splat(mean);
            float lanes[VW];
            if (left < VW) {      /* a mean must not leak into the lanes beyond the row */
                store(lanes, d);
                for (int64_t j = left; j < VW; j++)
                    lanes[j] = 0.0f;
                d = load(lanes);
            }
            sums[v] = fma_(d, d, sums[v]);
        }
    float scale = 1.0f / sqrtf(fold(sums) / (float)width + epsilon);
    for (int64_t i = 0; i < width; i += VW) {
        int64_t left = width - i;
        vf z = (load_part(x + i, left) - splat(mean)) * splat(scale) * load_part(weight + i, left);
        store_part(y + i, bias ? z + load_part(bias + i, left) : z, left);
    }
}

#endif
