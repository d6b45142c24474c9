"""What a step reports to vLLM: tokens, log-probabilities, and prompt log-probabilities once a prompt is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput

from neuronserve.neuron_worker.device.base import PromptScores

if TYPE_CHECKING:
    from neuronserve.neuron_worker.rounds import HostTokens
    from neuronserve.neuron_worker.state import LiveRequest


@dataclass
class EmptyStep(ModelRunnerOutput):
    """Empty-handed but well-formed: another scheduler would merely see a step without tokens."""

    error: str = ""

    @classmethod
    def of(cls, request_ids: Sequence[str], error: str = "") -> Self:
        ids = list(request_ids)
        index = {request_id: place for place, request_id in enumerate(ids)}
        return cls(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[] for _ in ids], error=error)


class FailedStep(EmptyStep):
    """A step the device could not compute. `NeuronScheduler` ends the running requests with an error."""


class ForgottenCache(EmptyStep):
    """A step that was not computed, as the device was replaced while nobody used it: what the scheduler believes to
    be cached is not. `NeuronScheduler` forgets it and schedules the requests anew."""


def add_prompt_scores(request: LiveRequest, start: int, scores: PromptScores) -> None:
    """Keep `scores` of the chunk whose first token is at `start`; the prompt's last token has nothing to score."""
    tensors = _prompt_scores(request)
    count = min(len(scores.target_ranks), len(request.prompt) - 1 - start)
    rows, kept = slice(start, start + count), tensors.logprobs.shape[1] - 1
    targets = request.prompt[start + 1 : start + 1 + count]
    tensors.logprob_token_ids[rows, 0] = torch.tensor(targets, dtype=torch.int32)
    tensors.logprob_token_ids[rows, 1:] = torch.from_numpy(scores.top_ids[:count, :kept])
    tensors.logprobs[rows, 0] = torch.from_numpy(scores.target_logprobs[:count])
    tensors.logprobs[rows, 1:] = torch.from_numpy(scores.top_logprobs[:count, :kept])
    tensors.selected_token_ranks[rows] = torch.from_numpy(scores.target_ranks[:count])


def take_prompt_scores(request: LiveRequest) -> LogprobsTensors:
    """The prompt is done: its scores, once."""
    tensors = _prompt_scores(request)
    request.prompt_scores, request.scores_due = None, False
    return tensors


def _prompt_scores(request: LiveRequest) -> LogprobsTensors:
    if request.prompt_scores is None:
        columns = request.num_prompt_logprobs + 1
        request.prompt_scores = LogprobsTensors.empty_cpu(len(request.prompt) - 1, columns)
    return request.prompt_scores


def report(
    sampled: HostTokens | None,
    on_device: Sequence[tuple[LiveRequest, list[int]]],
    unfinished: Sequence[LiveRequest],
    prompt_logprobs: dict[str, LogprobsTensors | None],
) -> ModelRunnerOutput:
    """Host-sampled rows come first, because vLLM finds a request's log-probabilities by its index in the step."""
    ids = [request.id for request in sampled.requests] if sampled else []
    tokens = list(sampled.tokens) if sampled else []
    for request, own in on_device:
        ids.append(request.id)
        tokens.append(own)
    for request in unfinished:
        ids.append(request.id)
        tokens.append([])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=sampled.logprobs if sampled else None,
        prompt_logprobs_dict=prompt_logprobs,
    )
