/* The library's face: open a session, pack weights, reserve memory, run programs.
 *
 * Everything a step needs is reserved beforehand; `ns_run` allocates nothing. `ns_maps` counts the memory taken, so
 * a test can see that it stays the same.
 */
#define _GNU_SOURCE
#include "cpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

struct region {
    char *start;
    size_t size;
};

/* Keys and values of one model. */
struct cache {
    struct region memory;
    float *keys, *values;
    int64_t layers, heads, head_dim;
};

struct session {
    struct pool *pool;
    const char *isa;
    struct kernels kernels;
    int num_threads;
    struct region workspace, scratch, lists, features, unread;
    struct cache caches[CACHES];
    size_t scratch_bytes;         /* of one thread */
    struct step step;
    struct counter *counters;     /* one per operation */
    int64_t num_counters, capacity_tokens, capacity_sequences;
    struct pack_job pack_job;     /* a copy: a latecomer may still look at it after `ns_pack` returned */
    double *profile;              /* seconds per operation of a program, or NULL */
    char error[256];
};

static _Atomic int64_t maps;

int64_t ns_maps(void) { return atomic_load(&maps); }

static void *map_pages(int64_t size, int large)
{
    if (size < 1)
        size = 1;
    void *p = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (large)
        madvise(p, (size_t)size, MADV_HUGEPAGE);
#endif
    (void)large;
    atomic_fetch_add(&maps, 1);
    return p;
}

/* Zero pages, touched when first used; large pages where the system gives them. */
void *ns_map(int64_t size) { return map_pages(size, 1); }

void ns_unmap(void *p, int64_t size)
{
    if (p)
        munmap(p, (size_t)(size < 1 ? 1 : size));
}

enum { WHEN_USED, NOW };

/* NOW: the system gives the memory here and not in the middle of a step, and in large pages. */
static int grow(struct region *region, size_t size, int when)
{
    if (region->start && region->size >= size)
        return 0;
    char *start = map_pages((int64_t)size, when == NOW);
    if (!start)
        return -1;
    if (when == NOW)
        memset(start, 0, size);
    ns_unmap(region->start, (int64_t)region->size);
    *region = (struct region){start, size};
    return 0;
}

static int failed(struct session *session, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(session->error, sizeof session->error, format, arguments);
    va_end(arguments);
    return -1;
}

int64_t ns_num_joined(const struct session *session) { return pool_num_joined(session->pool); }
int64_t ns_num_lingered(const struct session *session) { return pool_num_lingered(session->pool); }

const char *ns_error(const struct session *session) { return session->error; }

/* Sizes the caller compares with its own view of the structures. */
int64_t ns_layout(int64_t which)
{
    const int64_t sizes[] = {sizeof(struct op), sizeof(struct program), sizeof(struct batch), sizeof(struct pack_job),
                             sizeof(struct draft), SLICE_ROWS, READ_AT_ONCE, MAX_THREADS};
    return which >= 0 && which < (int64_t)(sizeof sizes / sizeof *sizes) ? sizes[which] : -1;
}

#if defined(__x86_64__)
static int has_leaf7(unsigned subleaf, int is_ecx, int bit)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, subleaf, &eax, &ebx, &ecx, &edx) && (is_ecx ? ecx : eax) >> bit & 1;
}
#endif

/* Which of the sets this processor has, the best first. The names of `library.SETS`. */
static const struct set {
    const char *name;
    const struct kernels *kernels;
    const struct dots *dots;
} sets[] = {
#if defined(__x86_64__)
    {"avx512vnni", &ns_kernels_avx512, &ns_dots_avx512vnni},
    {"avx512", &ns_kernels_avx512, &ns_dots_avx512},
    {"avxvnni", &ns_kernels_avx2, &ns_dots_avxvnni},
    {"avx2", &ns_kernels_avx2, &ns_dots_avx2},
#endif
    {"base", &ns_kernels_base, &ns_dots_base},
};

static int is_here(const struct set *set)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set->kernels == &ns_kernels_avx512 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                                                && __builtin_cpu_supports("avx512vl")
                                                && __builtin_cpu_supports("avx512dq")))
        return 0;
    if (set->kernels == &ns_kernels_avx2 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                              && __builtin_cpu_supports("f16c")))
        return 0;
    /* By number: compilers of not long ago know the instructions by no name. */
    if (set->dots == &ns_dots_avx512vnni)
        return set->dots && has_leaf7(0, 1, 11);
    if (set->dots == &ns_dots_avxvnni)
        return set->dots && has_leaf7(1, 0, 4);
#endif
    return set->dots != NULL;
}

static const struct set *find_set(const char *name)
{
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if ((!name || !*name || !strcmp(name, sets[i].name)) && is_here(&sets[i]))
            return &sets[i];
    return NULL;
}

