/* What this machine can do at most, on all its cores: bytes read and operations of vectors done in a second.
 *
 *     cc -O3 -march=native -pthread floor.c -o floor && ./floor THREADS
 *
 * Prints three numbers: bytes per second of one pass over memory that no cache holds, float32 operations per second
 * (a fused multiply-add is two), and 8-bit operations per second of integer dot products. Each is the best of several
 * tries, for a floor is what the machine does when nobody disturbs it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { SUMS = 12, TRIES = 7, PIECE = 256 << 20, ROUNDS = 20000000, MAX_THREADS = 256 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint64_t words __attribute__((vector_size(64)));

struct part {
    pthread_barrier_t *start, *end;
    const words *memory;
    int kind;
    double began, ended;          /* of the latest try; the main thread may be late to both barriers */
    volatile float sink;
};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static float read_all(const words *memory)
{
    words sums[4] = {{0}};
    for (size_t i = 0; i < PIECE / sizeof *memory; i += 4)
        for (int j = 0; j < 4; j++)
            sums[j] ^= memory[i + (size_t)j];
    words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return (float)all[0];
}

/* Loops over the sums are unrolled by order: an array that any loop indexes lies in memory, and memory is measured. */
static float multiply_add(void)
{
    floats sums[SUMS], a, b;
    for (int i = 0; i < LANES; i++) {
        a[i] = 0.999f;
        b[i] = 1e-6f;
    }
#pragma GCC unroll 16
    for (int j = 0; j < SUMS; j++)
        sums[j] = b * (float)j;
    for (int64_t round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++)
            sums[j] = sums[j] * a + b;
        /* Keeps the sums in registers and the loop as it is. */
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++)
            __asm__ volatile("" : "+x"(sums[j]));
    }
    floats all = sums[0];
#pragma GCC unroll 16
    for (int j = 1; j < SUMS; j++)
        all += sums[j];
    return all[0];
}

/* 8-bit products summed in 32 bits; operations of one round in `*operations`. */
#if defined(__AVX512VNNI__)
typedef __m512i integers;
static const double DOT_OPERATIONS = 2.0 * 64 * SUMS;
static inline integers dot(integers sum, integers a, integers b) { return _mm512_dpbusd_epi32(sum, a, b); }
static inline integers any(int value) { return _mm512_set1_epi8((char)value); }
static inline float first(integers x) { return (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(x)); }
#elif defined(__AVX2__)
typedef __m256i integers;
static const double DOT_OPERATIONS = 2.0 * 32 * SUMS;
static inline integers dot(integers sum, integers a, integers b)
{
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}
static inline integers any(int value) { return _mm256_set1_epi8((char)value); }
static inline float first(integers x) { return (float)_mm_cvtsi128_si32(_mm256_castsi256_si128(x)); }
#endif

#if defined(__AVX2__)
static float dot_products(void)
{
    integers sums[SUMS], a = any(3), b = any(5);
#pragma GCC unroll 16
    for (int j = 0; j < SUMS; j++)
        sums[j] = any(j);
    for (int64_t round = 0; round < ROUNDS; round++) {
        /* Made anew to the compiler, or it would take the product out of the loop. */
        __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++)
            sums[j] = dot(sums[j], a, b);
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++)
            __asm__ volatile("" : "+x"(sums[j]));
    }
    float all = 0;
#pragma GCC unroll 16
    for (int j = 0; j < SUMS; j++)
        all += first(sums[j]);
    return all;
}
#else
static const double DOT_OPERATIONS = 0.0;
static float dot_products(void) { return 0; }
#endif

static void *work(void *argument)
{
    struct part *part = argument;
    for (int i = 0; i < TRIES; i++) {
        pthread_barrier_wait(part->start);
        part->began = seconds();
        part->sink = part->kind == 0 ? read_all(part->memory) : part->kind == 1 ? multiply_add() : dot_products();
        part->ended = seconds();
        pthread_barrier_wait(part->end);
    }
    return NULL;
}

/* From the first thread's beginning to the last one's end. */
static double whole(const struct part *parts, int num_threads)
{
    double began = parts[0].began, ended = parts[0].ended;
    for (int i = 1; i < num_threads; i++) {
        began = parts[i].began < began ? parts[i].began : began;
        ended = parts[i].ended > ended ? parts[i].ended : ended;
    }
    return ended - began;
}

static double best(int kind, int num_threads, words **memory)
{
    static struct part parts[MAX_THREADS];
    static pthread_t threads[MAX_THREADS];
    pthread_barrier_t start, end;
    double shortest = 1e9;
    pthread_barrier_init(&start, NULL, (unsigned)num_threads + 1);
    pthread_barrier_init(&end, NULL, (unsigned)num_threads + 1);
    for (int i = 0; i < num_threads; i++) {
        parts[i] = (struct part){&start, &end, memory[i], kind, 0, 0, 0};
        if (pthread_create(&threads[i], NULL, work, &parts[i]))
            exit(1);
    }
    for (int i = 0; i < TRIES; i++) {
        pthread_barrier_wait(&start);
        pthread_barrier_wait(&end);
        double took = whole(parts, num_threads);
        shortest = took < shortest ? took : shortest;
    }
    for (int i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    return shortest;
}

int main(int count, char **arguments)
{
    int num_threads = count > 1 ? atoi(arguments[1]) : 1;
    words *memory[MAX_THREADS];
    if (num_threads < 1 || num_threads > MAX_THREADS)
        return 1;
    for (int i = 0; i < num_threads; i++) {
        if (posix_memalign((void **)&memory[i], 64, PIECE))
            return 1;
        for (size_t j = 0; j < PIECE / sizeof(words); j++)
            memory[i][j] = (words){j, j, j, j, j, j, j, j};
    }
    printf("%.6g\n", (double)PIECE * num_threads / best(0, num_threads, memory));
    printf("%.6g\n", 2.0 * LANES * SUMS * ROUNDS * num_threads / best(1, num_threads, memory));
    printf("%.6g\n", DOT_OPERATIONS * ROUNDS * num_threads / best(2, num_threads, memory));
    return 0;
}
