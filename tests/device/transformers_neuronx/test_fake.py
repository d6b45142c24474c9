"""The stand-in against what is written about the library: shapes, types, errors, and the damage each trap does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .server import VOCABULARY

Make = Callable[..., Any]


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(*values)


def read(model: Any, prompt: list[int], slot: int) -> int:
    """Logits' favourite after a prompt of at least two tokens."""
    return int(model(tensor([prompt]), tensor([list(range(len(prompt)))]), tensor([slot])).argmax())


def decode(model: Any, *rows: tuple[int, int, int]) -> list[int]:
    """(token, position, slot) of each row."""
    tokens, positions, slots = zip(*rows, strict=True)
    logits = model(tensor(tokens)[:, None], tensor(positions)[:, None], tensor(slots))
    return [int(token) for token in logits.argmax(dim=-1)]


def generate(model: Any, prompt: list[int], count: int, slot: int = 0) -> list[int]:
    tokens = [read(model, prompt, slot)]
    while len(tokens) < count:
        tokens += decode(model, (tokens[-1], len(prompt) + len(tokens) - 1, slot))
    return tokens


class TestCalls:
    def test_a_request_alone_follows_the_rule(self, make_model: Make, answers: Any) -> None:
        assert generate(make_model(), [5, 6, 7], 6) == answers.greedy([5, 6, 7], 6, VOCABULARY)

    def test_logits_are_float32_rows_in_the_order_given(self, make_model: Make, answers: Any) -> None:
        model = make_model()
        prompts = {0: [5, 6], 1: [7, 8], 2: [9, 3]}
        tokens = {slot: read(model, prompt, slot) for slot, prompt in prompts.items()}
        logits = model(tensor([[tokens[2]], [tokens[0]]]), tensor([[2], [2]]), tensor([2, 0]))
        assert (logits.shape, logits.dtype) == ((2, VOCABULARY), torch.float32)
        expected = [answers.greedy(prompts[slot], 2, VOCABULARY)[1] for slot in (2, 0)]
        assert logits.argmax(dim=-1).tolist() == expected

    def test_tokens_are_int32_columns(self, make_model: Make, library: Any) -> None:
        model = make_model({"on_device_generation": library.GenerationConfig()})
        tokens = model(tensor([[5, 6]]), tensor([[0, 1]]), tensor([1]))
        assert (tokens.shape, tokens.dtype) == ((1, 1), torch.int32)
        assert model(tensor([[5], [6]]), tensor([[2], [2]]), tensor([1, 0])).shape == (2, 1)

    def test_any_slot_and_any_bucket_give_the_same_tokens(self, make_model: Make) -> None:
        model = make_model()
        wide = make_model(context_length_estimate=[32], n_positions=[32])
        assert generate(model, [5, 6, 7], 4, 0) == generate(model, [5, 6, 7], 4, 2) == generate(wide, [5, 6, 7], 4, 1)

    def test_each_prompt_of_a_call_runs_alone_at_the_longest_s_bucket(self, make_model: Make, chip: Any) -> None:
        model = make_model()
        ids = tensor([[5, 6] + [0] * 7, [3] * 9])
        positions = tensor([[0, 1] + [0] * 7, list(range(9))])
        model(ids, positions, tensor([1, 0]))
        assert model.chip.launches == [chip.Launch("prefill", 16, (1,)), chip.Launch("prefill", 16, (0,))]

    def test_a_decode_is_one_launch_at_the_furthest_row_s_bucket(self, make_model: Make, chip: Any) -> None:
        model = make_model()
        read(model, [5, 6], 0)
        read(model, [3] * 16, 1)
        model.chip.launches.clear()
        decode(model, (4, 2, 0), (4, 16, 1))
        decode(model, (4, 3, 0))
        assert model.chip.launches == [chip.Launch("decode", 32, (0, 1)), chip.Launch("decode", 16, (0,))]

    def test_nothing_runs_before_it_is_on_the_chip(self, library: Any, model_dir: Callable[..., str]) -> None:
        config = library.NeuronConfig(continuous_batching=library.ContinuousBatchingConfig(max_num_seqs=1))
        model = library.LlamaForSampling.from_pretrained(model_dir(), batch_size=1, neuron_config=config)
        with pytest.raises((AttributeError, ValueError)):  # no graph, or no weights
            read(model, [5, 6], 0)

    def test_a_call_without_slots_goes_to_the_first(self, make_model: Make) -> None:
        model = make_model()
        model(tensor([[5, 6]]), tensor([[0, 1]]))
        assert model.chip.launches[0].slots == (0,)


