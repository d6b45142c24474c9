/* Preloaded: counts what the code between two addresses asks of the heap, itself and not through the C library. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

uintptr_t counted_from, counted_to;
long counted;

static void count(void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    if (at >= counted_from && at < counted_to)
        __atomic_add_fetch(&counted, 1, __ATOMIC_RELAXED);
}

void *malloc(size_t size)
{
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t number, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_calloc(number, size);
}

void *realloc(void *old, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_realloc(old, size);
}

int posix_memalign(void **made, size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    *made = __libc_memalign(alignment, size);
    return *made ? 0 : ENOMEM;
}
