"""vLLM's sampler with our draw, and with TGI's rules for the rows that are TGI's.

vLLM applies its parameters to a table of all rows; the three places where TGI differs are entered row by row, so what
other rows ask for stays exactly vLLM's. Knows the step's rows; decides nothing about who is sampled where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from neuronserve.neuron_worker.drawing import InverseDraw
from neuronserve.neuron_worker.parameters import NEED_LOGITS, asked
from neuronserve.neuron_worker.tgi_rules import TgiRules, penalize

if TYPE_CHECKING:
    from vllm.config.model import LogprobsMode
    from vllm.v1.sample.metadata import SamplingMetadata

    from neuronserve.neuron_worker.state import LiveRequest


class TgiRow(NamedTuple):
    rules: TgiRules
    request: LiveRequest

    @property
    def changes_its_scores(self) -> bool:
        """Whether the processed scores are others than the model's own."""
        params = self.request.params
        is_greedy = params.sampling_type == SamplingType.GREEDY
        return not is_greedy or bool(self.rules.asked) or bool(asked(params, NEED_LOGITS).keys() - {"logprobs"})


class RowSampler(Sampler):
    """`arrange` before each call says what the rows are."""

    def __init__(self, logprobs_mode: LogprobsMode, *, has_custom_processors: bool) -> None:
        super().__init__(logprobs_mode)
        self._draw = InverseDraw(logprobs_mode)
        self.topk_topp_sampler = self._draw  # type: ignore[assignment]
        self._tgi: Mapping[int, TgiRow] = {}
        self._always_rescored = has_custom_processors or not logprobs_mode.endswith("logprobs")

    def arrange(self, uniforms: Sequence[float | None], tgi: Mapping[int, TgiRow]) -> None:
        """One number in [0, 1) per row, None for greedy rows; and which rows are TGI's."""
        self._draw.uniforms, self._tgi = uniforms, tgi
        self._draw.typical_p = {i: row.rules.typical_p for i, row in tgi.items() if row.rules.typical_p < 1}

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: LogprobsMode | None = None,
    ) -> SamplerOutput:
        output = super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors = self._rescored(output.logprobs_tensors, output.sampled_token_ids)
        return output

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> torch.Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        for index, (rules, request) in self._tgi.items():
            if rules.frequency_penalty:
                penalize(logits[index].numpy(), request.prompt + request.output, rules.frequency_penalty)
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: LogprobsMode | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._draw.scores = logits  # where all rows are greedy, vLLM stops here
        return super().sample(logits, sampling_metadata, logprobs_mode_override)

    def _rescored(self, reported: LogprobsTensors, sampled: torch.Tensor) -> LogprobsTensors:
        """TGI's rows with the log-probabilities of their processed scores in place of the model's."""
        rows = [index for index, row in self._tgi.items() if self._is_rescored(row)]
        if not rows:
            return reported
        logprobs = self.compute_logprobs(self._draw.scores[rows])  # [TGI's rows, vocabulary]
        counts = [self._tgi[index].request.params.logprobs or 0 for index in rows]
        most = max(logprobs.shape[1] if count < 0 else count for count in counts)
        own = _without_impossible(self.gather_logprobs(logprobs, most, sampled[rows, 0].long()))
        ids, values, ranks = _at_least(reported, most + 1)
        ids[rows, : most + 1], values[rows, : most + 1], ranks[rows] = own[:3]
        return LogprobsTensors(ids, values, ranks)

    def _is_rescored(self, row: TgiRow) -> bool:
        return row.request.params.logprobs is not None and (self._always_rescored or row.changes_its_scores)


def _without_impossible(found: LogprobsTensors) -> LogprobsTensors:
    """Tokens of probability 0 leave the list: their columns repeat the last possible one. vLLM makes a dictionary of
    a row, so nobody sees a token twice, nor an infinity that JSON has no word for."""
    num_possible = torch.isfinite(found.logprobs[:, 1:]).sum(dim=1, keepdim=True)
    columns = torch.arange(found.logprobs.shape[1]).expand_as(found.logprobs).minimum(num_possible)
    ids, logprobs = (table.gather(1, columns) for table in (found.logprob_token_ids, found.logprobs))
    return found._replace(logprob_token_ids=ids, logprobs=logprobs)


def _at_least(reported: LogprobsTensors, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three tables, wide enough. A row that named its tokens makes vLLM's narrow; then the first column, a row's
    own token, is repeated."""
    ids, logprobs, ranks, *_ = reported
    missing = max(0, width - ids.shape[1])
    ids = torch.cat([ids, ids[:, :1].expand(-1, missing)], dim=1)
    logprobs = torch.cat([logprobs, logprobs[:, :1].expand(-1, missing)], dim=1)
    return ids, logprobs, ranks
