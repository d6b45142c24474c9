/* Causal attention over the paged cache, without copying the context.
 *
 * An item is one key/value head for a few consecutive queries of one sequence; its rows are (query, head of the
 * group). Scores of a row are sums over head_dim from first to last, its probabilities are summed in 16 lanes counted
 * from position 0, its values are added key by key. A row alone and a row among others therefore give the same bits:
 * a key that a row must not see has probability 0, and adding 0 changes nothing.
 */
#include "simd.h"

enum { SCORE_MARGIN = 64 };       /* floats beyond a row's last score that a tile may write */
enum { GROUPS = PANEL / 8 };      /* most groups of keys in a tile */

struct attention {
    const struct step *s;
    const int32_t *blocks;
    int64_t position;             /* of the first query */
    int64_t dim, out_stride, rows, window, least_key;
    int64_t first_key, end_key;   /* keys that some row sees */
    int64_t base_key, score_stride; /* scores[row * score_stride + key - base_key] */
    const float *keys, *values;   /* of this layer and head, block 0 */
    int64_t block_floats;         /* from one block to the next */
    float *queries, *scores, *out;
};

/* PANEL keys side by side, from groups of `lanes` keys that may lie in different blocks. */
struct key_tile {
    const float *keys[GROUPS];
    const float *next;            /* where the keys of the tile after this one begin */
    float *scores[GROUPS];        /* of row 0 */
};

