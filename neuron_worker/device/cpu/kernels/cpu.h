/* What the parts of the library agree on: operations, batches, and the state of a step.
 *
 * A program is a flat array of `struct op`. Values live in one workspace and are named by byte offsets, so the
 * workspace may be one memory shared by all programs. `native_ops.py` mirrors the public structures field by field;
 * `ns_layout` lets it check the sizes. Integers of the engine's arrays are int32, everything else is 64 bits wide.
 */
#ifndef NEURONSERVE_CPU_H
#define NEURONSERVE_CPU_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum op_kind {
    OP_EMBED, OP_NORM, OP_LINEAR, OP_HEAD_NORM, OP_PLACE, OP_ATTEND, OP_SELECT, OP_SAMPLE, OP_GATHER, OP_SCORE,
    OP_ROUND, OP_DOT, OP_KEEP, OP_RECALL, OP_JOIN, OP_GUESS, OP_ADVANCE, OP_KINDS
};
enum value_type { TYPE_FLOAT32, TYPE_FLOAT16, TYPE_BFLOAT16, TYPE_INT8, TYPE_UINT8, TYPE_FLOAT24 };
enum activation { ACT_NONE, ACT_SILU_GATE, ACT_GELU_GATE, ACT_GELU, ACT_GELU_TANH };
enum row_set { ROWS_TOKENS, ROWS_SELECTED, ROWS_SLICE };
enum want { WANT_NOTHING, WANT_TOKEN, WANT_LOGITS };

enum which_cache { CACHE_MODEL, CACHE_DRAFT, CACHES };

/* READ_AT_ONCE: tokens of a draft's round for which every draft program has room, however small its step. */
enum { NO_VALUE = -1, SLICE_ROWS = 32, READ_AT_ONCE = 128, MAX_THREADS = 256 };

struct op {
    int64_t kind, rows;           /* op_kind, row_set */
    int64_t x, y, residual;       /* byte offsets of values in the workspace; residual may be NO_VALUE */
    int64_t x_stride, y_stride, residual_stride; /* in floats */
    int64_t in, out;              /* widths; `out` of a gate counts both halves */
    int64_t weight_type, activation;
    int64_t layer, heads, kv_heads, head_dim, window; /* window 0: none */
    int64_t first_key;            /* the first position that those after it attend to */
    int64_t slice;                /* which SLICE_ROWS of the rows to score */
    int64_t kind_of_norm;         /* 0 rms, 1 layer */
    const void *weight;           /* panels, table, norm weight */
    const float *scale, *bias;
    const void *second;           /* position table, key's norm weight, ids that guesses stand for */
    int64_t second_type;
    double number;                /* epsilon, or the scale of attention scores */
};

struct program {
    const struct op *ops;
    int64_t num_ops;
    int64_t decode_rows, decode_width, prefill_tokens, prompts, context; /* the shape */
    int64_t blocks_per_row;
    int64_t vocab;
    int64_t queries_per_item;     /* of one prompt, attended to together */
    int64_t cache;                /* which_cache */
};

/* One step, as the engine packs it; see `base.py`. A part that the shape lacks is NULL. */
struct batch {
    const int32_t *decode_tokens, *decode_positions, *decode_lengths, *decode_blocks;
    const int32_t *prefill_tokens, *prefill_starts, *prefill_lengths, *prefill_positions, *prefill_blocks;
    const int32_t *targets;
    const int32_t *want, *top_k;
    const float *temperature, *top_p, *min_p;
    const double *uniforms;
    int64_t top_alternatives;
    int32_t *tokens;              /* out [N, W] */
    float *target_logprobs;       /* out [T] */
    int32_t *target_ranks;        /* out [T] */
    int32_t *top_ids;             /* out [T, top_alternatives] */
    float *top_logprobs;          /* out [T, top_alternatives] */
    int64_t num_logit_rows;       /* out: rows of logits, first in the head's output */
    int64_t num_scored;           /* out: prompt positions that had a target */
};

/* What a draft does after a step: of the rows that it is asked for it reads what it has not read yet of all that
 * stands, and the newest token, then goes on by itself. */
struct draft {
    const int32_t *lengths;       /* [R], of the step's decode rows */
    const int32_t *newest;        /* [N], -1: none */
    int32_t *drafts;              /* out [N, num_drafts] */
    int64_t num_drafts;
};

/* A run of tokens of one request: a decode row or a prompt. */
struct sequence {
    const int32_t *blocks;
    int32_t first;                /* index of its first token among the real ones */
    int32_t length;
    int32_t position;             /* of that token */
};

struct selected {
    int32_t token;                /* which real token's row */
    int32_t row;                  /* output row, decode rows first */
    int32_t column;               /* token within the output row */
};

struct attend_item {
    int32_t sequence, query, num_queries;
};

