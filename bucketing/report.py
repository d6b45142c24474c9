"""The plan as text for a person: shapes, padding, memory. At most 100 columns, the same in `plan` and in the log.

Knows no model and no device; what it prints of memory comes in as `MemoryFacts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from textwrap import wrap

from neuronserve.neuron_worker.device.base import StepShape

from .ladder import Ladder
from .memory import (
    MemoryFacts,
    cores_for_weights,
    kv_bytes_per_token,
    largest_batch,
    largest_length,
    memory,
)
from .plan import Plan

COLUMNS = 100
KINDS = ("prefill", "mixed", "decode", "verify")


def render(plan: Plan, facts: MemoryFacts | None = None) -> str:
    """The whole report."""
    sections = [_headline(plan), *_shapes(plan), "", *_padding(plan)]
    if facts is not None:
        sections += ["", *_memory(plan, facts)]
    if plan.notes:
        sections += ["", *(line for note in plan.notes for line in _folded("note: ", note))]
    return "\n".join(sections)


def headline(plan: Plan) -> str:
    """One line, for the log."""
    counts = [f"{sum(shape.kind == kind for shape in plan.shapes)} {kind}" for kind in KINDS if _of(plan, kind)]
    return f"{len(plan.shapes)} graphs: {', '.join(counts)}"


def _headline(plan: Plan) -> str:
    if plan.chunk_tokens is None:
        prompts = f"prompts up to {plan.largest_prompt} tokens, each whole"
    else:
        prompts = f"prompts in chunks of {plan.chunk_tokens} tokens"
    return (
        f"{headline(plan)}\n"
        f"{plan.max_num_seqs} sequences of up to {plan.max_model_len} tokens, {prompts}, "
        f"{plan.prompts_per_call} per call"
    )


def _of(plan: Plan, kind: str) -> list[StepShape]:
    return [shape for shape in plan.shapes if shape.kind == kind]


def _shapes(plan: Plan) -> list[str]:
    lines = ["", f"{'kind':8} {'graphs':>6}  sizes"]
    for kind in KINDS:
        shapes = _of(plan, kind)
        if not shapes:
            continue
        for index, text in enumerate(_grid(shapes)):
            label = f"{kind:8} {len(shapes):6}  " if index == 0 else " " * 17
            lines += _folded(label, text)
    return lines


def _grid(shapes: Sequence[StepShape]) -> list[str]:
    """Shapes as products of sizes where they are one, else one line for each number of rows."""
    rows, widths, tokens, contexts = (
        sorted({getattr(shape, name) for shape in shapes})
        for name in ("decode_rows", "decode_width", "prefill_tokens", "context")
    )
    if all(shape.context == shape.prefill_tokens and not shape.decode_rows for shape in shapes):
        return [f"{_list(tokens)} prompt tokens, each a whole context"]
    if len(shapes) != len(rows) * len(widths) * len(tokens) * len(contexts):
        if len(rows) == 1:
            return [_one(shape) for shape in shapes]
        return [line for count in rows for line in _grid([shape for shape in shapes if shape.decode_rows == count])]
    factors = []
    if rows != [0]:
        factors.append(f"rows {_list(rows)}")
        if widths != [1]:
            factors.append(f"of {_list(widths)} tokens")
    if tokens != [0]:
        factors.append(f"prompt tokens {_list(tokens)}")
    factors.append(f"context {_list(contexts)}")
    return ["; ".join(factors)]


def _one(shape: StepShape) -> str:
    parts = []
    if shape.decode_rows:
        parts.append(f"rows {shape.decode_rows} of {shape.decode_width} tokens")
    if shape.prefill_tokens:
        parts.append(f"prompt tokens {shape.prefill_tokens}")
    return "; ".join([*parts, f"context {shape.context}"])


def _padding(plan: Plan) -> list[str]:
    lines = [f"{'padding':16} {'bucket':>7} {'serves':>13} {'mean':>6} {'worst':>6}"]
    for name, sizes in (
        ("prompt tokens", _sizes(plan, "prefill", "prefill_tokens")),
        ("with decode rows", _sizes(plan, "mixed", "prefill_tokens")),
        ("decode rows", _sizes(plan, "decode", "decode_rows")),
        ("decode context", _sizes(plan, "decode", "context")),
    ):
        if not sizes:
            continue
        for low, size in Ladder(sizes).ranges():
            mean, worst = padding(low, size)
            lines.append(f"{name:16} {size:7} {f'{low}-{size}':>13} {mean:6.0%} {worst:6.0%}")
            name = ""
    return lines


def padding(shortest: int, size: int) -> tuple[float, float]:
    """(mean, worst) share of padding in a bucket of `size` that serves every length from `shortest` equally often."""
    return (size - (shortest + size) / 2) / size, (size - shortest) / size


def _sizes(plan: Plan, kind: str, name: str) -> tuple[int, ...]:
    return tuple(sorted({getattr(shape, name) for shape in _of(plan, kind)}))


def _memory(plan: Plan, facts: MemoryFacts) -> list[str]:
    batch, length = plan.max_num_seqs, plan.max_model_len
    use = memory(facts, batch, length)
    cores = "1 core" if facts.cores == 1 else f"each of {facts.cores} cores"
    lines = [
        f"memory on {cores}",
        f"  weights  {_gib(use.weights)}{_of_a_draft(facts)}",
        f"  KV cache {_gib(use.kv)}  {batch} x {length} tokens of {kv_bytes_per_token(facts)} bytes{_shared(facts)}",
        f"  scratch  {_gib(use.scratch)}",
        f"  total    {_gib(use.total)}  of {_gib(use.limit).strip()}: {'fits' if use.fits else 'does not fit'}",
    ]
    return lines if use.fits else [*lines, *_folded("  ", remedy(facts, batch, length))]


def _of_a_draft(facts: MemoryFacts) -> str:
    if not facts.draft_token_bytes:
        return ""
    weights = _gib(ceil(facts.draft_weight_bytes / facts.cores)).strip()
    return f"  {weights} and {facts.draft_token_bytes} bytes of each token are the draft's"


def _shared(facts: MemoryFacts) -> str:
    return f", each sequence over {facts.cores_per_line} cores" if facts.cores_per_line > 1 else ""


def remedy(facts: MemoryFacts, batch: int, length: int) -> str:
    """What would fit where `batch` sequences of `length` do not."""
    fewer, shorter = largest_batch(facts, length), largest_length(facts, batch)
    choices = []
    if fewer:
        choices.append(f"--max-num-seqs {fewer} at {length} tokens")
    if shorter:
        choices.append(f"--max-model-len {shorter} at {batch} sequences")
    if choices:
        return f"largest that fits: {', or '.join(choices)}"
    if alone := largest_length(facts, 1):
        return f"largest that fits: 1 sequence of {alone} tokens"
    if cores := cores_for_weights(facts):
        return f"the weights alone do not fit{_more_cores(cores, facts.core_counts)}"
    return "scratch memory alone is more than a core has: smaller buckets or fewer sequences"


def _more_cores(needed: int, counts: Sequence[int] | None) -> str:
    """`counts`: how many can work as one."""
    enough = [needed] if counts is None else [count for count in counts if count >= needed]
    if enough:
        return f": at least {min(enough)} cores, or int8 weights"
    most = max(counts or (1,))
    cores = "1 core" if most == 1 else f"at most {most} cores"
    return f", and this device uses {cores}: int8 weights, or a smaller model"


def _gib(size: int) -> str:
    return f"{size / 2**30:9.3f} GiB"


def _list(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))


def _folded(label: str, text: str) -> list[str]:
    """`label` and `text` in lines of at most 100 columns, the text kept in its column."""
    indent = " " * len(label)
    return wrap(text, COLUMNS, initial_indent=label, subsequent_indent=indent, drop_whitespace=True) or [label]