class TestErrors:
    def test_a_prompt_longer_than_the_largest_bucket(self, make_model: Make) -> None:
        with pytest.raises(AssertionError, match=r"invalid input prompt length \(17 <= 16\)"):
            read(make_model(), [3] * 17, 0)

    def test_a_slot_outside_the_batch(self, make_model: Make) -> None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            decode(make_model(), (3, 4, 3))

    def test_a_negative_slot(self, make_model: Make) -> None:
        with pytest.raises(RuntimeError):
            decode(make_model(), (3, 4, -1))

    def test_ids_and_positions_of_different_types(self, make_model: Make) -> None:
        with pytest.raises(RuntimeError, match=r"Expected self\.dtype to be equal to src\.dtype"):
            make_model()(tensor([[3]]), tensor([[4]]).int(), tensor([0]))

    def test_flat_positions(self, make_model: Make) -> None:
        with pytest.raises(IndexError):
            make_model()(tensor([[3]]), tensor([4]), tensor([0]))

    def test_slots_without_positions(self, make_model: Make) -> None:
        model = make_model()
        with pytest.raises(AttributeError):
            model(tensor([[3, 4]]), None, tensor([0]))
        with pytest.raises(TypeError):
            model(tensor([[3]]), None, tensor([0]))

    def test_a_column_of_slots_in_a_prompt(self, make_model: Make) -> None:
        with pytest.raises(AssertionError, match="input shape mismatch"):
            make_model()(tensor([[3, 4]]), tensor([[0, 1]]), tensor([[0]]))

    def test_several_tokens_from_the_middle(self, make_model: Make) -> None:
        with pytest.raises(AssertionError, match=r"invalid batch size for speculative forward \(1 not in \[\]\)"):
            make_model()(tensor([[3, 4]]), tensor([[2, 3]]), tensor([0]))

    def test_several_tokens_from_the_middle_of_a_mistral(self, make_model: Make) -> None:
        with pytest.raises(AttributeError):
            make_model(family="Mistral")(tensor([[3, 4]]), tensor([[2, 3]]), tensor([0]))

    def test_a_position_past_the_last_bucket(self, make_model: Make) -> None:
        with pytest.raises(StopIteration):
            decode(make_model(), (3, 32, 0))

    def test_an_id_outside_the_vocabulary(self, make_model: Make) -> None:
        with pytest.raises(IndexError, match="index out of range in self"):
            read(make_model(), [3, VOCABULARY], 0)

    def test_two_threads_at_once(self, make_model: Make) -> None:
        model = make_model()
        with model.chip.launch("decode", 16, ()), pytest.raises(RuntimeError, match="two threads"):
            read(model, [5, 6], 0)

    @pytest.mark.usefixtures("stand_in_only")
    def test_classes_without_continuous_batching(self, make_model: Make) -> None:
        with pytest.raises(AssertionError, match="doesn't support dynamic batching"):
            read(make_model(family="Bloom"), [5, 6], 0)


