"""Text from prompts without a server: `python offline.py MODEL`, a directory or a hub id.

The demo model's directory is what `make -s demo-model` prints.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Shopping for the weekend:\n- flour\n- eggs\n-",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    llm = LLM(model=options.model, device="neuron", max_model_len=512, max_num_seqs=4)
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    for output in llm.generate(PROMPTS, sampling):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    conversation = [{"role": "user", "content": "Name three rivers."}]
    print(llm.chat(conversation, sampling)[0].outputs[0].text)


if __name__ == "__main__":
    main()
