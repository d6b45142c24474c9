/* From a row of logits to a token, or to the scores of a prompt position.
 *
 * Sampling: weights are exp((logit - largest) / temperature). min_p drops weights below min_p (the largest is 1);
 * top_k then keeps the k largest; top_p then keeps a token if those before it hold less than top_p of the mass that
 * is left. Equal weights rank by id, the lower first. The uniform number picks the first token, in the order of ids,
 * at which the running sum of kept weights exceeds its share. Nothing is sorted: the smallest weight to keep is found
 * by bisecting the bits of a float32.
 */
#include "simd.h"

enum { DRAW_BLOCK = 256 };

typedef int32_t vi_unaligned __attribute__((vector_size(VW * 4), aligned(4), may_alias));
INLINE vi load_ints(const int32_t *p) { return *(const vi_unaligned *)p; }

static float largest_of(const float *row, int64_t count)
{
    vf most[LV];
    float lanes[LANES], largest = row[0];
    int64_t i = 0;
    for (int v = 0; v < LV; v++)
        most[v] = splat(largest);
    for (; i + LANES <= count; i += LANES)
        for (int v = 0; v < LV; v++)
            most[v] = max_(load(row + i + v * VW), most[v]);
    for (; i < count; i++)
        largest = row[i] > largest ? row[i] : largest;
    for (int v = 0; v < LV; v++)
        store(lanes + v * VW, most[v]);
    for (int j = 0; j < LANES; j++)
        largest = lanes[j] > largest ? lanes[j] : largest;
    return largest;
}

/* The lowest id among the largest. */
static int32_t greedy_of(const float *row, int64_t count)
{
    float largest = largest_of(row, count);
    for (int64_t i = 0; i < count; i += DRAW_BLOCK) {
        int64_t end = smaller(i + DRAW_BLOCK, count);
        int found = 0;
        for (int64_t j = i; j < end; j++)
            found |= row[j] == largest;
        for (int64_t j = i; found && j < end; j++)
            if (row[j] == largest)
                return (int32_t)j;
    }
    return 0;
}

/* Keys order as the values they stand for: a float's bits where it is not negative. */
struct selection {
    const int32_t *keys;          /* padded with INT32_MIN to a multiple of LANES */
    int64_t count;
    int32_t *work;                /* room for as many */
    int by_mass;                  /* measure: the sum of the weights, or how many there are */
};

/* Measure of the keys in [low, high), and how many they are. */
static double measure(const struct selection *s, int32_t low, int32_t high, int64_t *number)
{
    vf mass[LV] = {{0}};
    vi counts = {0};
    for (int64_t i = 0; i < s->count; i += LANES)
        for (int v = 0; v < LV; v++) {
            vi key = load_ints(s->keys + i + v * VW), in = (key >= low) & (key < high);
            counts -= in;
            mass[v] += (vf)(key & in);
        }
    *number = 0;
    for (int i = 0; i < VW; i++)
        *number += counts[i];
    return s->by_mass ? (double)fold(mass) : (double)*number;
}

static void keep_between(struct selection *s, int32_t low, int32_t high)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < s->count; i += LANES) {
        int any = 0;
        for (int j = 0; j < LANES; j++)
            any |= (s->keys[i + j] >= low) & (s->keys[i + j] < high);
        for (int j = 0; any && j < LANES; j++) {
            int32_t key = s->keys[i + j];
            s->work[kept] = key;
            kept += (key >= low) & (key < high);
        }
    }
    while (kept % LANES)
        s->work[kept++] = INT32_MIN;
    s->keys = s->work;
    s->count = kept;
}

/* Where a ranking is cut: keys above `least` stay, and the first `equal` of those equal to it. */
struct cut {
    int32_t least;
    int64_t equal;
};

