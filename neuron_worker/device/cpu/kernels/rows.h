/* What is done to each token by itself: look-up, norms, rope, the write to the cache, the choice of rows. */
#include "norm.h"

INLINE void add_table_row(float *y, const void *table, int64_t type, int64_t row, int64_t width, int add)
{
    for (int64_t i = 0; i < width; i++) {
        size_t at = (size_t)(row * width + i);
        float value = type == TYPE_FLOAT32 ? ((const float *)table)[at]
                      : type == TYPE_FLOAT16 ? float16_value(((const uint16_t *)table)[at])
                                             : bfloat16_value(((const uint16_t *)table)[at]);
        y[i] = add ? y[i] + value : value;
    }
}

static void run_embed(const struct step *s, const struct op *op, int64_t token, struct thread *thread)
{
    float *y = target_row(s, op->y, op->y_stride, token);
    (void)thread;
    add_table_row(y, op->weight, op->weight_type, s->ids[token], op->out, 0);
    if (op->second)
        add_table_row(y, op->second, op->second_type, s->positions[token], op->out, 1);
}

static void run_norm(const struct step *s, const struct op *op, int64_t row, struct thread *thread)
{
    (void)thread;
    norm_row(value_row(s, op->x, op->x_stride, row), target_row(s, op->y, op->y_stride, row), op->weight, op->bias,
             op->in, (float)op->number, op->kind_of_norm);
}

/* In place: y is x. `weight` for queries, `second` for keys. */
static void run_head_norm(const struct step *s, const struct op *op, int64_t token, struct thread *thread)
{
    float *qkv = target_row(s, op->y, op->y_stride, token);
    (void)thread;
    for (int64_t head = 0; head < op->heads + op->kv_heads; head++)
        norm_row(qkv + head * op->head_dim, qkv + head * op->head_dim, head < op->heads ? op->weight : op->second,
                 NULL, op->head_dim, (float)op->number, NORM_RMS);
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half)
{
    int64_t i = 0;
    for (; i + VW <= half; i += VW) {
        vf a = load(head + i), b = load(head + half + i), c = load(cosines + i), d = load(sines + i);
        store(head + i, fma_(a, c, -(b * d)));
        store(head + half + i, fma_(b, c, a * d));
    }
    for (; i < half; i++) {
        vf a = splat(head[i]), b = splat(head[half + i]), c = splat(cosines[i]), d = splat(sines[i]);
        head[i] = fma_(a, c, -(b * d))[0];
        head[half + i] = fma_(b, c, a * d)[0];
    }
}

/* Rope on queries and keys where the model has it (`weight` is its table), then keys and values go to the cache. */
static void run_place(const struct step *s, const struct op *op, int64_t token, struct thread *thread)
{
    int64_t dim = op->head_dim, position = s->positions[token], lanes = s->key_lanes;
    float *qkv = target_row(s, op->y, op->y_stride, token);
    (void)thread;
    if (op->weight) {
        const float *table = (const float *)op->weight + position * dim;
        for (int64_t head = 0; head < op->heads + op->kv_heads; head++)
            rotate(qkv + head * dim, table, table + dim / 2, dim / 2);
    }
    int64_t block = s->sequences[s->sequence_of[token]].blocks[position / s->block_size];
    int64_t slot = position % s->block_size;
    for (int64_t head = 0; head < op->kv_heads; head++) {
        const float *key = qkv + (op->heads + head) * dim, *value = key + op->kv_heads * dim;
        int64_t base = op->layer * layer_floats(s) + head_floats(s, block, head);
        float *to = s->keys + base + slot / lanes * lanes * dim + slot % lanes;
        for (int64_t d = 0; d < dim; d++)
            to[d * lanes] = key[d];
        memcpy(s->values + base + slot * dim, value, (size_t)dim * sizeof(float));
    }
}

static void run_select(const struct step *s, const struct op *op, int64_t row, struct thread *thread)
{
    (void)thread;
    memcpy(target_row(s, op->y, op->y_stride, row), value_row(s, op->x, op->x_stride, s->selected[row].token),
           (size_t)op->in * sizeof(float));
}

/* Rows of one slice of the prompt positions to score. */
static void run_gather(const struct step *s, const struct op *op, int64_t row, struct thread *thread)
{
    (void)thread;
    int64_t token = s->scored[op->slice * SLICE_ROWS + row];
    memcpy(target_row(s, op->y, op->y_stride, row), value_row(s, op->x, op->x_stride, token),
           (size_t)op->in * sizeof(float));
}

/* The model's feature of a token, for a draft to come. */
static void run_keep(const struct step *s, const struct op *op, int64_t token, struct thread *thread)
{
    (void)thread;
    memcpy(feature_at(s, s->sequences[s->sequence_of[token]].blocks, s->positions[token]),
           value_row(s, op->x, op->x_stride, token), (size_t)op->in * sizeof(float));
}

/* The feature of the position before: the model's where it has computed one, zeros before the first token, and then
 * what the draft itself made of the token before. */
static void run_recall(const struct step *s, const struct op *op, int64_t token, struct thread *thread)
{
    float *y = target_row(s, op->y, op->y_stride, token);
    const int64_t position = s->positions[token];
    const size_t size = (size_t)op->in * sizeof(float);
    (void)thread;
    if (s->round)
        memcpy(y, value_row(s, op->x, op->x_stride, s->carried[token]), size);
    else if (position)
        memcpy(y, feature_at(s, s->sequences[s->sequence_of[token]].blocks, position - 1), size);
    else
        memset(y, 0, size);
}

/* Rows of x, `in` wide, and those of `residual`, `out` wide, side by side. */
static void run_join(const struct step *s, const struct op *op, int64_t row, struct thread *thread)
{
    float *y = target_row(s, op->y, op->y_stride, row);
    (void)thread;
    memcpy(y, value_row(s, op->x, op->x_stride, row), (size_t)op->in * sizeof(float));
    memcpy(y + op->in, value_row(s, op->residual, op->residual_stride, row), (size_t)op->out * sizeof(float));
}