/* The kernels of a set in one table. */
static struct kernels joined(const struct set *set)
{
    struct kernels all = *set->kernels;
    all.count[OP_ROUND] = set->dots->count_round;
    all.run[OP_ROUND] = set->dots->run_round;
    all.count[OP_DOT] = set->dots->count_dot;
    all.run[OP_DOT] = set->dots->run_dot;
    return all;
}

/* Of a core's second level, as far as the system says it and it may be believed: of cores of several kinds it names
 * one, and of a virtual machine's what the machine was given. */
static int64_t cache_bytes(void)
{
#if defined(_SC_LEVEL2_CACHE_SIZE)
    int64_t size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
    int64_t size = 0;
#endif
    return size <= 0 ? 1 << 20 : size > 2 << 20 ? 2 << 20 : size;
}

/* `lingers`: a step's answer goes to another process. NULL: this processor lacks the instruction set `isa` ("" chooses
 * the best), or memory is short. */
struct session *ns_open(int num_threads, const char *isa, int lingers)
{
    const struct set *set = find_set(isa);
    struct session *session = set ? calloc(1, sizeof *session) : NULL;
    if (!session)
        return NULL;
    session->isa = set->name;
    session->kernels = joined(set);
    session->step.cache_bytes = cache_bytes();
    session->num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    session->pool = pool_open(session->num_threads, lingers);
    if (!session->pool) {
        free(session);
        return NULL;
    }
    return session;
}

void ns_close(struct session *session)
{
    pool_close(session->pool);
    struct region *regions[] = {&session->workspace, &session->scratch, &session->lists, &session->features,
                                &session->unread, &session->caches[CACHE_MODEL].memory,
                                &session->caches[CACHE_DRAFT].memory};
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++)
        ns_unmap(regions[i]->start, (int64_t)regions[i]->size);
    free(session->counters);
    free(session);
}

const char *ns_isa(const struct session *session) { return session->isa; }
int ns_keeps(const struct session *session, int64_t type) { return session->kernels.keeps >> type & 1; }
const char *ns_panel_isa(const struct session *session) { return session->kernels.name; }
int64_t ns_panel_width(const struct session *session) { return session->kernels.panel_width; }
void *ns_workspace(const struct session *session) { return session->workspace.start; }
void ns_profile(struct session *session, double *seconds) { session->profile = seconds; }

enum { PACK_ROWS = 32 };

static void pack_rows(void *context, int thread)
{
    struct session *session = context;
    const struct pack_job *job = &session->pack_job;
    (void)thread;
    for (;;) {
        int64_t first = atomic_fetch_add(&session->counters[0].next, PACK_ROWS), rows = job->rows - first;
        if (rows <= 0)
            return;
        session->kernels.pack(job, first, rows < PACK_ROWS ? rows : PACK_ROWS);
        atomic_fetch_add(&session->counters[0].done, rows < PACK_ROWS ? rows : PACK_ROWS);
    }
}

static int reserve_counters(struct session *session, int64_t count)
{
    if (session->num_counters >= count)
        return 0;
    void *counters;
    if (posix_memalign(&counters, 64, (size_t)count * sizeof(struct counter)))
        return -1;
    free(session->counters);
    session->counters = counters;
    session->num_counters = count;
    return 0;
}

int ns_pack(struct session *session, const struct pack_job *job)
{
    pool_quiet(session->pool);
    if (reserve_counters(session, 1))
        return failed(session, "no memory");
    memset(session->counters, 0, sizeof *session->counters);
    session->pack_job = *job;
    pool_run(session->pool, pack_rows, session);
    pool_wait(session->counters, job->rows);
    return 0;
}

/* Key lanes and slots of a block: a size that is no multiple of the lanes is padded. */
int64_t ns_block_slots(int64_t block_size)
{
    int64_t lanes = block_size % 16 == 8 || block_size <= 8 ? 8 : 16;
    return round_up(block_size, lanes);
}

/* What a draft has to read of each cached position. Once the cache's size is known. */
static int remember_unread(struct session *session)
{
    struct step *s = &session->step;
    if (grow(&session->unread, (size_t)(s->num_blocks * s->block_size) * sizeof(int32_t), WHEN_USED))
        return -1;
    s->unread = (int32_t *)session->unread.start;
    return 0;
}

/* Small pages, which come when they are first written: blocks in use are scattered, and a large page for each would
 * soon hold memory for the whole cache. A draft's cache has the blocks of the model's. */