class TestDamage:
    """What goes wrong in hands that do not know the library."""

    def test_a_sequence_left_out_of_a_decode_loses_its_first_position(self, make_model: Make, answers: Any) -> None:
        model = make_model()
        first, second = read(model, [5, 6, 7], 0), read(model, [8, 9], 1)
        decode(model, (second, 2, 1))
        assert decode(model, (first, 3, 0)) != answers.greedy([5, 6, 7], 2, VOCABULARY)[1:]

    def test_a_prompt_of_one_token_damages_all_others(self, make_model: Make, answers: Any) -> None:
        model = make_model()
        first = read(model, [5, 6, 7], 0)
        assert read(model, [9], 1) == answers.greedy([9], 1, VOCABULARY)[0]
        assert model.chip.launches[-1].kind == "decode"
        assert decode(model, (first, 3, 0)) != answers.greedy([5, 6, 7], 2, VOCABULARY)[1:]

    def test_a_prompt_of_one_token_at_width_2_damages_nobody(self, make_model: Make, answers: Any) -> None:
        model = make_model()
        first = read(model, [5, 6, 7], 0)
        single = int(model(tensor([[9, 0]]), tensor([[0, 0]]), tensor([1])).argmax())
        assert single == answers.greedy([9], 1, VOCABULARY)[0]
        assert decode(model, (first, 3, 0), (single, 1, 1)) == [
            answers.greedy([5, 6, 7], 2, VOCABULARY)[1],
            answers.greedy([9], 2, VOCABULARY)[1],
        ]

    def test_positions_of_padding_that_are_not_0_move_the_last_token(self, make_model: Make, answers: Any) -> None:
        logits = make_model()(tensor([[5, 6, 0]]), tensor([[0, 1, 2]]), tensor([0]))
        assert int(logits.argmax()) == answers.greedy([5, 6, 0], 1, VOCABULARY)[0]

    def test_a_skipped_position_reads_what_padding_left(self, make_model: Make) -> None:
        model = make_model()
        read(model, [5, 6, 7], 0)
        decode(model, (8, 4, 0))
        assert model.chip.stale_reads == [(0, 3)]

    @pytest.mark.usefixtures("stand_in_only")
    def test_cores_that_share_a_sequence_overwrite_the_end_of_a_bucket(self, make_model: Make, answers: Any) -> None:
        """All but the last one's, which is longer by as much as they need."""
        model = make_model({"shard_over_sequence": True}, checkpoint={"num_key_value_heads": 1})
        tokens = generate(model, [5, 6, 7], 16)
        assert tokens[:13] == answers.greedy([5, 6, 7], 13, VOCABULARY)
        assert tokens[13:] != answers.greedy([5, 6, 7], 16, VOCABULARY)[13:]
        whole = make_model({"shard_over_sequence": True}, checkpoint={"num_key_value_heads": 1}, n_positions=[32])
        assert generate(whole, [5, 6, 7], 29) == answers.greedy([5, 6, 7], 29, VOCABULARY)

    @pytest.mark.usefixtures("stand_in_only")
    def test_cores_that_share_a_sequence_drop_what_does_not_divide(self, make_model: Make) -> None:
        arguments = {"context_length_estimate": [9], "checkpoint": {"num_key_value_heads": 1}}
        model = make_model({"shard_over_sequence": True}, **arguments)
        first = read(model, [5] * 9, 0)
        decode(model, (first, 9, 0))
        assert model.chip.stale_reads == [(0, 8)]

    def test_a_prompt_touches_its_own_slot_only(self, make_model: Make, answers: Any) -> None:
        model = make_model()
        first = read(model, [5, 6, 7], 0)
        read(model, [3] * 16, 1)
        assert decode(model, (first, 3, 0)) == answers.greedy([5, 6, 7], 2, VOCABULARY)[1:]

    def test_reset_empties_every_slot(self, make_model: Make) -> None:
        model = make_model()
        first = read(model, [5, 6, 7], 0)
        model.reset()
        decode(model, (first, 3, 0))
        assert model.chip.stale_reads == [(0, 0), (0, 1), (0, 2)]