INLINE vf load_keys(const struct key_tile *t, int v, int64_t d, const int lanes)
{
#if defined(__AVX512F__)
    if (lanes == 8) {
        __m256 low = _mm256_loadu_ps(t->keys[2 * v] + d * 8), high = _mm256_loadu_ps(t->keys[2 * v + 1] + d * 8);
        return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
#endif
    return load(t->keys[v * VW / lanes] + d * lanes + v * VW % lanes);
}

INLINE void store_scores(const struct key_tile *t, int v, int64_t at, vf scores, const int lanes)
{
#if defined(__AVX512F__)
    if (lanes == 8) {
        _mm256_storeu_ps(t->scores[2 * v] + at, _mm512_castps512_ps256((__m512)scores));
        _mm256_storeu_ps(t->scores[2 * v + 1] + at, _mm512_extractf32x8_ps((__m512)scores, 1));
        return;
    }
#endif
    store(t->scores[v * VW / lanes] + at + v * VW % lanes, scores);
}

INLINE void score_tile_of(const struct attention *a, const struct key_tile *tile, int64_t row, const int rows,
                          const int lanes)
{
    const struct key_tile t = *tile;
    const int64_t dim = a->dim;
    struct column queries = column_of(a->queries + row * dim, dim, rows);
    vf sums[MAX_ROWS][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            sums[r][v] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        vf k[NV];
        __builtin_prefetch(t.next + d * lanes);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            k[v] = load_keys(&t, v, d, lanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf q = splat(in_row(&queries, r));
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                sums[r][v] = fma_(q, k[v], sums[r][v]);
        }
        next_column(&queries, rows);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++)
            store_scores(&t, v, (row + r) * a->score_stride, sums[r][v], lanes);
}

/* Where a key lies, followed from one to the next: dividing for each takes as long as what is computed of a few rows. */
struct slot {
    int64_t block, offset;        /* which of the sequence's blocks, and from its first key */
};

INLINE struct slot slot_of(const struct attention *a, int64_t key)
{
    return (struct slot){key / a->s->block_size, key % a->s->block_size};
}

/* Adds probability x value over all keys of the item, for `vectors` of the head's dimensions. */
INLINE void value_tile_of(const struct attention *a, int64_t row, int64_t column, const int rows, const int vectors)
{
    const int64_t dim = a->dim, stride = a->score_stride, size = a->s->block_size;
    vf sums[MAX_ROWS][2 * NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = splat(0.0f);
    struct slot slot = slot_of(a, a->first_key);
    for (int64_t key = a->first_key; key < a->end_key;) {
        const float *values = a->values + a->blocks[slot.block] * a->block_floats + slot.offset * dim + column;
        struct column scores = column_of(a->scores + row * stride + key - a->base_key, stride, rows);
        const int64_t count = smaller(size - slot.offset, a->end_key - key);
        slot = (struct slot){slot.block + 1, 0};
        const float *next = key + count < a->end_key
                                ? a->values + a->blocks[slot.block] * a->block_floats + column : values;
        for (int64_t i = 0; i < count; i++) {
            vf w[2 * NV];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                w[v] = load(values + i * dim + v * VW);
                if (v * VW % 16 == 0)
                    __builtin_prefetch(next + i * dim + v * VW);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf p = splat(in_row(&scores, r));
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    sums[r][v] = fma_(p, w[v], sums[r][v]);
            }
            next_column(&scores, rows);
        }
        key += count;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(a->out + (row + r) * a->out_stride + column + v * VW, sums[r][v]);
}

#define SCORE_CASE(R, LANES) case R: score_tile_of(a, t, row, R, LANES); break;
#define VALUE_CASE(R, VECTORS) case R: value_tile_of(a, row, column, R, VECTORS); break;

static void score_tile(const struct attention *a, const struct key_tile *t, int64_t row, int64_t rows)
{
    if (a->s->key_lanes == 8)
        switch (rows) { CASES(SCORE_CASE, 8) }
    else
        switch (rows) { CASES(SCORE_CASE, 16) }
}

static void value_tile(const struct attention *a, int64_t row, int64_t column, int64_t rows)
{
    switch (rows) { CASES(VALUE_CASE, NV) }
}

/* Few rows leave registers for twice the columns, and memory is then read in longer runs. */
static void wide_value_tile(const struct attention *a, int64_t row, int64_t column, int64_t rows)
{
    switch (rows) { HALF_CASES(VALUE_CASE, 2 * NV) }
}

static void score_rows(const struct attention *a, const struct key_tile *t)
{
    for (int64_t row = 0; row < a->rows; row += MAX_ROWS)
        score_tile(a, t, row, smaller(a->rows - row, MAX_ROWS));
}

INLINE const float *group_keys(const struct attention *a, struct slot slot)
{
    return a->keys + a->blocks[slot.block] * a->block_floats + slot.offset * a->dim;
}

/* Groups in ascending order: the unused lanes at the end of a block are overwritten by the next block's keys. */
static void score_all(const struct attention *a)
{
    const int64_t lanes = a->s->key_lanes, size = a->s->block_size, groups = PANEL / lanes;
    struct slot slot = slot_of(a, a->first_key);
    struct key_tile t;
    int64_t filled = 0;
    slot.offset -= slot.offset % lanes;
    for (int64_t key = slot.block * size + slot.offset; key < a->end_key;) {
        t.keys[filled] = group_keys(a, slot);
        t.scores[filled++] = a->scores + key - a->base_key;
        slot.offset += lanes;
        if (slot.offset >= size)
            slot = (struct slot){slot.block + 1, 0};
        key = slot.block * size + slot.offset;
        t.next = key < a->end_key ? group_keys(a, slot) : t.keys[0];
        if (key >= a->end_key)    /* fill the last tile; what it computes twice lands in the margin */
            for (; filled < groups; filled++) {
                t.keys[filled] = t.keys[filled - 1];
                t.scores[filled] = a->scores + round_up(a->end_key - a->base_key, LANES) + LANES;
            }
        if (filled == groups) {
            score_rows(a, &t);
            filled = 0;
        }
    }
}

/* The first key that a query sees; itself at least. */
INLINE int64_t first_seen(const struct attention *a, int64_t position)
{
    return smaller(larger(a->window ? position + 1 - a->window : 0, a->least_key), position);
}

/* Scores of one row to probabilities, not yet divided by their sum, which is returned. */
static float soften(const struct attention *a, int64_t row, int64_t position)
{
    const int64_t first = first_seen(a, position), end = position + 1;
    const int64_t from = first / LANES * LANES, to = round_up(a->end_key, LANES);
    float *scores = a->scores + row * a->score_stride - a->base_key;
    vf most[LV], sums[LV];
    vi lane;
    float lanes[LANES], largest = scores[first];
    for (int i = 0; i < VW; i++)
        lane[i] = i;
    for (int v = 0; v < LV; v++) {
        most[v] = splat(largest);
        sums[v] = splat(0.0f);
    }
    for (int64_t key = first; key % LANES && key < end; key++)
        largest = scores[key] > largest ? scores[key] : largest;
    int64_t key = round_up(first, LANES);
    for (; key + LANES <= end; key += LANES)
        for (int v = 0; v < LV; v++)
            most[v] = max_(load(scores + key + v * VW), most[v]);
    for (; key < end; key++)
        largest = scores[key] > largest ? scores[key] : largest;
    for (int v = 0; v < LV; v++)
        store(lanes + v * VW, most[v]);
    for (int i = 0; i < LANES; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    for (key = a->base_key; key < from; key += VW)
        store(scores + key, splat(0.0f));
    for (; key < round_up(end, LANES); key += LANES) {
        const int is_part = key < first || key + LANES > end; /* some of these keys the row must not see */
        for (int v = 0; v < LV; v++) {
            vf p = exp_(load(scores + key + v * VW) - splat(largest));
            if (is_part) {
                vi at = lane + (int32_t)(key + v * VW);
                p = choose((at >= (int32_t)first) & (at < (int32_t)end), p, splat(0.0f));
            }
            sums[v] += p;
            store(scores + key + v * VW, p);
        }
    }
    for (; key < to; key += VW)
        store(scores + key, splat(0.0f));
    return fold(sums);
}

static int64_t count_attend(const struct step *s, const struct op *op)
{
    return s->num_attend_items * op->kv_heads;
}

static void run_attend(const struct step *s, const struct op *op, int64_t item, struct thread *thread)
{
    const struct attend_item *part = &s->attend_items[item / op->kv_heads];
    const struct sequence *sequence = &s->sequences[part->sequence];
    const int64_t head = item % op->kv_heads, group = op->heads / op->kv_heads;
    const int64_t token = sequence->first + part->query, base = op->layer * layer_floats(s) + head_floats(s, 0, head);
    struct attention a = {.s = s, .blocks = sequence->blocks, .position = sequence->position + part->query,
                          .dim = op->head_dim, .out_stride = round_up(op->head_dim, 2 * PANEL),
                          .rows = part->num_queries * group, .window = op->window,
                          .least_key = op->first_key,
                          .keys = s->keys + base, .values = s->values + base, .block_floats = head_floats(s, 1, 0)};
    a.end_key = a.position + part->num_queries;
    a.first_key = first_seen(&a, a.position);
    a.base_key = larger(a.first_key / LANES * LANES - LANES, 0);
    a.score_stride = round_up(a.end_key - a.base_key, LANES) + SCORE_MARGIN;
    a.out = thread->scratch;
    a.queries = a.out + a.rows * a.out_stride;
    a.scores = a.queries + round_up(a.rows * a.dim, LANES);
    const int64_t first = head * group * a.dim, width = group * a.dim; /* of the heads of the group, side by side */
    for (int64_t query = 0; query < part->num_queries; query++) {
        const float *q = value_row(s, op->x, op->x_stride, token + query) + first;
        for (int64_t i = 0; i < width; i++)
            a.queries[query * width + i] = q[i] * (float)op->number;
    }
    score_all(&a);
    float inverse[a.rows];
    for (int64_t query = 0, row = 0; query < part->num_queries; query++)
        for (int64_t end = row + group; row < end; row++)
            inverse[row] = 1.0f / soften(&a, row, a.position + query);
    int64_t column = 0;
    for (; a.rows <= MAX_ROWS / 2 && column + PANEL < a.dim; column += 2 * PANEL)
        wide_value_tile(&a, 0, column, a.rows);
    for (; column < a.dim; column += PANEL)
        for (int64_t row = 0; row < a.rows; row += MAX_ROWS)
            value_tile(&a, row, column, smaller(a.rows - row, MAX_ROWS));
    for (int64_t query = 0, row = 0; query < part->num_queries; query++) {
        float *y = target_row(s, op->y, op->y_stride, token + query) + first;
        for (int64_t end = row + group; row < end; row++, y += a.dim)
            for (int64_t d = 0; d < a.dim; d++)
                y[d] = a.out[row * a.out_stride + d] * inverse[row];
    }
}
