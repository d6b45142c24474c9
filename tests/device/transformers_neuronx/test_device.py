"""The verbs in their order, shapes and buckets, compiled graphs on disk, and what a step may not ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import StepShape, Want
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost, DoesNotFit, LoadError, UncompiledShape
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice

from .server import LONGEST, VOCABULARY, Running, Server

Serve = Callable[..., Server]

MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None}


def verbs(chip: Any) -> list[str]:
    return [verb for _, verb in chip.calls]


class TestBuilding:
    def test_all_graphs_at_once_when_the_device_is_sealed(self, serve: Serve, chip: Any) -> None:
        server = serve()
        assert verbs(chip) == ["to_neuron"]
        model = chip.chips[0].model
        assert (model.context_buckets, model.token_buckets) == ([8, 16, 32], [16, 32, 64])
        assert (model.batch_sizes, model.amp, model.tp_degree) == ([3], "f32", 2)
        server.generate([5, 6, 7], 30)
        assert verbs(chip) == ["to_neuron"]

    def test_a_call_runs_the_bucket_its_shape_names(self, serve: Serve, chip: Any) -> None:
        server = serve()
        request = server.start([5] * 9)
        while len(request.all) < 40:
            server.decode()
        buckets = [(launch.kind, launch.bucket) for launch in chip.chips[0].launches]
        lengths = range(10, 40)
        expected = [("decode", min(size for size in (16, 32, 64) if size >= length)) for length in lengths]
        assert buckets == [("prefill", 16), *expected]

    def test_prompts_of_one_call_run_at_their_own_buckets(self, serve: Serve, chip: Any) -> None:
        server = serve(context_buckets=(8, 16, 32))
        server.start_together([[3] * 3, [4] * 14, [5] * 8])
        launches = [(launch.bucket, launch.slots) for launch in chip.chips[0].launches]
        assert launches == [(8, (0,)), (8, (2,)), (16, (1,))]

    def test_the_largest_bucket_is_the_length_of_the_cache(self, serve: Serve, chip: Any) -> None:
        serve(token_generation_buckets=None, max_model_len=300, context_buckets=(64,))
        assert chip.chips[0].model.token_buckets == [128, 256, 300]

    def test_more_blocks_than_slots_are_refused(self, serve: Serve) -> None:
        with pytest.raises(DoesNotFit, match=r"5 cache blocks.*--num-gpu-blocks-override 4"):
            serve().device.allocate(5)

    @pytest.mark.parametrize(
        ("shape", "error", "message"),
        [
            (StepShape(3, 1, 8, 16), DeviceError, "separate calls"),
            (StepShape(4, 1, 0, 16), DoesNotFit, r"more rows than --max-num-seqs \(3\)"),
            (StepShape(3, 1, 0, 128), DoesNotFit, r"longer than --max-model-len \(64\)"),
            (StepShape(3, 4, 0, 64), DeviceError, "load a draft, or use a width of 1"),
        ],
    )
    def test_shapes_it_cannot_compute(
        self, library: Any, model_dir: Callable[..., str], serve: Serve, shape: StepShape, error: type, message: str
    ) -> None:
        device = NeuronxDevice(environ={})
        device.load(model_dir(), serve().options)
        with pytest.raises(error, match=message):
            device.compile(shape)

    def test_a_shape_after_a_step_builds_all_anew_and_loses_the_cache(
        self, library: Any, model_dir: Callable[..., str], chip: Any, serve: Serve
    ) -> None:
        """Where nobody seals; a server does."""
        server = serve()
        device = server.device = NeuronxDevice(environ={})
        device.load(model_dir(), server.options)
        device.allocate(4)
        for shape in server.plan.shapes[:-1]:
            device.compile(shape)
        request = server.start([5, 6, 7])
        server.decode()
        device.compile(server.plan.shapes[-1])  # the cache was this long already
        server.decode()
        device.compile(StepShape(0, 1, 64, 64))
        with pytest.raises(DeviceError, match="read again"):
            server.decode()
        assert len(request.tokens) == 3
        assert verbs(chip) == ["to_neuron"] * 3  # the first is the server's own device

    def test_facts(self, serve: Serve) -> None:
        facts = serve().facts
        assert (facts.architecture, facts.vocab_size, facts.num_layers) == ("LlamaForCausalLM", VOCABULARY, 2)
        assert facts.bytes_per_kv_token == 2 * 2 * 2 * 8 * 4

    def test_int8_is_the_library_s_and_the_head_is_not_part_of_it(self, serve: Serve, chip: Any) -> None:
        server = serve(quantization="int8", quantize_head=True)
        assert chip.chips[0].model.neuron_config.quant.quant_dtype == "s8"
        assert any(note.startswith("quantize_head has no effect") for note in server.facts.notes)

    def test_closed(self, serve: Serve) -> None:
        server = serve()
        server.device.close()
        with pytest.raises(DeviceError, match="no model is loaded"):
            server.start([5, 6])


class TestSteps:
    def test_logits_of_the_rows_that_want_them(self, serve: Serve, answers: Any) -> None:
        server = serve()
        prompts = [[5, 6], [7, 8, 9], [3]]
        rows = [
            server.row(Running(prompt, slot), prompt, 0, is_decode=False)._replace(want=want)
            for slot, (prompt, want) in enumerate(zip(prompts, (Want.LOGITS, Want.TOKEN, Want.LOGITS), strict=True))
        ]
        outputs = server.call(rows)
        likeliest = [answers.greedy(prompt, 1, VOCABULARY)[0] for prompt in prompts]
        assert [None if o.logits is None else int(o.logits[0].argmax()) for o in outputs] == [
            likeliest[0],
            None,
            likeliest[2],
        ]
        assert [int(output.tokens[0]) for output in outputs] == [-1, likeliest[1], -1]

    def test_a_draw_on_the_host_follows_its_number(self, serve: Serve) -> None:
        server = serve()

        def drawn(uniform: float) -> int:
            row = server.prompt_row([5, 6], 0)
            row = row._replace(temperature=50.0, uniforms=(uniform,))
            return int(server.call([row])[0].tokens[0])

        assert drawn(0.01) < drawn(0.99)
        assert drawn(0.37) == drawn(0.37)

    def test_a_position_that_does_not_follow(self, serve: Serve) -> None:
        server = serve()
        request = server.start([5, 6, 7])
        with pytest.raises(DeviceError, match="slot 0 holds 3 tokens, a row decodes at position 5"):
            server.call([server.row(request, [3], 5, is_decode=True)])
        server.decode()

    def test_two_rows_of_one_slot(self, serve: Serve) -> None:
        server = serve()
        with pytest.raises(DeviceError, match="share a slot"):
            server.call([server.prompt_row([5, 6], 1), server.prompt_row([7, 8], 1)])

    def test_a_block_that_is_no_slot(self, serve: Serve) -> None:
        server = serve()
        for slot in (-1, 3):
            with pytest.raises(DeviceError, match=f"block {slot + 1} is no slot"):
                server.call([server.prompt_row([5, 6], slot)])

    def test_a_prompt_from_the_middle(self, serve: Serve) -> None:
        server = serve()
        with pytest.raises(DeviceError, match="starts at position 2"):
            server.call([server.row(Running([5, 6], 0), [5, 6], 2, is_decode=False)])

    def test_scores_of_a_prompt(self, serve: Serve) -> None:
        server = serve()
        row = server.prompt_row([5, 6], 0)._replace(targets=np.array([6, -1], np.int32))
        with pytest.raises(DeviceError, match="prompt log-probabilities"):
            server.call([row])

    def test_copies_of_slots(self, serve: Serve) -> None:
        serve().device.copy_blocks([])
        with pytest.raises(DeviceError, match="copies none"):
            serve().device.copy_blocks([(1, 2)])

    def test_an_unknown_shape(self, serve: Serve) -> None:
        server = serve()
        batch = server.packed([server.prompt_row([5, 6], 0)])
        with pytest.raises(UncompiledShape):
            server.device.run(replace(batch, shape=StepShape(0, 1, 7, 7)))

    def test_a_failing_runtime_is_a_lost_device(self, serve: Serve, chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        server = serve()
        server.start([5, 6, 7])

        def fail(*args: object) -> None:
            raise RuntimeError("nrt_execute failed: status 5")

        with monkeypatch.context() as patch:
            patch.setattr(chip.chips[0], "write_tokens", fail)
            with pytest.raises(DeviceLost, match="nrt_execute failed"):
                server.decode()
        with pytest.raises(DeviceError, match="read again"):  # the cache is anybody's guess
            server.decode()


@pytest.mark.usefixtures("stand_in_only")
class TestGraphsOnDisk:
    def test_kept_and_found_again(self, serve: Serve, chip: Any, answers: Any, tmp_path: Path) -> None:
        for expected in (["to_neuron", "save"], ["load", "to_neuron"]):
            server = serve(artifacts=str(tmp_path / "kept"))
            assert verbs(chip) == expected
            assert server.generate([5, 6, 7], 3) == answers.greedy([5, 6, 7], 3, VOCABULARY)
            chip.calls.clear()
        [made] = (tmp_path / "kept" / "transformers-neuronx").iterdir()
        assert json.loads((made / "identity.json").read_text())["arguments"]["n_positions"] == [16, 32, 64]
        assert len(list(made.glob("*.neff"))) == 6

    @pytest.mark.parametrize(
        "changes",
        [
            {"environ": {"NEURON_CC_FLAGS": "-O1"}},
            {"dtype": "bfloat16"},
            {"tensor_parallel_size": 4},
            {"sampling": "device"},
            {"context_buckets": (8, 32)},
            {"token_generation_buckets": (32, LONGEST)},
            {"max_num_seqs": 2},
            {"neuron_config": {"fuse_qkv": False}},
            {"neuron_config": {"quant": {"quant_dtype": "s8"}}},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_anything_that_decides_a_graph_has_its_own(
        self, serve: Serve, chip: Any, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        for options in ({}, changes):
            serve(artifacts=str(tmp_path), **options)
        assert verbs(chip) == ["to_neuron", "save"] * 2

    def test_another_compiler_has_its_own(
        self, serve: Serve, chip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library's names of files are the same for both."""
        serve(artifacts=str(tmp_path))
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 2.20.9961")
        serve(artifacts=str(tmp_path))
        assert verbs(chip) == ["to_neuron", "save"] * 2

    def test_another_model_of_the_same_shape_shares_them(
        self, serve: Serve, model_dir: Callable[..., str], chip: Any, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            serve(model_dir(name, _name_or_path=name), artifacts=str(tmp_path))
        assert verbs(chip) == ["to_neuron", "save", "load", "to_neuron"]

    @pytest.mark.parametrize(
        "flags", ["--cache_dir=/elsewhere -O2", "-O2 --cache_dir /elsewhere --log_level 20", "-O2 --no_cache"]
    )
    def test_flags_that_say_where_to_compile_share_them(
        self, serve: Serve, chip: Any, tmp_path: Path, flags: str
    ) -> None:
        for given in ("-O2", flags):
            serve(artifacts=str(tmp_path), environ={"NEURON_CC_FLAGS": given})
        assert verbs(chip) == ["to_neuron", "save", "load", "to_neuron"]

    def test_where_nothing_may_be_compiled_nothing_is(self, serve: Serve, chip: Any, tmp_path: Path) -> None:
        with pytest.raises(LoadError, match=r"no compiled graphs for this model, and require_cached"):
            serve(artifacts=str(tmp_path), require_artifacts=True)
        assert verbs(chip) == []
        serve(artifacts=str(tmp_path))
        chip.calls.clear()
        serve(artifacts=str(tmp_path), require_artifacts=True)
        assert verbs(chip) == ["load", "to_neuron"]
        next(tmp_path.rglob("*.neff")).unlink()
        chip.calls.clear()
        with pytest.raises(LoadError, match=r"do not fit .*, and require_cached"):
            serve(artifacts=str(tmp_path), require_artifacts=True)
        assert verbs(chip) == ["load", "to_neuron"]  # the second one found the graph missing

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [({}, "/kept/compiler"), ({"NEURON_COMPILE_CACHE_URL": "s3://theirs"}, "s3://theirs")],
    )
    def test_the_compiler_s_own_cache(self, serve: Serve, environ: dict[str, str], expected: str) -> None:
        environ = dict(environ)
        serve(compiler_cache="/kept/compiler", environ=environ)
        assert environ["NEURON_COMPILE_CACHE_URL"] == expected

    def test_a_graph_that_is_missing_is_compiled_anew(self, serve: Serve, chip: Any, tmp_path: Path) -> None:
        serve(artifacts=str(tmp_path))
        next(tmp_path.rglob("*.neff")).unlink()
        chip.calls.clear()
        serve(artifacts=str(tmp_path))
        assert verbs(chip) == ["load", "to_neuron", "to_neuron", "save"]

    def test_a_half_written_directory_is_not_found(self, serve: Serve, chip: Any, tmp_path: Path) -> None:
        serve(artifacts=str(tmp_path))
        next(tmp_path.rglob("identity.json")).unlink()
        chip.calls.clear()
        serve(artifacts=str(tmp_path))
        assert verbs(chip)[0] == "to_neuron"

    def test_a_directory_that_cannot_be_written_costs_nothing_else(
        self, serve: Serve, answers: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        server = serve(artifacts=str(tmp_path / "file"))
        assert server.generate([5, 6, 7], 3) == answers.greedy([5, 6, 7], 3, VOCABULARY)

    @pytest.mark.parametrize("error", [AssertionError("cannot save a model"), RuntimeError("nrt: no such file")])
    def test_graphs_that_cannot_be_saved_serve_all_the_same(
        self,
        serve: Serve,
        library: Any,
        answers: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        def save_half(model: Any, directory: str) -> None:
            (Path(directory) / "half.neff").touch()
            raise error

        monkeypatch.setattr(library.LlamaForSampling, "save", save_half)
        server = serve(artifacts=str(tmp_path))
        assert server.generate([5, 6, 7], 3) == answers.greedy([5, 6, 7], 3, VOCABULARY)
        assert f"were not kept in {tmp_path}" in caplog.text
        assert f"{type(error).__name__}: {error}" in caplog.text
        assert list((tmp_path / "transformers-neuronx").iterdir()) == []


class TestSamplingOnTheChip:
    def test_each_slot_has_its_own_parameters(self, serve: Serve, chip: Any, answers: Any) -> None:
        server = serve(sampling="device")
        greedy = server.start([5, 6, 7], temperature=0.0)
        wild = server.start([5, 6, 7], temperature=40.0)
        for _ in range(5):
            server.decode()
        assert greedy.tokens == answers.greedy([5, 6, 7], 6, VOCABULARY)
        assert wild.tokens != greedy.tokens
        assert chip.chips[0].tables["top_k"][:2] == [1, 256]

    def test_parameters_are_written_when_they_change(self, serve: Serve, chip: Any) -> None:
        server = serve(sampling="device")
        server.start([5, 6], temperature=0.5, top_k=3, top_p=0.9)
        for _ in range(4):
            server.decode()
        assert verbs(chip).count("update_generation_config") == 1
        tables = {name: values[0] for name, values in chip.chips[0].tables.items()}
        assert tables == {"top_k": 3, "top_p": pytest.approx(0.9), "temperature": 0.5, "top_p_min_tokens": 1}

    @pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
    def test_parameters_whose_writing_failed_are_written_again(
        self, serve: Serve, chip: Any, monkeypatch: pytest.MonkeyPatch, is_written: bool
    ) -> None:
        """It may have failed before the chip had them, or after: neither the new ones nor the old are known there."""
        server = serve(sampling="device")
        old, new = (server.prompt_row([5, 6], 0)._replace(temperature=value) for value in (0.5, 0.25))
        server.call([old])
        model = chip.chips[0].model
        write = model.update_generation_config

        def fail(config: Any) -> None:
            if is_written:
                write(config)
            raise ValueError("no such table")

        with monkeypatch.context() as patch:
            patch.setattr(model, "update_generation_config", fail)
            with pytest.raises(DeviceError, match="no such table"):
                server.call([new])
        again = old if is_written else new
        server.call([again])
        assert chip.chips[0].tables["temperature"][0] == again.temperature

    def test_one_number_of_yours_is_every_slot_s(self, serve: Serve, chip: Any) -> None:
        server = serve(neuron_config={"on_device_generation": {"top_k": 50, "temperature": 0.5}})
        assert chip.chips[0].tables["top_k"] == [50, 50, 50]
        server.call([server.prompt_row([5, 6], 1)._replace(temperature=0.25, top_k=9)])
        assert chip.chips[0].tables["top_k"] == [50, 9, 50]
        assert chip.chips[0].tables["temperature"] == [0.5, 0.25, 0.5]

    def test_a_new_build_is_told_the_parameters_anew(
        self, library: Any, model_dir: Callable[..., str], chip: Any, serve: Serve
    ) -> None:
        server = serve(sampling="device")
        device = server.device = NeuronxDevice(environ={})
        device.load(model_dir(), server.options)
        device.allocate(4)
        for shape in server.plan.shapes:
            device.compile(shape)
        row = server.prompt_row([5, 6], 0)._replace(temperature=0.5)
        server.call([row])
        device.compile(StepShape(0, 1, 64, 64))
        server.call([row])
        assert len(chip.chips) == 3  # the first is the server's own device
        assert [made.tables["temperature"][0] for made in chip.chips[1:]] == [0.5, 0.5]

    def test_what_the_chip_does_not_draw(self, serve: Serve) -> None:
        server = serve(sampling="device")
        with pytest.raises(DeviceError, match=r"a row wants logits.*start with sampling=host"):
            server.start([5, 6], want=Want.LOGITS)
        server.free.append(0)
        with pytest.raises(DeviceError, match=r"min_p=0\.5"):
            server.start([5, 6], temperature=1.0, min_p=0.5)

    def test_a_refused_row_leaves_the_parameters_of_others(self, serve: Serve, chip: Any) -> None:
        server = serve(sampling="device")
        rows = [
            server.prompt_row([5, 6], 0)._replace(temperature=0.5),
            server.prompt_row([5, 6], 1)._replace(want=Want.LOGITS),
        ]
        with pytest.raises(DeviceError):
            server.call(rows)
        server.call(rows[:1])
        assert chip.chips[0].tables["temperature"][0] == 0.5

    def test_greedy_compiled_in(self, serve: Serve, answers: Any) -> None:
        server = serve(neuron_config={"on_device_generation": {"do_sample": False}})
        assert server.generate([5, 6], 4) == answers.greedy([5, 6], 4, VOCABULARY)
        with pytest.raises(DeviceError, match=r"temperature=0\.5: greedy decoding is compiled in"):
            server.start([5, 6], temperature=0.5)

    @pytest.mark.parametrize("field", ["dynamic", "per_batch_line"])
    def test_greedy_needs_no_parameters(self, serve: Serve, answers: Any, field: str) -> None:
        """Nor can our own for each slot stay, which the library refuses then."""
        server = serve(neuron_config={"on_device_generation": {"do_sample": False, field: False}})
        assert server.generate([5, 6], 4) == answers.greedy([5, 6], 4, VOCABULARY)

    def test_fields_of_yours_join_ours(self, serve: Serve, chip: Any) -> None:
        server = serve(neuron_config={"on_device_generation": {"global_top_k": 9, "top_p_min_tokens": [2, 1, 3]}})
        server.call([server.prompt_row([5, 6], 1)._replace(temperature=0.25, top_k=20)])
        tables = chip.chips[0].tables
        assert (tables["top_k"][1], tables["top_p_min_tokens"]) == (9, [2, 1, 3])

    def test_one_set_of_parameters_for_all_is_refused(self, serve: Serve) -> None:
        with pytest.raises(LoadError, match="dynamic and per_batch_line must be true"):
            serve(neuron_config={"on_device_generation": {"do_sample": True, "dynamic": False}})


class TestDrafts:
    def test_several_tokens_a_step(self, serve: Serve, model_dir: Callable[..., str], answers: Any) -> None:
        server = serve(draft=model_dir("draft"), num_drafts=3, sampling="device")
        request = server.start([5, 6])
        server.decode()
        assert request.tokens == answers.greedy([5, 6], 5, VOCABULARY)

    def test_the_draft_s_cache_stays_whole_in_company(
        self, serve: Serve, model_dir: Callable[..., str], answers: Any
    ) -> None:
        """A draft that agrees is always accepted, unless its own cache is damaged."""
        server = serve(draft=model_dir("draft"), num_drafts=3, sampling="device")
        first = server.start([5, 6])
        server.start([9])
        for _ in range(3):
            server.decode()
        assert len(first.tokens) == 13

    @pytest.mark.parametrize("changes", [{"fake_disagrees_every": 2}, {"is_eagle": True}], ids=["half", "eagle"])
    def test_the_model_s_own_tokens_whatever_the_draft(
        self, serve: Serve, model_dir: Callable[..., str], answers: Any, changes: dict[str, Any]
    ) -> None:
        server = serve(draft=model_dir("draft", **changes), num_drafts=3, sampling="device")
        assert server.generate([5, 6, 7], 20) == answers.greedy([5, 6, 7], 20, VOCABULARY)

    @pytest.mark.parametrize("prompt", [[9], [9, 8], [9, 8, 7]])
    def test_short_prompts_with_an_eagle_draft(
        self, serve: Serve, model_dir: Callable[..., str], answers: Any, prompt: list[int]
    ) -> None:
        """In a slot that is not the first."""
        server = serve(draft=model_dir("draft", is_eagle=True), num_drafts=3, sampling="device")
        server.start([5, 6])
        request = server.start(prompt)
        server.decode()
        assert request.tokens == answers.greedy(prompt, 5, VOCABULARY)

    def test_a_draft_has_the_models_sampler(self, serve: Serve, model_dir: Callable[..., str]) -> None:
        """One that drew while the model is greedy would be wrong most of the time."""
        server = serve(
            draft=model_dir("draft"),
            num_drafts=3,
            sampling="device",
            neuron_config={"on_device_generation": {"do_sample": False}},
        )
        request = server.start([5, 6])
        server.decode()
        server.decode()
        assert len(request.tokens) == 9

    def test_an_eagle_draft_is_accepted(self, serve: Serve, model_dir: Callable[..., str]) -> None:
        server = serve(draft=model_dir("draft", is_eagle=True), num_drafts=3, sampling="device")
        request = server.start([5, 6])
        server.decode()
        assert len(request.tokens) == 5

    @pytest.mark.parametrize(
        ("model", "draft", "options", "message"),
        [
            ({}, {"vocab_size": 32}, {}, r"the draft's vocabulary is 32, the model's 64"),
            ({}, {"is_eagle": True, "hidden_size": 16}, {}, r"the EAGLE head is 16 wide, the model 32"),
            (
                {"architectures": ["MistralForCausalLM"], "sliding_window": None},
                {},
                {},
                r"the model is MistralForCausalLM",
            ),
            (
                {},
                {"architectures": ["MistralForCausalLM"], "sliding_window": None},
                {},
                r"the draft is MistralForCausalLM",
            ),
            ({}, {}, {"quantization": "int8"}, r"quantization=int8 is not served with a draft"),
            ({}, {}, {"neuron_config": {"on_device_embedding": False}}, r"on_device_embedding=False is not served"),
            ({}, {}, {"neuron_config": {"shard_over_sequence": True}}, r"shard_over_sequence=True is not served"),
        ],
    )
    def test_refused(
        self,
        serve: Serve,
        model_dir: Callable[..., str],
        model: dict[str, Any],
        draft: dict[str, Any],
        options: dict[str, Any],
        message: str,
    ) -> None:
        with pytest.raises(LoadError, match=message):
            serve(model_dir(**model), draft=model_dir("draft", **draft), num_drafts=3, **options)

    def test_one_width_of_drafts(self, serve: Serve, model_dir: Callable[..., str]) -> None:
        server = serve(draft=model_dir("draft"), num_drafts=3, sampling="device")
        device = NeuronxDevice(environ={})
        device.load(model_dir(), server.options, model_dir("draft"))
        with pytest.raises(DeviceError, match=r"k\+1 tokens wide"):
            device.compile(StepShape(3, 1, 0, 64))
        device.compile(StepShape(3, 4, 0, 64))
        with pytest.raises(DeviceError, match=r"k\+1 tokens wide"):
            device.compile(StepShape(3, 3, 0, 64))