/* Cuts where the keys kept first measure at least `target`; at `low` if all of them measure less. */
static struct cut find_cut(struct selection s, int32_t low, int32_t high, double target)
{
    double above = 0.0;
    int64_t undecided = s.count, upper;
    float weight;
    while ((int64_t)high - low > 1 && undecided > 0) {
        int32_t middle = (int32_t)(low + ((int64_t)high - low) / 2);
        double part = measure(&s, middle, high, &upper);
        if (above + part >= target) {
            low = middle;
            undecided = upper;
        } else {
            above += part;
            high = middle;
            undecided -= upper;
        }
        if (undecided < s.count / 4)
            keep_between(&s, low, high);
    }
    memcpy(&weight, &low, 4);
    double wanted = ceil(s.by_mass ? (target - above) / (double)weight : target - above);
    return (struct cut){low, wanted < 1.0 ? 1 : wanted < 1e9 ? (int64_t)wanted : 1000000000};
}

/* Weights beyond the cut become 0. */
static void drop_beyond(float *weights, int64_t count, struct cut cut)
{
    vi equals = {0};
    int64_t equal = 0;
    for (int64_t i = 0; i < count; i += VW) {
        vi key = (vi)load(weights + i);
        equals -= key == cut.least;
        store(weights + i, (vf)(key & (key >= cut.least)));
    }
    for (int i = 0; i < VW; i++)
        equal += equals[i];
    for (int64_t i = count - 1; equal > cut.equal; i--)
        if (memcmp(weights + i, &cut.least, 4) == 0) {
            weights[i] = 0.0f;
            equal--;
        }
}

static double total_of(const float *weights, int64_t count)
{
    vf sums[LV] = {{0}};
    for (int64_t i = 0; i < count; i += LANES)
        for (int v = 0; v < LV; v++)
            sums[v] += load(weights + i + v * VW);
    return (double)fold(sums);
}

static int32_t draw(const float *weights, int64_t count, double uniform)
{
    double total = 0.0, sum = 0.0;
    int32_t last = 0;
    for (int64_t i = 0; i < count; i += DRAW_BLOCK)
        total += total_of(weights + i, smaller(DRAW_BLOCK, count - i));
    for (int64_t i = 0; i < count; i += DRAW_BLOCK) {
        int64_t size = smaller(DRAW_BLOCK, count - i);
        double block = total_of(weights + i, size), at = sum;
        for (int64_t j = i; sum + block > uniform * total && j < i + size; j++) {
            at += (double)weights[j];
            if (weights[j] > 0.0f) {
                last = (int32_t)j;
                if (at > uniform * total)
                    return last;
            }
        }
        sum += block;
    }
    return last;                  /* rounding left a sliver at the end */
}

enum { KEY_OF_ONE = 0x3f800000 };

static int32_t sample_of(const float *row, int64_t vocab, float temperature, int64_t top_k, float top_p, float min_p,
                         double uniform, float *scratch)
{
    const int64_t count = round_up(vocab, LANES);
    float *weights = scratch;
    struct selection s = {(const int32_t *)weights, count, (int32_t *)(scratch + count), 0};
    const vf largest = splat(largest_of(row, vocab)), inverse = splat(1.0f / temperature);
    for (int64_t i = 0; i < count; i += VW)
        store(weights + i, exp_((load(row + i) - largest) * inverse));
    for (int64_t i = vocab; i < count; i++)
        weights[i] = 0.0f;
    if (min_p > 0.0f) {
        int32_t least;
        memcpy(&least, &min_p, 4);
        drop_beyond(weights, count, (struct cut){least < KEY_OF_ONE ? least : KEY_OF_ONE, count});
    }
    if (top_k > 0 && top_k < vocab)
        drop_beyond(weights, count, find_cut(s, 1, KEY_OF_ONE + 1, (double)top_k));
    if (top_p < 1.0f) {
        s.by_mass = 1;
        drop_beyond(weights, count, find_cut(s, 1, KEY_OF_ONE + 1, (double)top_p * total_of(weights, count)));
    }
    return draw(weights, count, uniform);
}

/* A draft's token of this round. `second`: the ids that its own stand for. */
static void run_guess(const struct step *s, const struct op *op, int64_t index, struct thread *thread)
{
    const struct selected *of = &s->selected[index];
    int32_t id = greedy_of(value_row(s, op->x, op->x_stride, index), op->in);
    (void)thread;
    s->draft->drafts[of->row * s->draft->num_drafts + s->round] = op->second ? ((const int32_t *)op->second)[id] : id;
}

