"""Time to first token of a prompt whose first 90 % are cached, beside one that is new: `python benchmarks/prefix.py`.

900 tokens, one request at a time over HTTP, a server in int8. A B A B: a prompt nobody sent before, then one that
shares its first 810 tokens. Prompts are texts: of a list of ids OpenAI's client looks at each before it sends it, which
takes as long as a fifth of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import openai
from bars import ROUNDS, verdict
from bench import cell, conditions, demo_model
from replay import Request, ask
from serving import INT8, Server, serve
from tokenizers import Tokenizer

PROMPT, SHARED = 900, 810
WORD = re.compile(" [a-z]{4,}")
BAR = 5.0


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, whatever stands beside them."""
    found = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return [word for word in found if WORD.fullmatch(word)]


def pair(words: Sequence[str], seed: int) -> tuple[Request, Request]:
    """Two texts of random words with the same beginning; no two pairs share one."""
    chance = random.Random(seed)
    first = chance.choices(words, k=PROMPT)
    second = first[:SHARED] + chance.choices(words, k=PROMPT - SHARED)
    return Request(0.0, "".join(first), 1), Request(0.0, "".join(second), 1)


async def measure(server: Server, words: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds. The first pair is not counted."""
    found: dict[str, list[float]] = {"new": [], "90 % cached": []}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        for turn in range(rounds + 1):
            for name, request in zip(found, pair(words, turn), strict=True):
                answer = await ask(client, server.model, request)
                if turn:
                    found[name].append(1e3 * answer.first_s)
    return found


def judge(new: Sequence[float], cached: Sequence[float]) -> str:
    ratio = statistics.median(new) / statistics.median(cached)
    said = verdict(ratio >= BAR, is_whole=min(len(new), len(cached)) >= ROUNDS)
    return f"{said} bar 5: a cached prefix of 90 %: first token {ratio:.1f} x earlier (bar {BAR})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(conditions())
    model = arguments.model or demo_model()
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    words = words_of(tokenizer)
    for request in pair(words, 0):
        assert len(tokenizer.encode(str(request.prompt)).ids) == PROMPT
    flags = ("--max-num-seqs", "16", "--max-model-len", "1024", *INT8)
    with serve(model, flags=flags) as server:
        found = asyncio.run(measure(server, words, arguments.rounds))
    for name, values in found.items():
        print(f"{name}: first token after {cell(values)} ms")
    print(judge(found["new"], found["90 % cached"]))


if __name__ == "__main__":
    main()