/* Padding is gone here: `num_tokens` real tokens stand side by side, whatever the shape. */
struct step {
    const struct program *program;
    struct batch *batch;
    char *workspace;
    int64_t num_tokens, num_sequences, num_selected, num_logit_rows, num_scored, num_attend_items;
    int32_t *ids, *positions;     /* per real token */
    int32_t *sequence_of;         /* per real token */
    struct sequence *sequences;
    struct selected *selected;    /* rows that want logits first, in order; then those that want a token */
    int32_t *scored, *scored_at;  /* real token and its place in `prefill_tokens`, for each position to score */
    struct attend_item *attend_items;
    /* a draft's */
    struct draft *draft;
    int32_t *carried;             /* per token: its row among those selected in the round before */
    int64_t round;                /* 0: reads what the step left; then one token of each row at a time */
    /* cache */
    float *keys, *values;
    int64_t block_size, block_slots, key_lanes, num_blocks, cache_heads, cache_head_dim;
    float *features;              /* of the model, per position: [block][slot][feature_width] */
    int64_t feature_width;
    int32_t *unread;              /* per position, [block][slot]: its token + 1; negative once the draft has read it;
                                     0: no step has written it. NULL: there is no draft */
    int num_threads;
    int64_t cache_bytes;          /* of a core's second-level cache */
};

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floats of one layer's keys (or values). */
static inline int64_t layer_floats(const struct step *s)
{
    return s->num_blocks * s->cache_heads * s->block_slots * s->cache_head_dim;
}

/* Keys are kept transposed in groups of `key_lanes` slots, [group][head_dim][lane]; values are [slot][head_dim]. */
static inline int64_t head_floats(const struct step *s, int64_t block, int64_t head)
{
    return (block * s->cache_heads + head) * s->block_slots * s->cache_head_dim;
}

/* Of all cached positions. */
static inline int64_t place_of(const struct step *s, const int32_t *blocks, int64_t position)
{
    return blocks[position / s->block_size] * s->block_size + position % s->block_size;
}

static inline float *feature_at(const struct step *s, const int32_t *blocks, int64_t position)
{
    return s->features + place_of(s, blocks, position) * s->feature_width;
}

struct pack_job {
    const float *source;          /* [rows, in], C-contiguous */
    int64_t first_row, rows, in;  /* where they stand among the weight's rows (of their half, for a gate) */
    int64_t gate_half;            /* 0 gate or plain, 1 up */
    int64_t is_gate;
    int64_t type;
    void *panels;
    float *scale;                 /* int8 and uint8: written per row */
};

typedef int64_t (*op_count)(const struct step *, const struct op *);

/* How a product is cut into items; `product.h`. */
struct split {
    int64_t rows, panels, blocks;
    int64_t panel_bytes;
    int is_for_threads;           /* and not for the cache */
    int is_near;                  /* a panel and the next one stay in the second-level cache beside a block's inputs */
};

/* One of those at work on an operation. */
struct thread {
    float *scratch;               /* its own */
    int64_t next;                 /* its item after this one; NO_VALUE: none, or not known */
    int is_first;                 /* this item, of those that it takes */
    struct split split;           /* of a product, made with its first item */
};
typedef void (*op_run)(const struct step *, const struct op *, int64_t item, struct thread *);

/* What one instruction set brings. */
struct kernels {
    const char *name;
    int64_t panel_width, max_rows;
    int64_t keeps;                /* 1 << type of each that products widen in no time to speak of */
    op_count count[OP_KINDS];
    op_run run[OP_KINDS];
    void (*pack)(const struct pack_job *, int64_t first, int64_t rows);
};

extern const struct kernels ns_kernels_avx512, ns_kernels_avx2, ns_kernels_base;

/* What more instructions bring to products of int8 with int8; `dot.h`. */
struct dots {
    const char *name;
    op_count count_round, count_dot;
    op_run run_round, run_dot;
};

/* NULL where the compiler did not know the instructions. */
#define MAYBE __attribute__((weak))
extern const struct dots ns_dots_avx512vnni MAYBE, ns_dots_avxvnni MAYBE, ns_dots_avx512, ns_dots_avx2, ns_dots_base;

/* pool.c */
struct pool;
typedef void (*pool_job)(void *context, int thread);
struct pool *pool_open(int num_threads, int lingers); /* `lingers`: threads stay awake for a moment behind a job */
int64_t pool_num_joined(const struct pool *);   /* how often a thread took part in a job */
int64_t pool_num_lingered(const struct pool *); /* how often one stayed awake behind it */
void pool_close(struct pool *);
void pool_quiet(struct pool *); /* wait for latecomers of the last run; before its counters are reset */
void pool_run(struct pool *, pool_job, void *context);

struct counter {
    _Alignas(64) _Atomic int64_t next;
    _Atomic int64_t done;
};
void pool_wait(struct counter *, int64_t count);

#endif