class TestBuckets:
    @pytest.mark.parametrize(
        ("given", "sizes"),
        [(1000, [128, 256, 512, 1000]), (100, [100]), (128, [128]), ([64, 32], [32, 64])],
    )
    def test_token_generation(self, library: Any, given: Any, sizes: list[int]) -> None:
        from transformers_neuronx import bucket

        assert bucket.token_sizes(given) == sizes

    @pytest.mark.parametrize(
        ("given", "sizes"), [(None, [64, 128]), (0, []), (-1, []), (96, [96]), ([32, 16], [16, 32])]
    )
    def test_context(self, library: Any, given: Any, sizes: list[int]) -> None:
        from transformers_neuronx import bucket

        assert bucket.context_sizes(given, [128, 256]) == sizes

    @pytest.mark.parametrize(("size", "found"), [(1, 8), (8, 8), (9, 16), (17, 16)])
    def test_the_bucket_of_a_length(self, library: Any, size: int, found: int) -> None:
        from transformers_neuronx import bucket

        assert bucket.find([8, 16], size) == found
        assert bucket.find([], size) is None

    def test_a_batch_is_a_number_or_a_list(self, library: Any) -> None:
        from transformers_neuronx import bucket

        assert (bucket.batch_sizes(3), bucket.batch_sizes([4, 2])) == ([3], [2, 4])
        with pytest.raises(TypeError):
            bucket.batch_sizes("3")

    def test_by_default_half_of_the_positions_hold_a_prompt(self, make_model: Make) -> None:
        model = make_model(n_positions=32, context_length_estimate=None)
        with pytest.raises(AssertionError, match=r"invalid input prompt length \(17 <= 16\)"):
            read(model, [3] * 17, 0)


