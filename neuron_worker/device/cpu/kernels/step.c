/* From padded arrays to the real tokens of a step, and of a draft after it: lengths are data, padding costs nothing
 * after this. */
#include "cpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Where a refusal is written. */
struct checked {
    char *error;
    size_t size;
};

static int refuse(const struct checked *c, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->error, c->size, format, arguments);
    va_end(arguments);
    return -1;
}

static int check_run(const struct step *s, const struct checked *c, const char *what, int64_t row,
                     const struct sequence *run, int64_t room)
{
    const struct program *p = s->program;
    if (run->length < 0 || run->length > room)
        return refuse(c, "%s %lld: length %d, the shape has room for %lld", what, (long long)row, run->length,
                      (long long)room);
    if (run->position < 0 || (int64_t)run->position + run->length > p->context)
        return refuse(c, "%s %lld: positions %d to %lld, the shape's context is %lld", what, (long long)row,
                      run->position, (long long)run->position + run->length - 1, (long long)p->context);
    int64_t blocks = (run->position + run->length + s->block_size - 1) / s->block_size;
    if (blocks > p->blocks_per_row)
        return refuse(c, "%s %lld: needs %lld blocks, its table has %lld", what, (long long)row, (long long)blocks,
                      (long long)p->blocks_per_row);
    for (int64_t i = 0; i < blocks; i++)
        if (run->blocks[i] < 0 || run->blocks[i] >= s->num_blocks)
            return refuse(c, "%s %lld: block %d, the cache has blocks 0 to %lld", what, (long long)row,
                          run->blocks[i], (long long)s->num_blocks - 1);
    return 0;
}

static int refuse_token(const struct step *s, const struct checked *c, int32_t id)
{
    return refuse(c, "token id %d, the vocabulary has 0 to %lld", id, (long long)s->program->vocab - 1);
}

/* Of the sequence that is to come next. */
static int add_token(struct step *s, const struct checked *c, int32_t id, int32_t position)
{
    int64_t at = s->num_tokens++;
    if (id < 0 || id >= s->program->vocab)
        return refuse_token(s, c, id);
    s->ids[at] = id;
    s->positions[at] = position;
    s->sequence_of[at] = (int32_t)s->num_sequences;
    return 0;
}

static int add_run(struct step *s, const struct checked *c, struct sequence run, const int32_t *tokens)
{
    for (int32_t i = 0; i < run.length; i++)
        if (add_token(s, c, tokens[i], run.position + i))
            return -1;
    s->sequences[s->num_sequences++] = run;
    return 0;
}

static int add_decode_rows(struct step *s, const struct checked *c)
{
    const struct program *p = s->program;
    const struct batch *b = s->batch;
    for (int64_t row = 0; row < p->decode_rows; row++) {
        struct sequence run = {b->decode_blocks + row * p->blocks_per_row, (int32_t)s->num_tokens,
                               b->decode_lengths[row], b->decode_positions[row]};
        if (check_run(s, c, "decode row", row, &run, p->decode_width)
            || add_run(s, c, run, b->decode_tokens + row * p->decode_width))
            return -1;
    }
    return 0;
}

static int add_prompts(struct step *s, const struct checked *c)
{
    const struct program *p = s->program;
    const struct batch *b = s->batch;
    int64_t total = 0;
    for (int64_t i = 0; i < p->prompts; i++) {
        struct sequence run = {b->prefill_blocks + i * p->blocks_per_row, (int32_t)s->num_tokens,
                               b->prefill_lengths[i], b->prefill_positions[i]};
        int64_t start = b->prefill_starts[i];
        if (run.length && (start < 0 || start + run.length > p->prefill_tokens))
            return refuse(c, "prompt %lld: starts at %lld, the shape has %lld prompt tokens", (long long)i,
                          (long long)start, (long long)p->prefill_tokens);
        if ((total += run.length) > p->prefill_tokens)
            return refuse(c, "more than %lld prompt tokens", (long long)p->prefill_tokens);
        if (check_run(s, c, "prompt", i, &run, p->prefill_tokens)
            || add_run(s, c, run, b->prefill_tokens + (run.length ? start : 0)))
            return -1;
        for (int32_t t = 0; t < run.length; t++)
            if (b->targets && b->targets[start + t] >= 0) {
                if (b->targets[start + t] >= p->vocab)
                    return refuse(c, "target id %d, the vocabulary has 0 to %lld", b->targets[start + t],
                                  (long long)p->vocab - 1);
                s->scored[s->num_scored] = run.first + t;
                s->scored_at[s->num_scored++] = (int32_t)(start + t);
            }
    }
    return 0;
}

/* Output row `i`: every token of a decode row, the last one of a prompt. */
static void select_row(struct step *s, int64_t i)
{
    const struct sequence *run = &s->sequences[i];
    int is_decode = i < s->program->decode_rows;
    for (int32_t t = is_decode ? 0 : run->length - 1; t >= 0 && t < run->length; t++)
        s->selected[s->num_selected++] =
            (struct selected){run->first + t, (int32_t)i, is_decode ? t : 0};
}

