"""The stand-in's sampling and its fused speculation, against what is written about the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .server import VOCABULARY

Make = Callable[..., Any]
tensor = torch.tensor


def tables(library: Any, **changes: Any) -> Any:
    fields = {"do_sample": True, "dynamic": True, "per_batch_line": True, "global_top_k": 16, "deterministic": True}
    return library.GenerationConfig(**{**fields, "top_k": [1] * 3, **changes})


class TestSamplingOnTheChip:
    def test_greedy(self, make_model: Make, library: Any, answers: Any) -> None:
        model = make_model({"on_device_generation": library.GenerationConfig()})
        assert model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([0])).tolist() == [
            answers.greedy([5, 6], 1, VOCABULARY)
        ]

    def test_the_likeliest_of_one_is_greedy(self, make_model: Make, library: Any, answers: Any) -> None:
        model = make_model({"on_device_generation": tables(library)})
        assert model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([2])).tolist() == [
            answers.greedy([5, 6], 1, VOCABULARY)
        ]

    def test_the_configuration_is_spoiled_by_the_build(self, make_model: Make, library: Any) -> None:
        config = tables(library)
        make_model({"on_device_generation": config})
        assert not isinstance(config.top_k, list)
        with pytest.raises((AssertionError, TypeError, RuntimeError)):
            make_model({"on_device_generation": config})

    def test_lines_belong_to_slots(self, make_model: Make, library: Any, answers: Any) -> None:
        """Of each slot, in prompts and in decodes."""
        model = make_model({"on_device_generation": tables(library)})
        model.update_generation_config(tables(library, top_k=[1, 16, 1], temperature=[1.0, 50.0, 1.0]))
        prompt, positions = tensor([[5, 6]]), tensor([[0, 1]])
        drawn = {slot: int(model(prompt, positions, tensor([slot]))) for slot in (0, 1, 2)}
        likeliest = answers.greedy([5, 6], 1, VOCABULARY)[0]
        assert drawn[0] == drawn[2] == likeliest != drawn[1]

    def test_temperature_0_divides_by_it(self, make_model: Make, library: Any, answers: Any) -> None:
        model = make_model({"on_device_generation": tables(library, temperature=[0.0] * 3)})
        token = int(model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([0])))
        assert token != answers.greedy([5, 6], 1, VOCABULARY)[0]
        assert model.chip.divisions_by_zero == 1

    def test_no_candidates_are_all_candidates(self, make_model: Make, library: Any) -> None:
        model = make_model({"on_device_generation": tables(library, top_k=[0] * 3, deterministic=False)})
        drawn = {int(model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([0]))) for _ in range(60)}
        assert len(drawn) > 8

    def test_top_p_keeps_the_first_that_reach_it(self, make_model: Make, library: Any, answers: Any) -> None:
        settings = {"top_k": [16] * 3, "temperature": [0.2] * 3, "top_p": [0.01] * 3, "deterministic": False}
        model = make_model({"on_device_generation": tables(library, **settings)})
        drawn = {int(model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([0]))) for _ in range(20)}
        assert drawn == set(answers.greedy([5, 6], 1, VOCABULARY))

    @pytest.mark.parametrize(
        "changes",
        [{"top_k": [1, 1]}, {"per_batch_line": False}],
        ids=["too short", "lists without lines"],
    )
    def test_bad_lines(self, make_model: Make, library: Any, changes: dict[str, Any]) -> None:
        with pytest.raises(AssertionError):
            make_model({"on_device_generation": tables(library, **changes)})

    @pytest.mark.usefixtures("stand_in_only")
    def test_candidates_are_kept_by_dynamic_sampling_only(self, make_model: Make, library: Any) -> None:
        with pytest.raises(AssertionError):
            make_model({"on_device_generation": tables(library, dynamic=False)})

    def test_scalars_are_expanded_in_place(self, make_model: Make, library: Any) -> None:
        model = make_model({"on_device_generation": tables(library)})
        new = tables(library, top_k=7)
        model.update_generation_config(new)
        assert new.top_k == [7, 7, 7]

    def test_static_sampling_cannot_be_changed(self, make_model: Make, library: Any) -> None:
        model = make_model({"on_device_generation": library.GenerationConfig()})
        with pytest.raises(RuntimeError):
            model.update_generation_config(library.GenerationConfig(top_k=3))
        with pytest.raises(AssertionError, match="per_batch_line"):
            model.update_generation_config(tables(library))

    def test_configurations_compare_by_value(self, library: Any) -> None:
        assert tables(library) == copy.deepcopy(tables(library)) != tables(library, top_k=[2] * 3)


class TestFusedSpeculation:
    K = 3

    @pytest.fixture
    def fused(self, library: Any, make_model: Make) -> Callable[..., Any]:
        from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder

        def make(pad_token_id: int = -1, **draft: Any) -> Any:
            settings = {"on_device_embedding": True}
            models = []
            for changes in (draft, {}):
                generation = library.GenerationConfig()
                models.append(make_model({**settings, "on_device_generation": generation}, checkpoint=changes))
            decoder = FusedSpeculativeDecoder(*models, self.K, pad_token_id=pad_token_id)
            decoder.to_neuron()
            return decoder

        return make

    @pytest.fixture
    def eagle(self, library: Any, make_model: Make) -> Any:
        from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder

        common = {"on_device_embedding": True, "attention_layout": "BSH"}
        models = [
            make_model({**common, role: True, "on_device_generation": library.GenerationConfig()})
            for role in ("is_eagle_draft", "is_eagle_target")
        ]
        decoder = FusedSpeculativeDecoder(*models, self.K, pad_token_id=-1)
        decoder.to_neuron()
        return decoder

    def start(self, decoder: Any, prompt: list[int], slot: int = 0) -> int:
        tokens, counts = decoder.speculative_iteration(
            tensor([prompt]), tensor([list(range(len(prompt)))]), tensor([slot])
        )
        assert (tokens.shape, counts.tolist(), counts.dtype) == ((1, 1), [[1]], torch.int64)
        return int(tokens)

    def step(self, decoder: Any, token: int, position: int, slot: int = 0) -> tuple[list[int], int]:
        tokens, counts = decoder.speculative_iteration(tensor([[token]]), tensor([[position]]), tensor([slot]))
        assert (tokens.shape, tokens.dtype, counts.shape, counts.dtype) == ((1, 4), torch.int32, (1, 1), torch.int32)
        return tokens[0].tolist(), int(counts)

    def test_a_draft_that_agrees_gives_k_more(self, fused: Callable[..., Any], answers: Any) -> None:
        decoder = fused()
        first = self.start(decoder, [5, 6])
        tokens, count = self.step(decoder, first, 2)
        assert [first, *tokens] == answers.greedy([5, 6], 5, VOCABULARY)
        assert count == 4

    def test_a_draft_that_never_agrees_gives_the_target_s_own_token(
        self, fused: Callable[..., Any], answers: Any
    ) -> None:
        decoder = fused(fake_disagrees_every=1)
        first = self.start(decoder, [5, 6])
        tokens, count = self.step(decoder, first, 2)
        assert (tokens, count) == ([answers.greedy([5, 6], 2, VOCABULARY)[1], -1, -1, -1], 1)

    def test_idle_slots_lose_k_and_1_positions(self, fused: Callable[..., Any], answers: Any) -> None:
        decoder = fused()
        before = decoder.target.chip
        self.start(decoder, [5] * 8, slot=0)
        cells = before.cells[0].copy()
        other = self.start(decoder, [8, 9], slot=1)
        self.step(decoder, other, 2, slot=1)
        changed = [position for position in range(8) if before.cells[0, position] != cells[position]]
        assert changed == [0, 1, 2, 3]

    def test_a_genuine_token_that_equals_the_padding_is_replaced(self, fused: Callable[..., Any], answers: Any) -> None:
        prompt = next([n, 5] for n in range(1, VOCABULARY) if 0 in answers.greedy([n, 5], 5, VOCABULARY)[2:])
        decoder = fused(pad_token_id=0)
        tokens, _ = self.step(decoder, self.start(decoder, prompt), 2)
        assert tokens != answers.greedy(prompt, 5, VOCABULARY)[1:]
        assert 0 not in tokens

    def test_rows_of_both_kinds_are_all_taken_for_prompts(self, fused: Callable[..., Any]) -> None:
        decoder = fused()
        first = self.start(decoder, [5, 6])
        decoder.speculative_iteration(tensor([[7, 8], [first, 0]]), tensor([[0, 1], [2, 2]]), tensor([1, 0]))
        assert {launch.kind for launch in decoder.target.chip.launches} == {"prefill"}

    def test_no_error_past_the_last_bucket(self, fused: Callable[..., Any]) -> None:
        decoder = fused()
        token = self.start(decoder, [5] * 16)
        for position in range(16, 31):
            token = decoder.target.chip.draw(0, 0, library_greedy())
            self.step(decoder, token, position)
        assert decoder.target.chip.lost_writes

    def test_both_models_must_sample_and_embed(self, library: Any, make_model: Make) -> None:
        from transformers_neuronx.fused_speculation import FusedSpeculativeDecoder

        with pytest.raises(AssertionError, match="must enable on-device embedding"):
            FusedSpeculativeDecoder(make_model(), make_model())

    def test_an_eagle_prompt_of_two_tokens_fails_in_all_slots_but_the_first(self, eagle: Any, answers: Any) -> None:
        """The draft reads one token less, and at width 1 rows are picked by slot."""
        assert self.start(eagle, [5, 6], slot=0) == answers.greedy([5, 6], 1, VOCABULARY)[0]
        with pytest.raises(IndexError):
            self.start(eagle, [5, 6], slot=1)

    def test_eagle_moves_the_caller_s_positions(self, eagle: Any, answers: Any) -> None:
        first = self.start(eagle, [5, 6])
        positions = tensor([[2]])
        tokens, _ = eagle.speculative_iteration(tensor([[first]]), positions, tensor([0]))
        assert positions.tolist() == [[1]]
        assert [first, *tokens[0].tolist()] == answers.greedy([5, 6], 5, VOCABULARY)


def library_greedy() -> Any:
    from transformers_neuronx import GenerationConfig

    return GenerationConfig()
