"""Llama: the one class that speculates."""

import torch

from .. import answers
from ..base import NeuronModelBase, joined, pieces


class LlamaForSampling(NeuronModelBase):
    speculates = True

    def __init__(self, config, *, prefixed_length=0, **kwargs):
        super().__init__(config, **kwargs)
        scaling = getattr(config, "rope_scaling", None) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"unknown rope scaling {kind}")
        if prefixed_length:
            raise NotImplementedError("the fake has no shared prefix")

    def forward(self, input_ids, cache_ids=None, start_ids=None, last_token_id=None, input_embeddings=None, **kwargs):
        if last_token_id is not None or input_embeddings is not None:
            raise NotImplementedError("the fake takes token ids as they are")
        return self._forward(input_ids, cache_ids, start_ids, kwargs.get("prev_hidden"))

    # -- as an EAGLE draft, it reads the target's state beside the token after it

    def _prefill(self, input_ids, cache_ids, start_ids, prev_hidden):
        if self.neuron_config.is_eagle_draft and prev_hidden is None:
            raise AssertionError("an EAGLE draft needs the target's hidden state")
        return super()._prefill(input_ids, cache_ids, start_ids, prev_hidden)

    def eagle_step(self, slot, position, token, hidden):
        """(digest after the token, hidden state of it); the draft's own cache is written at `position`."""
        cell = answers.make_cell(token, position, 0)
        self.chip.write(slot, position, cell)
        before = joined(hidden)
        digest = answers.extend(before, answers.make_cell(token, position + 1, before), position + 1)
        state = torch.zeros_like(hidden)
        state[:4] = pieces(digest)
        return digest, state