static void select_rows(struct step *s)
{
    int64_t rows = s->program->decode_rows + s->program->prompts;
    for (int64_t i = 0; i < rows; i++)
        if (s->batch->want[i] == WANT_LOGITS)
            select_row(s, i);
    s->num_logit_rows = s->batch->num_logit_rows = s->num_selected;
    for (int64_t i = 0; i < rows; i++)
        if (s->batch->want[i] == WANT_TOKEN)
            select_row(s, i);
}

/* The longest attention first, so that threads finish together. */
static void plan_attention(struct step *s)
{
    int64_t most = s->program->queries_per_item;
    for (int64_t i = 0; i < s->num_sequences; i++)
        for (int64_t left = s->sequences[i].length; left > 0;) {
            int64_t queries = left % most ? left % most : most;
            left -= queries;
            s->attend_items[s->num_attend_items++] =
                (struct attend_item){(int32_t)i, (int32_t)left, (int32_t)queries};
        }
}

static void begin_step(struct step *s, const struct program *program, struct batch *batch)
{
    s->program = program;
    s->batch = batch;
    s->num_tokens = s->num_sequences = s->num_selected = s->num_logit_rows = s->num_scored = s->num_attend_items = 0;
    s->round = 0;
}

/* A draft reads them when it is asked for something. */
static void leave_to_draft(struct step *s)
{
    for (int64_t i = 0; i < s->num_tokens; i++)
        s->unread[place_of(s, s->sequences[s->sequence_of[i]].blocks, s->positions[i])] = s->ids[i] + 1;
}

int prepare_step(struct step *s, const struct program *program, struct batch *batch, char *error, size_t size)
{
    struct checked checked = {error, size};
    begin_step(s, program, batch);
    if ((program->decode_rows && add_decode_rows(s, &checked)) || (program->prompts && add_prompts(s, &checked)))
        return -1;
    if (s->unread)
        leave_to_draft(s);
    select_rows(s);
    plan_attention(s);
    batch->num_scored = s->num_scored;
    int64_t rows = program->decode_rows + program->prompts;
    for (int64_t i = 0; i < rows * program->decode_width; i++)
        batch->tokens[i] = -1;
    if (batch->target_logprobs) {
        size_t tokens = (size_t)program->prefill_tokens;
        memset(batch->target_logprobs, 0, tokens * sizeof(float));
        memset(batch->target_ranks, 0, tokens * sizeof(int32_t));
        memset(batch->top_ids, 0, tokens * (size_t)batch->top_alternatives * sizeof(int32_t));
        memset(batch->top_logprobs, 0, tokens * (size_t)batch->top_alternatives * sizeof(float));
    }
    return 0;
}

static void fill_drafts(struct draft *d, int64_t row, int64_t first, int32_t id)
{
    for (int64_t i = first; i < d->num_drafts; i++)
        d->drafts[row * d->num_drafts + i] = id;
}

/* Positions that a row has a table for. Where its table has no block yet, the scratch block takes what is written. */
static int has_place(const struct step *s, int64_t position)
{
    return position < s->program->context && position / s->block_size < s->program->blocks_per_row;
}

/* A row that a draft may be asked for: what stands of it in the step's batch. */
struct draft_row {
    struct sequence run;
    int64_t room;
};

static struct draft_row draft_row(const struct step *s, int64_t row)
{
    const struct program *p = s->program;
    const struct batch *b = s->batch;
    if (row < p->decode_rows)
        return (struct draft_row){{b->decode_blocks + row * p->blocks_per_row, 0, s->draft->lengths[row],
                                   b->decode_positions[row]},
                                  b->decode_lengths[row]};
    int64_t i = row - p->decode_rows;
    return (struct draft_row){
        {b->prefill_blocks + i * p->blocks_per_row, 0, b->prefill_lengths[i], b->prefill_positions[i]},
        p->prefill_tokens};
}

/* Whether drafts are wanted, and there is a place for the newest token. */
static int is_asked(const struct step *s, int64_t row, const struct sequence *run)
{
    return s->draft->newest[row] >= 0 && has_place(s, run->position + run->length);
}

static int check_draft_row(const struct step *s, const struct checked *c, int64_t row)
{
    struct draft_row of = draft_row(s, row);
    const struct sequence *run = &of.run;
    int32_t newest = s->draft->newest[row];
    if (check_run(s, c, "standing tokens of row", row, run, of.room))
        return -1;
    if (!is_asked(s, row, run))
        return 0;
    if (newest >= s->program->vocab)
        return refuse_token(s, c, newest);
    if (!run->length)
        return refuse(c, "row %lld: newest token %d, but no token of the row stands", (long long)row, newest);
    for (int64_t i = 0; i <= s->draft->num_drafts; i++) {
        int64_t position = run->position + run->length + i;
        int32_t block = has_place(s, position) ? run->blocks[position / s->block_size] : 0;
        if (block < 0 || block >= s->num_blocks)
            return refuse(c, "row %lld: block %d, the cache has blocks 0 to %lld", (long long)row, block,
                          (long long)s->num_blocks - 1);
    }
    return 0;
}

