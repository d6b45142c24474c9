"""Writes the feature x device table into the README from each backend's `Capabilities`, so that it cannot drift.

python scripts/device_table.py            print the table
python scripts/device_table.py --write    put it between its marks in README.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Capabilities

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- device table: python scripts/device_table.py --write -->\n", "<!-- end of device table -->\n"
DEVICES = ("cpu", "transformers-neuronx", "torch-neuronx")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _or(value: int | None, unlimited: str) -> str:
    return unlimited if value is None else str(value)


def _draft(c: Capabilities) -> str:
    """Where it runs; a device that fuses it takes no drafts from outside, so no prompt lookup either."""
    if c.fused_speculation:
        return "fused into the step"
    return "beside the model" if c.drafts else "refused"


FEATURES: tuple[tuple[str, Callable[[Capabilities], str]], ...] = (
    ("runs on a chip", lambda c: _yes(c.on_chip)),
    ("cache", lambda c: "blocks" if c.kv_layout == "blocks" else "a slot per sequence"),
    ("prefix caching, chunked prefill", lambda c: _yes(c.splits_prompts and c.kv_layout == "blocks")),
    ("prompts and decodes in one call", lambda c: _yes(c.mixes_prefill_and_decode)),
    ("prompts in a call", lambda c: _or(c.prompts_per_prefill, "any")),
    ("sampling on the device", lambda c: "any request" if c.sampling == "per_step" else "on request, compiled in"),
    ("largest `top_k` there", lambda c: _or(c.max_top_k, "any")),
    ("logits for seeds, grammars, logprobs", lambda c: _yes("logits" in c.outputs)),
    ("log-probabilities of prompts", lambda c: _yes(c.prompt_logprobs)),
    ("drafts by prompt lookup", lambda c: _yes(not c.fused_speculation)),
    ("a draft model, an EAGLE head", _draft),
    ("an EAGLE-3 head", lambda c: _yes(c.drafts)),
    ("cores", lambda c: ", ".join(map(str, c.tensor_parallel_degrees or ())) or "any number"),
    ("types", lambda c: ", ".join(c.dtypes)),
    ("quantised weights", lambda c: ", ".join(c.quantizations) or "no"),
    ("activations in int8 beside int8 weights", lambda c: _yes(c.rounds_activations)),
    ("type of the cache", lambda c: c.cache_dtype or "the model's"),
    ("experimental architectures", lambda c: ", ".join(c.more_architectures) or "none"),
    ("compiled graphs kept as files", lambda c: _yes(c.saves_graphs)),
)


def table() -> str:
    devices = [registry.capabilities(name) for name in DEVICES if name in registry.names()]
    lines = [
        f"| | {' | '.join(f'`{device.name}`' for device in devices)} |",
        f"| --- |{' --- |' * len(devices)}",
        *(f"| {name} | {' | '.join(say(device) for device in devices)} |" for name, say in FEATURES),
    ]
    return "\n".join(lines) + "\n"


def written(readme: str) -> str:
    """`readme` with today's table between the marks."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(written(README.read_text()))
    else:
        print(table(), end="")
