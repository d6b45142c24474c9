"""Draft and target in one graph: k drafts, one verification, 1 to k+1 tokens out."""

import torch

from . import bucket
from .base import pieces


class FusedSpeculativeDecoder:
    """Both models are on the chip already; this adds graphs of its own, and has no save or load."""

    def __init__(
        self,
        draft,
        target,
        k=2,
        pad_token_id=0,
        eos_token_id=None,
        buckets=None,
        output_scores=False,
        deterministic_threshold=None,
        debug=False,
        simulation_acceptance_length=None,
    ):
        for name, model in (("draft", draft), ("target", target)):
            config = model.neuron_config
            assert config.on_device_embedding, f"The {name} model must enable on-device embedding."
            assert config.on_device_generation is not None, f"The {name} model must enable on-device sampling."
            if model.batch_sizes != [1]:
                assert config.padding_side == "right", f"The {name} model must set padding_side as right."
        assert target.config.vocab_size == draft.config.vocab_size, "must have the same vocab size."
        assert target.decoder_lm_head.tp_degree == draft.decoder_lm_head.tp_degree, "must have the same tp degree."
        assert isinstance(k, int), "The k value must be an integer."
        self.draft, self.target, self.k = draft, target, k
        self.pad_token_id = pad_token_id
        self.buckets = buckets or target.decoder_lm_head.n_positions_list
        self.batch_sizes = target.batch_sizes
        self.is_eagle = draft.neuron_config.is_eagle_draft and target.neuron_config.is_eagle_target
        self.hidden = {}  # by slot, for EAGLE
        self.speculator = None

    def to_neuron(self, workers=None):
        assert all([self.draft.chip, self.target.chip]), "both models must be on the chip"
        self.speculator = object()

    def update_generation_config(self, generation_config):
        if self.draft.neuron_config.on_device_generation.dynamic:
            self.draft.update_generation_config(generation_config)
        self.target.update_generation_config(generation_config)

    def speculative_iteration(self, input_ids, cache_ids, start_ids):
        if (cache_ids.min(dim=-1).values == 0).any():
            return self._read_prompts(input_ids, cache_ids, start_ids)
        if self.speculator is None:
            raise AttributeError("'NoneType' object has no attribute 'execute'")
        num_slots, slots = self.batch_sizes[0], start_ids.flatten().to(torch.long)
        hidden = None
        if self.is_eagle:
            hidden = self._by_slot(torch.cat([self.hidden[int(slot)] for slot in start_ids]), slots, num_slots)
            cache_ids -= 1  # the draft is one position behind; this is the caller's tensor
        tokens, positions = (self._by_slot(tensor, slots, num_slots) for tensor in (input_ids, cache_ids))
        furthest = int(positions.max()) + self.k + 1
        size = bucket.find(self.buckets, furthest + 1)  # the largest if none is large enough, without a word
        drawn = torch.zeros(num_slots, self.k + 1, dtype=torch.int32)
        counts = torch.zeros(num_slots, 1, dtype=torch.int32)
        with (
            self.draft.chip.launch("draft", size, slots.tolist()),
            self.target.chip.launch("speculate", size, slots.tolist()),
        ):
            for slot in range(num_slots):
                state = None if hidden is None else hidden[slot, 0]
                emitted = self._speculate(slot, int(tokens[slot, 0]), int(positions[slot, 0]), state)
                drawn[slot, : len(emitted)], counts[slot, 0] = torch.tensor(emitted, dtype=torch.int32), len(emitted)
        return self._padded(drawn[slots], counts[slots])

    def _read_prompts(self, input_ids, cache_ids, start_ids):
        """All rows are taken for prompts as soon as one of them is."""
        num_rows = len(input_ids)
        if not self.is_eagle:
            first = self.target(input_ids, cache_ids, start_ids).reshape(num_rows, -1)
            self.draft(input_ids, cache_ids, start_ids)
            return first, torch.tensor([[1]] * num_rows)
        first, hidden = self.target(input_ids, cache_ids, start_ids)
        if input_ids.shape[-1] > 1:
            self.draft(input_ids[:, 1:], cache_ids=cache_ids[:, :-1], start_ids=start_ids, prev_hidden=hidden)
        last = torch.count_nonzero(cache_ids, dim=1)
        for row, slot in enumerate(start_ids):
            self.hidden[int(slot)] = hidden[row, int(last[row])].reshape(1, 1, -1)
        return first.reshape(num_rows, -1), torch.tensor([[1]] * num_rows)

    @staticmethod
    def _by_slot(tensor, slots, num_slots):
        full = torch.zeros((num_slots, *tensor.shape[1:]), dtype=tensor.dtype)
        full[slots] = tensor
        return full

    def _speculate(self, slot, token, position, hidden):
        """One slot's tokens: the agreed drafts and one of the target's own. k+1 positions are written."""
        start = position + 1 if self.is_eagle else position
        drafts = (
            self._eagle_drafts(slot, token, position, hidden) if self.is_eagle else self._drafts(slot, token, position)
        )
        chip, config = self.target.chip, self.target.neuron_config.on_device_generation
        digests = chip.write_tokens(slot, start, [token, *drafts])
        emitted = []
        for offset, digest in enumerate(digests):
            emitted.append(chip.draw(digest, slot, config))
            if offset == self.k or emitted[-1] != drafts[offset]:
                break
        if self.is_eagle:
            self.hidden[slot] = torch.zeros_like(hidden).reshape(1, 1, -1)
            self.hidden[slot][0, 0, :4] = pieces(digests[len(emitted) - 1])
        return emitted

    def _drafts(self, slot, token, position):
        chip, config = self.draft.chip, self.draft.neuron_config.on_device_generation
        drafts = []
        for offset in range(self.k + 1):  # the last one only fills the draft's cache
            [digest] = chip.write_tokens(slot, position + offset, [token])
            token = chip.draw(digest, slot, config)
            drafts.append(token)
        return drafts[: self.k]

    def _eagle_drafts(self, slot, token, position, hidden):
        drafts = []
        for offset in range(self.k):
            digest, hidden = self.draft.eagle_step(slot, position + offset, token, hidden)
            token = self.draft.chip.draw(digest, slot, self.draft.neuron_config.on_device_generation)
            drafts.append(token)
        return drafts

    def _padded(self, tokens, counts):
        """A genuine token that equals the padding is replaced by the first token of the first row."""
        tokens[tokens == self.pad_token_id] = tokens[0, 0].clone()
        result = torch.full_like(tokens, self.pad_token_id)
        for row, [count] in enumerate(counts.tolist()):
            result[row, :count] = tokens[row, :count]
        return result, counts