static int64_t count_sample(const struct step *s, const struct op *op)
{
    (void)op;
    return s->num_selected - s->num_logit_rows;
}

static void run_sample(const struct step *s, const struct op *op, int64_t item, struct thread *thread)
{
    const struct batch *b = s->batch;
    const int64_t index = s->num_logit_rows + item, row = s->selected[index].row;
    const int64_t place = row * s->program->decode_width + s->selected[index].column;
    const float *logits = value_row(s, op->x, op->x_stride, index);
    b->tokens[place] = b->temperature[row] <= 1e-5f
                           ? greedy_of(logits, op->in)
                           : sample_of(logits, op->in, b->temperature[row], b->top_k[row], b->top_p[row],
                                       b->min_p[row], b->uniforms[place], thread->scratch);
}

struct ranked {
    int32_t key, id;
};

/* Higher key first, lower id first among equals. */
INLINE int before(struct ranked a, struct ranked b) { return a.key > b.key || (a.key == b.key && a.id < b.id); }

static void sort_ranked(struct ranked *list, int64_t count)
{
    for (int64_t build = count / 2 - 1, end = count; end > 1;) {
        int64_t at = 0;
        if (build >= 0)
            at = build--;
        else {
            struct ranked last = list[0];
            list[0] = list[--end];
            list[end] = last;
        }
        for (int64_t child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && before(list[child], list[child + 1]))
                child++;
            if (!before(list[at], list[child]))
                break;
            struct ranked moved = list[at];
            list[at] = list[child];
            list[child] = moved;
        }
    }
}

INLINE int32_t key_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

static double log_sum_exp(const float *row, int64_t count, float largest)
{
    vf sums[LV] = {{0}};
    for (int64_t i = 0; i < count; i += LANES)
        for (int v = 0; v < LV; v++) {
            float lanes[VW];
            int64_t left = count - i - v * VW;
            vf e = exp_(load(row + i + v * VW) - splat(largest));
            if (left < VW) {
                store(lanes, e);
                for (int64_t j = larger(left, 0); j < VW; j++)
                    lanes[j] = 0.0f;
                e = load(lanes);
            }
            sums[v] += e;
        }
    return (double)largest + log((double)fold(sums));
}

/* The `best` likeliest of the row. */
static void score_best(const float *row, int64_t vocab, int64_t best, double normaliser, int32_t *ids, float *logprobs,
                       float *scratch)
{
    const int64_t count = round_up(vocab, LANES), wanted = smaller(best, vocab);
    int32_t *keys = (int32_t *)scratch;
    struct ranked *list = (struct ranked *)(keys + 2 * count);
    struct selection s = {keys, count, keys + count, 0};
    int64_t place = 0;
    for (int64_t i = 0; i < count; i++)
        keys[i] = i < vocab ? key_of(row[i]) : INT32_MIN;
    struct cut cut = find_cut(s, INT32_MIN + 1, INT32_MAX, (double)wanted);
    for (int64_t i = 0; i < vocab; i++)
        if (keys[i] > cut.least || (keys[i] == cut.least && cut.equal-- > 0))
            list[place++] = (struct ranked){keys[i], (int32_t)i};
    sort_ranked(list, place);
    for (int64_t i = 0; i < place; i++) {
        ids[i] = list[i].id;
        logprobs[i] = (float)((double)row[list[i].id] - normaliser);
    }
}

static void run_score(const struct step *s, const struct op *op, int64_t item, struct thread *thread)
{
    const struct batch *b = s->batch;
    const int64_t place = s->scored_at[op->slice * SLICE_ROWS + item], best = b->top_alternatives;
    const float *row = value_row(s, op->x, op->x_stride, item);
    const float target = row[b->targets[place]];
    const double normaliser = log_sum_exp(row, op->in, largest_of(row, op->in));
    int32_t rank = 0;
    for (int64_t i = 0; i < op->in; i++)
        rank += row[i] >= target;
    b->target_logprobs[place] = (float)((double)target - normaliser);
    b->target_ranks[place] = rank;
    if (best)
        score_best(row, op->in, best, normaliser, b->top_ids + place * best, b->top_logprobs + place * best,
                   thread->scratch);
}