int ns_cache(struct session *session, int64_t which, int64_t layers, int64_t blocks, int64_t block_size, int64_t heads,
             int64_t head_dim)
{
    struct step *s = &session->step;
    struct cache *cache = &session->caches[which];
    s->block_size = block_size;
    s->block_slots = ns_block_slots(block_size);
    s->key_lanes = s->block_slots % 16 ? 8 : 16;
    if (block_size % 16 == 8)
        s->key_lanes = 8;
    s->num_blocks = blocks;
    size_t half = (size_t)(layers * blocks * heads * s->block_slots * head_dim) * sizeof(float);
    /* Kernels read whole vectors: up to a panel beyond the last value. */
    if (grow(&cache->memory, 2 * half + 4096, WHEN_USED) || (which == CACHE_DRAFT && remember_unread(session)))
        return failed(session, "no memory for a cache of %lld blocks (%lld bytes)", (long long)blocks,
                      (long long)(2 * half));
    cache->keys = (float *)cache->memory.start;
    cache->values = (float *)(cache->memory.start + half);
    cache->layers = layers;
    cache->heads = heads;
    cache->head_dim = head_dim;
    return 0;
}

/* A model's feature per cached position, for a draft that reads it. After `ns_cache`. */
int ns_features(struct session *session, int64_t width)
{
    struct step *s = &session->step;
    size_t size = (size_t)(s->num_blocks * s->block_size * width) * sizeof(float);
    if (grow(&session->features, size, WHEN_USED))
        return failed(session, "no memory for the features of %lld blocks (%lld bytes)", (long long)s->num_blocks,
                      (long long)size);
    s->features = (float *)session->features.start;
    s->feature_width = width;
    return 0;
}

static void use_cache(struct step *s, const struct cache *cache)
{
    s->keys = cache->keys;
    s->values = cache->values;
    s->cache_heads = cache->heads;
    s->cache_head_dim = cache->head_dim;
}

static void copy_block(void *base, size_t items, const int64_t *pair)
{
    size_t size = items * sizeof(float);
    memmove((char *)base + (size_t)pair[1] * size, (char *)base + (size_t)pair[0] * size, size);
}

void ns_copy_blocks(struct session *session, const int64_t *pairs, int64_t count)
{
    const struct step *s = &session->step;
    for (int64_t i = 0; i < count; i++) {
        for (const struct cache *cache = session->caches; cache < session->caches + CACHES; cache++) {
            size_t floats = (size_t)(cache->heads * s->block_slots * cache->head_dim);
            for (int64_t layer = 0; layer < cache->layers; layer++) {
                size_t first = (size_t)(layer * s->num_blocks) * floats;
                copy_block(cache->keys + first, floats, pairs + 2 * i);
                copy_block(cache->values + first, floats, pairs + 2 * i);
            }
        }
        if (s->features)
            copy_block(s->features, (size_t)(s->block_size * s->feature_width), pairs + 2 * i);
        if (s->unread)
            copy_block(s->unread, (size_t)s->block_size, pairs + 2 * i);
    }
}

