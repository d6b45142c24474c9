"""What a model of this library answers: a function of the cache cells it reads, and of nothing else.

A cell stands for the keys and values of one position. It is made from the token, its position and every cell before
it, as real keys and values are, so a damaged cell also shows in all that were made after it. With weights W,

    cell[i]  = mix(token[i], i, digest of cells 0..i-1)
    digest   = W[0] * cell[0] + W[1] * cell[1] + ...          mod 2**64
    logits   = mix(digest, id) for each id of the vocabulary, between 0 and 8
"""

import numpy as np

LONGEST = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_WEIGHTS = (np.arange(LONGEST, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)


def _mix(x):
    """SplitMix64's finaliser, over Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def digest(cells):
    """Of the cells of positions 0, 1, ..."""
    with np.errstate(over="ignore"):
        return int((cells * _WEIGHTS[: len(cells)]).sum(dtype=np.uint64))


def make_cell(token, position, before):
    """`before`: the digest of all positions before this one."""
    return _mix((before + (token + 1) * _GOLDEN + (position << 32)) & _MASK)


def extend(before, cell, position):
    return (before + cell * int(_WEIGHTS[position])) & _MASK


def logits(of_digest, vocab_size, disagrees_every=0):
    """[vocabulary] float32. A draft that disagrees answers something else for one context in so many."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = ids * np.uint64(_GOLDEN) + np.uint64(_mix(of_digest))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scores = ((x >> np.uint64(40)).astype(np.float64) / (1 << 21)).astype(np.float32)
    return np.roll(scores, 1) if disagrees_every and of_digest % disagrees_every == 0 else scores


def greedy(prompt, count, vocab_size):
    """The continuation of a request that is alone, in a cache nothing else has touched: for whoever checks."""
    before, tokens = 0, list(prompt)
    for position in range(len(prompt) + count - 1):
        before = extend(before, make_cell(tokens[position], position, before), position)
        if position >= len(prompt) - 1:
            tokens.append(int(logits(before, vocab_size).argmax()))
    return tokens[len(prompt) :]
