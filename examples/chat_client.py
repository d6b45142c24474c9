"""A chat in the terminal with a running server: `python chat_client.py`, and an empty line to leave.

Needs nothing but OpenAI's client: `pip install openai`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openai import OpenAI


def answer(client: OpenAI, model: str, messages: list[Any], temperature: float) -> str:
    """The whole answer; each piece of it is printed as it arrives."""
    stream = client.chat.completions.create(model=model, messages=messages, temperature=temperature, stream=True)
    pieces = []
    for event in stream:
        piece = (event.choices[0].delta.content or "") if event.choices else ""
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="its name on the server; the first one there if left out")
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="none")
    model = options.model or client.models.list().data[0].id
    messages: list[Any] = []
    while True:
        print("> ", end="", flush=True)
        question = sys.stdin.readline().strip()
        if not question:
            break
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(client, model, messages, options.temperature)})


if __name__ == "__main__":
    main()