class TestConfiguration:
    def test_unknown_fields_are_named(self, library: Any) -> None:
        with pytest.raises(AssertionError, match=r"Unexpected NeuronConfig keyword arguments: \{'async_mode': True\}"):
            library.NeuronConfig(async_mode=True)
        with pytest.raises(AssertionError, match="unexpected key word arguments"):
            library.ContinuousBatchingConfig(max_num_seqs=2, block_size=4)

    def test_a_batch_needs_a_size(self, library: Any) -> None:
        with pytest.raises(KeyError):
            library.ContinuousBatchingConfig()
        assert library.ContinuousBatchingConfig(batch_size_for_shared_caches=3).max_num_seqs == 3

    def test_continuous_batching_pads_on_the_right(self, library: Any) -> None:
        config = library.NeuronConfig(continuous_batching=library.ContinuousBatchingConfig(max_num_seqs=2))
        assert (config.padding_side, config.use_2d_cache_ids) == ("right", True)

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"cast_logits_dtype": "int8"}, AssertionError),
            ({"qkv_tiling": True}, AssertionError),
            ({"group_query_attention": "half"}, ValueError),
            ({"attention_layout": "HBS"}, ValueError),
            ({"padding_side": "top"}, AssertionError),
            ({"shard_over_sequence": True, "cache_layout": "BSH"}, AssertionError),
            ({"mlp_in_weight_tiling_permute_order": [3, 2, 1, 0]}, AssertionError),
        ],
    )
    def test_bad_values(self, library: Any, fields: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            library.NeuronConfig(**fields)

    def test_a_bad_layout_of_collectives_is_let_through(self, library: Any) -> None:
        assert library.NeuronConfig(collectives_layout="HBS").collectives_layout == "HBS"

    def test_layouts_equal_their_names_and_nothing_else(self, library: Any) -> None:
        assert library.Layout.BSH == "BSH"
        assert "BSH" == library.Layout.BSH  # noqa: SIM300
        with pytest.raises(ValueError, match="None"):
            _ = library.Layout.BSH == None  # noqa: E711
        with pytest.raises(TypeError):
            hash(library.Layout.BSH)

    def test_fused_norms_go_away_in_silence(self, library: Any) -> None:
        assert not library.NeuronConfig(fused_rmsnorm_qkv=True, fuse_qkv=True).fused_rmsnorm_qkv
        asked = {"attention_layout": "BSH", "group_query_attention": "replicated-heads", "fuse_qkv": True}
        assert library.NeuronConfig(fused_rmsnorm_qkv=True, **asked).fused_rmsnorm_qkv

    def test_quantization_types(self, library: Any) -> None:
        with pytest.raises(NotImplementedError):
            library.QuantizationConfig(quant_dtype="s4")

    def test_the_batch_must_be_that_of_the_configuration(self, library: Any, model_dir: Callable[..., str]) -> None:
        config = library.NeuronConfig(continuous_batching=library.ContinuousBatchingConfig(max_num_seqs=4))
        with pytest.raises(AssertionError, match=r"invalid batch_size_for_shared_caches \(4\), 2 is expected"):
            library.LlamaForSampling.from_pretrained(model_dir(), batch_size=2, neuron_config=config)
        with pytest.raises(AssertionError, match=r"\(4\), None is expected"):
            library.LlamaForSampling.from_pretrained(model_dir(), neuron_config=config)

    def test_no_prompt_is_longer_than_the_cache(self, make_model: Make) -> None:
        with pytest.raises(AssertionError, match="estimate 64 cannot be more than max n_positions 32"):
            make_model(context_length_estimate=[64])

    def test_a_directory_without_weights(self, library: Any, model_dir: Callable[..., str]) -> None:
        directory = model_dir()
        (Path(directory) / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"Can not find model.safetensors or pytorch_model.bin"):
            library.LlamaForSampling.from_pretrained(directory)

    @pytest.mark.usefixtures("stand_in_only")
    def test_cores_that_cannot_work_as_one(self, make_model: Make) -> None:
        with pytest.raises(RuntimeError, match="Unsupported topology"):
            make_model(tp_degree=3)

    def test_the_configuration_is_written_to(self, make_model: Make, library: Any) -> None:
        model = make_model(tp_degree=4)  # two key and value heads on four cores
        assert model.neuron_config.group_query_attention is library.GQA.REPLICATED_HEADS

    def test_mistrals_share_a_default_configuration(self, library: Any, model_dir: Callable[..., str]) -> None:
        first, second = (library.MistralForSampling.from_pretrained(model_dir()) for _ in range(2))
        assert first.neuron_config is second.neuron_config
        llamas = [library.LlamaForSampling.from_pretrained(model_dir()).neuron_config for _ in range(2)]
        assert llamas[0] is not llamas[1]


@pytest.mark.usefixtures("stand_in_only")
class TestGraphsOnDisk:
    def load(self, library: Any, directory: str, artifacts: Path, **arguments: Any) -> Any:
        config = library.NeuronConfig(continuous_batching=library.ContinuousBatchingConfig(max_num_seqs=2))
        given = {"batch_size": 2, "n_positions": [16, 32], "context_length_estimate": [8], **arguments}
        model = library.LlamaForSampling.from_pretrained(directory, neuron_config=config, **given)
        model.load(str(artifacts))
        return model

    def test_one_file_per_graph(self, library: Any, make_model: Make, tmp_path: Path) -> None:
        make_model().save(str(tmp_path / "kept"))
        names = sorted(path.name for path in (tmp_path / "kept").iterdir())
        assert len(names) == 4
        assert all(len(name.removesuffix(".neff")) == 20 for name in names)

    def test_other_shapes_find_no_graph(self, library: Any, model_dir: Callable[..., str], tmp_path: Path) -> None:
        directory, kept = model_dir(), tmp_path / "kept"
        config = library.NeuronConfig(continuous_batching=library.ContinuousBatchingConfig(max_num_seqs=2))
        model = library.LlamaForSampling.from_pretrained(
            directory, neuron_config=config, batch_size=2, n_positions=[16, 32], context_length_estimate=[8]
        )
        with pytest.raises(AssertionError, match="cannot save a model which has not been successfully compiled"):
            model.save(str(kept))
        model.cpu_compile()
        model.save(str(kept))
        self.load(library, directory, kept).to_neuron()
        with pytest.raises(FileNotFoundError, match="Could not find a matching NEFF"):
            self.load(library, directory, kept, n_positions=[16, 64]).to_neuron()

    def test_a_file_is_no_directory(self, make_model: Make, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError):
            make_model().save(str(tmp_path / "file"))
