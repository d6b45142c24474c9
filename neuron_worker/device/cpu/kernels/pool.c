/* Threads that live as long as the device: asleep between steps, woken once per step, spinning between operations.
 *
 * Where a step's answer goes to another process they stay awake for a moment before they sleep, giving way to whoever
 * wants to run: a core that fell asleep needs 70 us to wake, and the answer is wanted on it at once.
 *
 * Work is claimed from counters, so a thread that the system holds up never holds up the others unless it owns
 * items: it finds the counters used up and moves on. A step may therefore end while such a latecomer is still on its
 * way through; the next step waits for it before counters are reset.
 */
#define _GNU_SOURCE
#include "cpu.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum { SPINS_BEFORE_YIELD = 4000, SPINS_BETWEEN_YIELDS = 20 };
enum { LINGER_MICROSECONDS = 250, LINGER_SHARE = 16 };  /* at most; and one part in so many of the step */

struct pool {
    int num_threads;              /* the caller included */
    int num_started;
    int lingers;
    _Atomic int64_t num_joined, num_lingered; /* steps and stays, of all threads */
    pthread_t threads[MAX_THREADS];
    pthread_mutex_t mutex;
    pthread_cond_t wake, left;
    _Atomic uint64_t epoch;       /* of the step; written under mutex, which guards the following */
    int open, inside, stop;
    pool_job job;
    void *context;
};

struct place {
    struct pool *pool;
    int index;
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void pool_wait(struct counter *counter, int64_t count)
{
    int spins = 0;
    while (atomic_load_explicit(&counter->done, memory_order_acquire) < count) {
        if (++spins < SPINS_BEFORE_YIELD)
            pause_cpu();
        else
            sched_yield();        /* cores may be shared: whoever holds the item may need this one */
    }
}

static int64_t microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

/* Until there is another step, or for a moment that is short beside the step, which began then. */
static void linger(struct pool *pool, uint64_t seen, int64_t began)
{
    int64_t now = microseconds(), share = (now - began) / LINGER_SHARE;
    int64_t end = now + (share < LINGER_MICROSECONDS ? share : LINGER_MICROSECONDS);
    do {
        for (int i = 0; i < SPINS_BETWEEN_YIELDS; i++)
            pause_cpu();
        sched_yield();
    } while (atomic_load_explicit(&pool->epoch, memory_order_relaxed) == seen && microseconds() < end);
}

static void *worker(void *argument)
{
    struct place place = *(struct place *)argument;
    struct pool *pool = place.pool;
    uint64_t seen = 0;
    free(argument);
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->stop && !(pool->open && pool->epoch != seen))
            pthread_cond_wait(&pool->wake, &pool->mutex);
        if (pool->stop)
            break;
        seen = pool->epoch;
        pool->inside++;
        pool_job job = pool->job;
        void *context = pool->context;
        pthread_mutex_unlock(&pool->mutex);
        int64_t began = microseconds();
        job(context, place.index);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->inside == 0)
            pthread_cond_signal(&pool->left);
        pthread_mutex_unlock(&pool->mutex);
        atomic_fetch_add(&pool->num_joined, 1);
        if (pool->lingers) {
            linger(pool, seen, began);
            atomic_fetch_add(&pool->num_lingered, 1);
        }
        pthread_mutex_lock(&pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

struct pool *pool_open(int num_threads, int lingers)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->left, NULL);
    pool->lingers = lingers;
    pool->num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    for (int i = 1; i < pool->num_threads; i++) {
        struct place *place = malloc(sizeof *place);
        if (!place)
            break;
        *place = (struct place){pool, i};
        if (pthread_create(&pool->threads[pool->num_started], NULL, worker, place)) {
            free(place);
            break;
        }
        pool->num_started++;
    }
    return pool;
}

int64_t pool_num_joined(const struct pool *pool) { return atomic_load(&pool->num_joined); }
int64_t pool_num_lingered(const struct pool *pool) { return atomic_load(&pool->num_lingered); }

void pool_close(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->num_started; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->left);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void pool_quiet(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    while (pool->inside)
        pthread_cond_wait(&pool->left, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(struct pool *pool, pool_job job, void *context)
{
    if (pool->num_started) {
        pthread_mutex_lock(&pool->mutex);
        pool->job = job;
        pool->context = context;
        pool->epoch++;
        pool->open = 1;
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    job(context, 0);
    if (pool->num_started) {
        pthread_mutex_lock(&pool->mutex);
        pool->open = 0;
        pthread_mutex_unlock(&pool->mutex);
    }
}