/* Where reading begins: at the first position before the step's that the draft has not read. */
static int32_t first_unread(const struct step *s, const struct sequence *run)
{
    for (int32_t first = 0; first < run->position; first += (int32_t)s->block_size) {
        const int32_t *unread = s->unread + place_of(s, run->blocks, first);
        for (int32_t i = 0; i < s->block_size && first + i < run->position; i++)
            if (unread[i] > 0)
                return first + i;
    }
    return run->position;
}

/* A token of the sequence that is to come next, as a step left it; one that no step has written counts as token 0. */
static void read_token(struct step *s, const int32_t *blocks, int32_t position)
{
    int64_t at = s->num_tokens++;
    int32_t *left = &s->unread[place_of(s, blocks, position)], noted = *left < 0 ? -*left : *left;
    s->ids[at] = noted ? noted - 1 : 0;
    s->positions[at] = position;
    s->sequence_of[at] = (int32_t)s->num_sequences;
    *left = -noted;
}

/* At most `most` tokens of the row, from the first unread one to `end`. */
static void read_row(struct step *s, struct sequence run, int32_t end, int64_t most)
{
    run.position = first_unread(s, &run);
    run.first = (int32_t)s->num_tokens;
    run.length = end - run.position < most ? end - run.position : (int32_t)most;
    for (int32_t i = 0; i < run.length; i++)
        read_token(s, run.blocks, run.position + i);
    s->sequences[s->num_sequences++] = run;
}

/* What stands of the row, then the newest token, after which it is guessed. */
static void read_to_newest(struct step *s, struct draft_row of, int64_t row)
{
    int32_t end = of.run.position + of.run.length, newest = s->draft->newest[row];
    read_row(s, of.run, end, end);
    int64_t at = s->num_tokens++;
    s->ids[at] = newest;
    s->positions[at] = end;
    s->sequence_of[at] = (int32_t)s->num_sequences - 1;
    s->sequences[s->num_sequences - 1].length++;
    s->selected[s->num_selected++] = (struct selected){(int32_t)at, (int32_t)row, 0};
}

/* Tokens of a round of which the program has room. */
static int64_t draft_room(const struct program *p)
{
    int64_t tokens = p->decode_rows * (p->decode_width + 1) + (p->prefill_tokens ? p->prefill_tokens + p->prompts : 0);
    return tokens > READ_AT_ONCE ? tokens : READ_AT_ONCE;
}

/* 0: the rows that are asked for are to be guessed. 1: this run reads alone, as there is no room for all that is left
 * of them; prepare again after it. -1: refused. */
int prepare_draft(struct step *s, const struct program *program, struct batch *batch, struct draft *draft, char *error,
                  size_t size)
{
    struct checked checked = {error, size};
    int64_t rows = program->decode_rows + program->prompts, room = draft_room(program), needed = 0;
    begin_step(s, program, batch);
    s->draft = draft;
    for (int64_t row = 0; row < rows; row++) {
        struct draft_row of = draft_row(s, row);
        if (check_draft_row(s, &checked, row))
            return -1;
        fill_drafts(draft, row, 0, draft->newest[row]);
        if (is_asked(s, row, &of.run))
            needed += of.run.position + of.run.length + 1 - first_unread(s, &of.run);
    }
    int reads_alone = needed > room;
    for (int64_t row = 0; row < rows; row++) {
        struct draft_row of = draft_row(s, row);
        if (!is_asked(s, row, &of.run))
            continue;
        if (reads_alone)
            read_row(s, of.run, of.run.position, room - s->num_tokens);
        else
            read_to_newest(s, of, row);
    }
    plan_attention(s);
    return reads_alone;
}

/* The next round: every row that drafts goes on with the token of the round before, where it has a place for it.
 * Nothing grows here, so a thread that is late and counts the items of an operation long done finds none left. */
void advance_draft(struct step *s)
{
    struct draft *d = s->draft;
    int64_t count = 0;
    for (int64_t i = 0; i < s->num_selected; i++) {
        struct selected of = s->selected[i];
        int32_t id = d->drafts[of.row * d->num_drafts + s->round], position = s->positions[of.token] + 1;
        const int32_t *blocks = s->sequences[s->sequence_of[of.token]].blocks;
        if (!has_place(s, position)) {
            fill_drafts(d, of.row, s->round + 1, id);
            continue;
        }
        s->ids[count] = id;
        s->positions[count] = position;
        s->sequence_of[count] = (int32_t)count;
        s->carried[count] = (int32_t)i;
        s->sequences[count] = (struct sequence){blocks, (int32_t)count, 1, position};
        s->selected[count] = (struct selected){(int32_t)count, of.row, 0};
        s->attend_items[count] = (struct attend_item){(int32_t)count, 0, 1};
        count++;
    }
    s->num_tokens = s->num_sequences = s->num_selected = s->num_attend_items = count;
    s->round++;
}
