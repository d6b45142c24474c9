"""One step's rows in calls that a compiled shape can hold each.

Most steps are one call. A device that cannot mix gets its decode rows and its prompts apart; prompts that
together exceed the largest prefill part, or the prompts a call may hold, follow in further calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from .plan import Plan
from .row import Row, demand_of
from .shape import StepDemand


class Part(NamedTuple):
    """The rows of a step or of one of its calls, and what must be held for them."""

    rows: Sequence[Row]
    demand: StepDemand

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        return cls(rows, demand_of(rows))


def split(whole: Part, plan: Plan) -> list[Part]:
    """Calls in order. Decode rows come before prompts, else the order given is kept: rows that already lie so
    come out in the same order, call after call. A row that fits nowhere is left for `choose` to refuse.
    """
    num_prompts = len(whole.rows) - whole.demand.decode_rows
    if num_prompts <= plan.prompts_per_call and plan.covers(whole.demand):
        return [whole]
    return [Part.of(call) for call in _calls(whole.rows, plan)]


def _calls(rows: Sequence[Row], plan: Plan) -> list[Sequence[Row]]:
    prompts = [row for row in rows if not row.is_decode]
    decodes = [row for row in rows if row.is_decode]
    calls: list[Sequence[Row]] = [
        decodes[start : start + plan.max_decode_rows] for start in range(0, len(decodes), plan.max_decode_rows)
    ]
    groups = list(_prompt_groups(prompts, plan))
    if plan.mixes and len(calls) == 1 and groups:
        joined = [*calls[0], *groups[0]]
        if plan.covers(demand_of(joined)):
            calls, groups = [joined], groups[1:]
    return [*calls, *groups]


def _prompt_groups(prompts: Sequence[Row], plan: Plan) -> Iterator[list[Row]]:
    group: list[Row] = []
    tokens = 0
    for row in prompts:
        if group and (tokens + row.length > plan.max_prefill_tokens or len(group) == plan.prompts_per_call):
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += row.length
    if group:
        yield group