/* Memory for the largest program so far; called for every program before the first step. */
int ns_reserve(struct session *session, int64_t workspace, int64_t scratch, int64_t ops, int64_t tokens,
               int64_t sequences)
{
    struct step *s = &session->step;
    pool_quiet(session->pool);
    size_t of_thread = (size_t)round_up(scratch, 4096);
    if (of_thread > session->scratch_bytes)
        session->scratch_bytes = of_thread;
    int64_t t = tokens > session->capacity_tokens ? tokens : session->capacity_tokens;
    int64_t n = sequences > session->capacity_sequences ? sequences : session->capacity_sequences;
    session->capacity_tokens = t;
    session->capacity_sequences = n;
    size_t lists = (size_t)(t + n) * (6 * sizeof(int32_t) + sizeof(struct sequence) + sizeof(struct selected)
                                      + sizeof(struct attend_item)) + 1024;
    if (reserve_counters(session, ops) || grow(&session->workspace, (size_t)workspace, NOW)
        || grow(&session->scratch, session->scratch_bytes * (size_t)session->num_threads, NOW)
        || grow(&session->lists, lists, NOW))
        return failed(session, "no memory for a workspace of %lld bytes", (long long)workspace);
    char *at = session->lists.start;
    s->sequences = (struct sequence *)at, at += sizeof(struct sequence) * (size_t)(t + n);
    s->selected = (struct selected *)at, at += sizeof(struct selected) * (size_t)(t + n);
    s->attend_items = (struct attend_item *)at, at += sizeof(struct attend_item) * (size_t)(t + n);
    int32_t **lists_of_ints[] = {&s->ids, &s->positions, &s->sequence_of, &s->scored, &s->scored_at, &s->carried};
    for (size_t i = 0; i < sizeof lists_of_ints / sizeof *lists_of_ints; i++)
        *lists_of_ints[i] = (int32_t *)at, at += sizeof(int32_t) * (size_t)(t + n);
    return 0;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int prepare_step(struct step *s, const struct program *program, struct batch *batch, char *error, size_t size);
int prepare_draft(struct step *s, const struct program *program, struct batch *batch, struct draft *draft, char *error,
                  size_t size);
void advance_draft(struct step *s);

/* Items of an operation that a thread has taken. */
struct span {
    int64_t first, end;
};

/* A prompt's tokens write lines of the cache's keys together, `key_lanes` of them: with spans of as many, where there are
 * enough, threads seldom want the same line. */
static int64_t span_size(const struct session *session, const struct op *op, int64_t count)
{
    const int64_t size = larger(count / (16 * session->num_threads), 1), lanes = session->step.key_lanes;
    return op->kind == OP_PLACE && count >= 4 * lanes * session->num_threads ? round_up(size, lanes) : size;
}

static struct span claim(struct counter *counter, int64_t count, int64_t size)
{
    int64_t first = atomic_fetch_add_explicit(&counter->next, size, memory_order_relaxed);
    return (struct span){first, smaller(first + size, count)};
}

/* Products claim with the last item of a span what comes after it, so that its weights may be on their way; where there
 * is an item for each thread at most, another is free for it. */
static int claims_early(const struct op *op, int64_t count, int num_threads)
{
    return (op->kind == OP_LINEAR || op->kind == OP_DOT) && count > num_threads;
}

static void run_op(struct session *session, const struct op *op, struct counter *counter, int64_t count, float *scratch)
{
    const struct kernels *kernels = &session->kernels;
    const int is_early = claims_early(op, count, session->num_threads);
    struct thread thread = {.scratch = scratch, .next = NO_VALUE, .is_first = 1};
    const int64_t size = span_size(session, op, count);
    struct span span = claim(counter, count, size);
    while (span.first < count) {
        struct span next = {count, count};
        for (int64_t item = span.first; item < span.end; item++, thread.is_first = 0) {
            thread.next = item + 1;
            if (item + 1 == span.end) {
                if (is_early)
                    next = claim(counter, count, size);
                thread.next = next.first < count ? next.first : NO_VALUE;
            }
            kernels->run[op->kind](&session->step, op, item, &thread);
        }
        atomic_fetch_add_explicit(&counter->done, span.end - span.first, memory_order_release);
        span = is_early ? next : claim(counter, count, size);
    }
}

static void run_program(void *context, int thread)
{
    struct session *session = context;
    struct step *s = &session->step;
    float *scratch = (float *)(session->scratch.start + session->scratch_bytes * (size_t)thread);
    double *profile = thread ? NULL : session->profile, began = profile ? seconds() : 0.0;
    for (int64_t i = 0; i < s->program->num_ops; i++) {
        const struct op *op = &s->program->ops[i];
        int64_t count = op->kind == OP_ADVANCE ? 1 : session->kernels.count[op->kind](s, op);
        struct counter *counter = &session->counters[i];
        if (op->kind == OP_ADVANCE) {
            if (claim(counter, 1, 1).first == 0) {
                advance_draft(s);
                atomic_fetch_add_explicit(&counter->done, 1, memory_order_release);
            }
        } else if (count)
            run_op(session, op, counter, count, scratch);
        if (count)
            pool_wait(counter, count);
        if (profile) {
            double now = seconds();
            profile[i] += now - began;
            began = now;
        }
    }
}

/* 0, or -1 with a text in `ns_error`. */
static int begin(struct session *session, const struct program *program)
{
    struct step *s = &session->step;
    pool_quiet(session->pool);
    s->workspace = session->workspace.start;
    s->num_threads = session->num_threads;
    if (!s->num_blocks)
        return failed(session, "there is no cache yet");
    if (program->num_ops > session->num_counters)
        return failed(session, "a program of %lld operations was not reserved", (long long)program->num_ops);
    use_cache(s, &session->caches[program->cache]);
    return 0;
}

static void run_all(struct session *session, const struct program *program)
{
    memset(session->counters, 0, (size_t)program->num_ops * sizeof *session->counters);
    pool_run(session->pool, run_program, session);
}

/* One step. 0, or -1 with a text in `ns_error` and nothing computed. */
int ns_run(struct session *session, const struct program *program, struct batch *batch)
{
    if (begin(session, program)
        || prepare_step(&session->step, program, batch, session->error, sizeof session->error))
        return -1;
    run_all(session, program);
    return 0;
}

/* All rounds of a draft after the step of `batch`: threads are woken once, and once more for each part of what was left
 * unread for long. As `ns_run`. */
int ns_draft(struct session *session, const struct program *program, struct batch *batch, struct draft *draft)
{
    struct step *s = &session->step;
    for (int reads_alone = 1; reads_alone;) {
        if (begin(session, program)
            || (reads_alone = prepare_draft(s, program, batch, draft, session->error, sizeof session->error)) < 0)
            return -1;
        if (s->num_tokens)
            run_all(session, program);
        else if (reads_alone)
            return failed(session, "more tokens stand than the shape has room for: another step's batch");
    }
    return 0;
}
