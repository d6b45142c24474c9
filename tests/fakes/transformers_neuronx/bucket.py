"""Bucket sizes from what the user gave, and the bucket of a length."""


def token_sizes(buckets_or_size):
    if isinstance(buckets_or_size, list):
        return sorted(buckets_or_size)
    sizes, size = [], 128
    while size < buckets_or_size:
        sizes.append(size)
        size *= 2
    return [*sizes, buckets_or_size]


def context_sizes(buckets_or_size, token_buckets=None):
    """None: half of each token bucket, so by default half the positions can hold a prompt."""
    if isinstance(buckets_or_size, list):
        return sorted(buckets_or_size)
    if isinstance(buckets_or_size, int):
        return [buckets_or_size] if buckets_or_size > 0 else []
    if buckets_or_size is None and token_buckets is not None:
        return [size // 2 for size in token_buckets]
    raise NotImplementedError(f"Prompt bucket config {buckets_or_size} not supported")


def batch_sizes(batch_size):
    if isinstance(batch_size, int):
        return [batch_size]
    if isinstance(batch_size, list):
        return sorted(batch_size)
    raise TypeError("batch_size must be list of ints or int type")


def find(buckets, size):
    """The smallest that holds `size`; the largest if none does; None if there are none."""
    if not buckets:
        return None
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])
