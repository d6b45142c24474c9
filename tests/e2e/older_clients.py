"""What programs with text-generation and langchain-huggingface get from a TGI server: run by their own interpreter.

python older_clients.py URL        one JSON object: what each call returned, or the class of what it raised
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from langchain_huggingface import HuggingFaceEndpoint
from text_generation import AsyncClient, Client

PROMPT = "The capital of France is"


def raised(call: Callable[[], Any]) -> list:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def generated(response: Any) -> dict:
    details = response.details
    return {
        "text": response.generated_text,
        "tokens": [[token.id, token.text, token.logprob, token.special] for token in details.tokens],
        "prefill": [[token.id, token.text, token.logprob] for token in details.prefill],
        "generated_tokens": details.generated_tokens,
        "finish_reason": str(getattr(details.finish_reason, "value", details.finish_reason)),
        "seed": details.seed,
        "best_of": [
            [sequence.generated_text, sequence.seed, len(sequence.tokens)]
            for sequence in details.best_of_sequences or []
        ],
    }


def streamed(responses: list) -> dict:
    last = responses[-1]
    return {
        "texts": [response.token.text for response in responses],
        "text": last.generated_text,
        "middle": [response.generated_text for response in responses[:-1]],
        "finish_reason": str(getattr(last.details.finish_reason, "value", last.details.finish_reason)),
        "seed": last.details.seed,
    }


def text_generation(url: str) -> dict:
    client = Client(url, timeout=240)
    return {
        "one": generated(client.generate(PROMPT, max_new_tokens=1, decoder_input_details=True)),
        "greedy": generated(client.generate(PROMPT, max_new_tokens=8)),
        "best_of": generated(client.generate(PROMPT, max_new_tokens=4, best_of=2, do_sample=True)),
        "sampled": generated(client.generate(PROMPT, max_new_tokens=8, do_sample=True, seed=7, temperature=0.9)),
        "stream": streamed(list(client.generate_stream(PROMPT, max_new_tokens=8))),
        "too_long": raised(lambda: client.generate(PROMPT, max_new_tokens=100_000)),
        "too_long_stream": raised(lambda: list(client.generate_stream(PROMPT, max_new_tokens=100_000))),
        "chat": client.chat([{"role": "user", "content": "Say hello."}], max_tokens=4).choices[0].message.content,
    }


async def text_generation_async(url: str) -> dict:
    client = AsyncClient(url, timeout=240)
    together = await asyncio.gather(*[client.generate(PROMPT, max_new_tokens=8) for _ in range(4)])
    return {
        "greedy": generated(together[0]),
        "equal": len({response.generated_text for response in together}) == 1,
        "stream": streamed([response async for response in client.generate_stream(PROMPT, max_new_tokens=8)]),
    }


def langchain(url: str) -> dict:
    plain = HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=8, seed=3)
    stopping = HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=32, temperature=0.01, stop_sequences=["."])
    return {
        "invoke": plain.invoke(PROMPT),
        "again": plain.invoke(PROMPT),
        "stream": list(plain.stream(PROMPT)),
        "stop": stopping.invoke(PROMPT),
    }


def main(url: str) -> None:
    answers = {
        "text_generation": text_generation(url),
        "text_generation_async": asyncio.run(text_generation_async(url)),
        "langchain": langchain(url),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
