"""Requests and rows: schedules as tables of each step's rows, and random schedules against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.state import Ending, RequestState, ScheduledRow

from .schedules import Cached, new, step

BLOCK_SIZE = 4


def state(max_num_seqs: int = 2, ending: Ending | None = None) -> RequestState:
    return RequestState(
        max_num_seqs=max_num_seqs,
        max_model_len=32,
        block_size=BLOCK_SIZE,
        vocab_size=100,
        decide=lambda params: ending or Ending(Want.TOKEN),
        draw=lambda ending, position: position / 100,
    )


def seen(rows: list[ScheduledRow]) -> list[tuple[str, str, list[int], int, list[int], bool]]:
    """(request, part, tokens, position, blocks, whether a token follows)."""
    return [
        (
            r.request.id,
            "decode" if r.row.is_decode else "prompt",
            r.row.tokens.tolist(),
            r.row.position,
            r.row.blocks.tolist(),
            r.row.want != Want.NOTHING,
        )
        for r in rows
    ]


def accept(state: RequestState, rows: list[ScheduledRow], **tokens: int) -> None:
    for row in rows:
        if row.request.id in tokens:
            state.append(row.request, tokens[row.request.id])


def test_a_request_from_prompt_to_end() -> None:
    s = state()
    rows = s.apply(step({"a": 3}, news=[new("a", [5, 6, 7], [1])]))
    assert seen(rows) == [("a", "prompt", [5, 6, 7], 0, [1], True)]

    accept(s, rows, a=8)
    rows = s.apply(step({"a": 1}, cached=[Cached("a", 3)]))
    assert seen(rows) == [("a", "decode", [8], 3, [1], True)]

    accept(s, rows, a=9)
    rows = s.apply(step({"a": 1}, cached=[Cached("a", 4, blocks=[2])]))
    assert seen(rows) == [("a", "decode", [9], 4, [1, 2], True)]

    assert s.apply(step({}, finished=["a"])) == []
    assert (s.num_requests, s.num_free_places) == (0, 2)


def test_a_prompt_in_chunks_has_no_token_before_its_last() -> None:
    s = state()
    first = s.apply(step({"a": 4}, news=[new("a", [1, 2, 3, 4, 5, 6], [1])]))
    last = s.apply(step({"a": 2}, cached=[Cached("a", 4, blocks=[2])]))
    assert seen(first) == [("a", "prompt", [1, 2, 3, 4], 0, [1], False)]
    assert seen(last) == [("a", "prompt", [5, 6], 4, [1, 2], True)]


def test_a_cached_prefix_starts_in_the_middle() -> None:
    rows = state().apply(step({"a": 1}, news=[new("a", [1, 2, 3, 4, 5], [7, 2], num_computed=4)]))
    assert seen(rows) == [("a", "prompt", [5], 4, [7, 2], True)]


def test_decode_rows_come_first_whatever_the_scheduler_s_order() -> None:
    s = state()
    accept(s, s.apply(step({"b": 2}, news=[new("b", [1, 2], [1])])), b=3)
    rows = s.apply(step({"a": 1, "b": 1}, news=[new("a", [9], [2])], cached=[Cached("b", 2)]))
    assert [(r.request.id, r.row.is_decode) for r in rows] == [("b", True), ("a", False)]


def test_an_id_its_place_and_its_blocks_may_come_again_in_the_step_that_frees_them() -> None:
    s = state(max_num_seqs=1)
    accept(s, s.apply(step({"a": 5}, news=[new("a", [1, 2, 3, 4, 5], [1, 2])])), a=6)
    rows = s.apply(step({"a": 2}, news=[new("a", [7, 8], [1])], finished=["a"]))
    assert seen(rows) == [("a", "prompt", [7, 8], 0, [1], True)]


def test_a_preempted_request_gives_its_place_to_another_and_resumes_elsewhere() -> None:
    s = state(max_num_seqs=1)
    rows = s.apply(step({"a": 4}, news=[new("a", [1, 2, 3, 4], [1])]))
    accept(s, rows, a=5)
    request = rows[0].request

    accept(s, s.apply(step({"b": 1}, news=[new("b", [9], [1])], preempted=["a"])), b=9)
    resumed = Cached("a", 0, blocks=[3, 4], tokens=[1, 2, 3, 4, 5])
    rows = s.apply(step({"a": 5}, cached=[resumed], finished=["b"]))

    assert seen(rows) == [("a", "prompt", [1, 2, 3, 4, 5], 0, [3, 4], True)]
    assert rows[0].request is request
    assert request.output == [5]


def test_a_resumed_request_decodes_on_after_its_recomputed_tokens() -> None:
    s = state()
    accept(s, s.apply(step({"a": 2}, news=[new("a", [1, 2], [1])])), a=3)
    rows = s.apply(step({"a": 3}, cached=[Cached("a", 0, blocks=[4], tokens=[1, 2, 3])], preempted=["a"]))
    accept(s, rows, a=4)
    assert seen(s.apply(step({"a": 1}, cached=[Cached("a", 3)]))) == [("a", "decode", [4], 3, [4], True)]


def test_a_resumed_request_with_its_prompt_cached_is_no_decode_row() -> None:
    s = state()
    accept(s, s.apply(step({"a": 4}, news=[new("a", [1, 2, 3, 4], [1])])), a=5)
    accept(s, s.apply(step({"a": 1}, cached=[Cached("a", 4, blocks=[2])])), a=6)
    back = Cached("a", 4, blocks=[1, 3], tokens=[1, 2, 3, 4, 5, 6])
    assert seen(s.apply(step({"a": 2}, cached=[back], preempted=["a"]))) == [("a", "prompt", [5, 6], 4, [1, 3], True)]


def test_aborted_while_preempted_leaves_nothing_behind() -> None:
    s = state()
    s.apply(step({"a": 2}, news=[new("a", [1, 2], [1])]))
    s.apply(step({}, preempted=["a"]))
    s.apply(step({}, finished=["a"]))
    assert (s.num_requests, s.num_free_places) == (0, 2)


def test_a_row_draws_for_the_position_it_will_fill() -> None:
    s = state(ending=Ending(Want.TOKEN, temperature=1.0))
    rows = s.apply(step({"a": 2}, news=[new("a", [1, 2], [1])]))
    accept(s, rows, a=3)
    later = s.apply(step({"a": 1}, cached=[Cached("a", 2)]))
    assert [rows[0].row.uniforms[-1], later[0].row.uniforms[-1]] == [0.00, 0.01]


def test_prompt_scores_are_asked_for_every_token_but_the_first() -> None:
    s = state()
    params = SamplingParams(temperature=0, prompt_logprobs=3)
    first = s.apply(step({"a": 3}, news=[new("a", [5, 6, 7, 8], [1], params=params)]))
    last = s.apply(step({"a": 1}, cached=[Cached("a", 3)]))
    assert [row.row.targets.tolist() for row in (*first, *last) if row.row.targets is not None] == [[6, 7, 8], [-1]]
    assert first[0].row.prompt_logprobs == 3


def test_minus_one_asks_for_the_whole_vocabulary() -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=-1)
    [row] = state().apply(step({"a": 2}, news=[new("a", [5, 6], [1], params=params)]))
    assert row.row.prompt_logprobs == 100


def test_a_request_without_tokens_is_refused_by_name() -> None:
    data = new("a", [1], [1])
    data.prompt_token_ids = None
    with pytest.raises(ValueError, match="request a has no prompt tokens"):
        state().apply(step({"a": 1}, news=[data]))


@dataclass
class Naive:
    """A request as plain lists, for the property below."""

    tokens: list[int]
    num_prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: str = "waiting"  # waiting (new), running, preempted


class NaiveScheduler:
    """Any schedule vLLM could make: who joins, how many tokens, who is preempted or aborted is drawn at random."""

    def __init__(self, data: st.DataObject, max_num_seqs: int) -> None:
        self.data, self.max_num_seqs = data, max_num_seqs
        self.requests: dict[str, Naive] = {}
        self.finished: set[str] = set()
        self.next_block, self.next_id = 1, 0

    def draw_step(self):  # type: ignore[no-untyped-def]
        """(SchedulerOutput, ids with the tokens, position and blocks their rows must have)."""
        self._draw_arrivals_and_aborts()
        preempted = self._draw_preempted()
        scheduled, news, cached, expected = {}, [], [], {}
        for request_id, request in self.requests.items():
            running = sum(r.status == "running" for r in self.requests.values())
            if request.status != "running" and (running == self.max_num_seqs or not self.data.draw(st.booleans())):
                continue
            count = self._draw_count(request)
            fresh = self._blocks_for(request, request.computed + count)
            if request.status == "waiting":
                news.append(new(request_id, request.tokens[: request.num_prompt], fresh))
            else:
                resumed = list(request.tokens) if request.status == "preempted" else None
                cached.append(Cached(request_id, request.computed, fresh or None, resumed))
            scheduled[request_id] = count
            request.status = "running"
            chunk = request.tokens[request.computed : request.computed + count]
            expected[request_id] = (chunk, request.computed, list(request.blocks))
            request.computed += count
        finished, self.finished = self.finished, set()
        return step(scheduled, news=news, cached=cached, finished=finished, preempted=preempted), expected

    def _draw_arrivals_and_aborts(self) -> None:
        for request_id in list(self.requests):
            if self.data.draw(st.integers(0, 7)) == 0:
                del self.requests[request_id]
                self.finished.add(request_id)
        if self.data.draw(st.booleans()):
            prompt = self.data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=10))
            self.requests[f"r{self.next_id}"] = Naive(prompt, len(prompt))
            self.next_id += 1

    def _draw_preempted(self) -> set[str]:
        victims = {
            request_id
            for request_id, request in self.requests.items()
            if request.status == "running" and self.data.draw(st.integers(0, 5)) == 0
        }
        for request_id in victims:
            request = self.requests[request_id]
            request.status, request.computed, request.blocks = "preempted", 0, []
        return victims

    def _draw_count(self, request: Naive) -> int:
        return self.data.draw(st.integers(1, len(request.tokens) - request.computed))

    def _blocks_for(self, request: Naive, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // BLOCK_SIZE) - len(request.blocks)
        fresh = list(range(self.next_block, self.next_block + missing))
        self.next_block += len(fresh)
        request.blocks += fresh
        return fresh


@given(st.data())
def test_any_schedule_gives_the_rows_of_a_naive_model(data: st.DataObject) -> None:
    scheduler, s = NaiveScheduler(data, max_num_seqs=3), state(max_num_seqs=3)
    for _ in range(data.draw(st.integers(1, 12))):
        output, expected = scheduler.draw_step()
        rows = s.apply(output)

        found = {r.request.id: (r.row.tokens.tolist(), r.row.position, r.row.blocks.tolist()) for r in rows}
        assert found == expected
        assert [r.row.is_decode for r in rows] == sorted([r.row.is_decode for r in rows], reverse=True)
        for row in rows:
            request = scheduler.requests[row.request.id]
            assert row.ends == (request.computed == len(request.tokens))
            after_prompt = row.row.position >= request.num_prompt
            assert row.row.is_decode == (row.ends and after_prompt and len(row.row.tokens) == 1)
            if row.ends and len(request.tokens) < 30:
                token = data.draw(st.integers(0, 99))
                s.append(row.request, token)
                request.tokens.append(token)
        running = sum(r.status == "running" for r in scheduler.requests.values())
        assert s.num_free_places == 3 - running
