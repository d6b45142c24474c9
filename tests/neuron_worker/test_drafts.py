"""A draft's directory: what it is taken for, however it is given, and which pairs are refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs, EngineArgs
from vllm.config import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.device.arithmetic import CAPABILITIES
from neuronserve.neuron_worker.draft_directory import method_of
from neuronserve.neuron_worker.draft_rules import size_of
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.footprint import draft_weights
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.server.cli import main
from neuronserve.speculative.settings import Speculation

from .tiny_model import VOCAB_SIZE, tiny_model

FORMS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_hidden_layers": 1},
    "eagle": {"is_eagle": True, "num_hidden_layers": 1},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32, "num_hidden_layers": 1},
}
"""Method -> what its config.json has."""

SERVED = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 16}


def configured(model: str, backend: str = "arithmetic", **asked: Any) -> SpeculativeConfig:
    options = {"neuronserve": {"backend": backend}}
    config = EngineArgs(model=model, additional_config=options, **{**SERVED, **asked}).create_engine_config()
    assert config.speculative_config is not None
    return config.speculative_config


# -- recognition


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("name", ["draft", "eagle-7b", "llama-eagle3", "dflash"])
def test_the_configuration_says_what_it_is_and_not_the_path(tmp_path: Path, method: str, name: str) -> None:
    assert method_of(tiny_model(tmp_path / name, **FORMS[method])) == method


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["EAGLEModel"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "is_eagle": True}, "eagle3"),
        ({"is_eagle": True, "draft_vocab_size": 32}, "eagle"),  # the first form with a reduced vocabulary
        ({"draft_vocab_size": 32}, "eagle3"),
        ({"is_eagle": False}, "draft_model"),
    ],
)
def test_other_spellings(tmp_path: Path, form: dict[str, Any], method: str) -> None:
    assert method_of(tiny_model(tmp_path, **form)) == method


WAYS = {
    "classic": lambda draft: {
        "speculative_model": draft,
        "num_speculative_tokens": 4,
        "speculative_max_model_len": 128,
        "use_v2_block_manager": True,
    },
    "config": lambda draft: {"speculative_config": {"model": draft, "num_speculative_tokens": 4, "max_model_len": 128}},
    "with method": lambda draft: {
        "speculative_config": {"model": draft, "method": method_of(draft), "num_speculative_tokens": 4},
        "speculative_max_model_len": 128,
    },
    "short": lambda draft: {"spec_model": draft, "spec_tokens": 4, "speculative_max_model_len": 128},
}


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_given_in_python(tiny: str, tmp_path: Path, method: str, way: str) -> None:
    draft = tiny_model(tmp_path / "eagle-of-any-kind", **FORMS[method])
    config = configured(tiny, **WAYS[way](draft))
    assert (config.method, config.model, config.num_speculative_tokens) == (method, draft, 4)
    assert config.max_model_len == 128
    assert config.use_eagle_block_drop() == (method != "draft_model")


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize(
    "line",
    [
        "--speculative-model DRAFT --num-speculative-tokens 4 --speculative-max-model-len 64 --use-v2-block-manager",
        """--speculative-config '{"model": "DRAFT", "num_speculative_tokens": 4, "max_model_len": 64}'""",
        "--speculative-config.model DRAFT --speculative-config.num_speculative_tokens 4 --speculative-max-model-len 64",
        "--spec-model DRAFT --spec-tokens 4 --speculative-max-model-len 64",
    ],
)
def test_however_it_is_given_on_a_command_line(tiny: str, tmp_path: Path, method: str, line: str) -> None:
    draft = tiny_model(tmp_path / "eagle-of-any-kind", **FORMS[method])
    parser = make_arg_parser(FlexibleArgumentParser())
    words = ["--model", tiny, "--neuronserve.backend", "arithmetic", *shlex.split(line.replace("DRAFT", draft))]
    config = AsyncEngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
    speculation = NeuronConfig.of(config).speculation
    assert speculation is not None
    assert (speculation.method, speculation.model) == (method, draft)
    assert (speculation.num_tokens, speculation.max_length) == (4, 64)
    assert speculation.looks_up_first == (method != "draft_model")
    assert NeuronConfig.of(config).plan.decode_widths == (1, 5)


def test_the_plan_command_knows_drafts(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tiny_model(tmp_path / "draft", num_hidden_layers=1)
    flags = f"--max-model-len 128 --max-num-seqs 4 --neuronserve.backend arithmetic --speculative-model {draft}"
    assert main(["plan", tiny, *flags.split(), "--num-speculative-tokens", "3"]) == 0
    assert "of 1 4 tokens" in capsys.readouterr().out


def test_a_step_has_room_for_the_places_that_vllm_keeps_for_drafts(tiny: str, tmp_path: Path) -> None:
    """It takes one of each row off the tokens of a step; without more of them the last rows would wait."""
    options = {"neuronserve": {"backend": "arithmetic"}}
    drafts = {"speculative_model": tiny_model(tmp_path / "draft"), "num_speculative_tokens": 4}
    config = EngineArgs(model=tiny, additional_config=options, **SERVED, **drafts).create_engine_config()
    scheduler = config.scheduler_config
    assert scheduler.max_num_scheduled_tokens == NeuronConfig.of(config).max_num_batched_tokens
    assert scheduler.max_num_batched_tokens == scheduler.max_num_scheduled_tokens + 4


# -- what does not fit


HEAD = {"is_eagle": True, "num_hidden_layers": 1}
HEAD3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}


def refusal(target: str, draft: str, **asked: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        configured(target, speculative_model=draft, **{"num_speculative_tokens": 4, **asked})
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_another_vocabulary(tiny: str, tmp_path: Path) -> None:
    message = refusal(tiny, tiny_model(tmp_path, vocab_size=65))
    assert "has a vocabulary of 65, the model one of 64" in message


def test_another_vocabulary_of_a_head(tiny: str, tmp_path: Path) -> None:
    message = refusal(tiny, tiny_model(tmp_path, vocab_size=65, **HEAD))
    assert "has a vocabulary of 65, the model one of 64" in message


def exchange(directory: Path, first: str, second: str) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("form", FORMS)
def test_another_tokenizer(tiny: str, tmp_path: Path, form: str) -> None:
    draft = tiny_model(tmp_path, **FORMS[form])
    exchange(tmp_path, "w20", "w30")
    message = refusal(tiny, draft)
    assert "has another tokenizer: token 20 is 'w30' in" in message
    assert "and 'w20' in" in message


def test_added_tokens_may_have_other_names(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": VOCAB_SIZE, "content": "<pad>"})
    path.write_text(json.dumps(tokenizer))
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1).method == "draft_model"


@pytest.mark.parametrize("lacks", ["draft", "model"])
def test_a_tokenizer_that_cannot_be_compared(tmp_path: Path, lacks: str) -> None:
    places = {name: Path(tiny_model(tmp_path / name)) for name in ("draft", "model")}
    path = places[lacks] / "tokenizer.json"
    path.rename(path.with_name("vocab.json"))
    asked = Speculation("draft_model", 4, model="D")
    request = ServeRequest(str(places["model"]), 128, 4, draft_dir=str(places["draft"]), speculation=asked)
    notes = resolve(request, {}).notes
    assert f"speculative_model='D': its tokenizer is not compared with the model's, there is no {path}" in notes


def test_a_draft_needs_no_tokenizer(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1).method == "draft_model"


@pytest.mark.parametrize(
    ("form", "width"),
    [
        ({**HEAD, "hidden_size": 64}, 64),
        ({**HEAD3, "hidden_size": 64}, 64),
        ({**HEAD3, "target_hidden_size": 96}, 96),
    ],
)
def test_a_head_of_another_width(tiny: str, tmp_path: Path, form: dict[str, Any], width: int) -> None:
    message = refusal(tiny, tiny_model(tmp_path, **form))
    assert f"is a head for hidden states of {width} numbers, those of the model have 128" in message


def test_an_eagle3_head_has_a_width_of_its_own(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path, **HEAD3, hidden_size=64, target_hidden_size=128)
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1).method == "eagle3"


def test_too_few_positions(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path, max_position_embeddings=100)
    message = refusal(tiny, draft)
    assert "has positions for 100 tokens, the model is served with 128" in message
    assert "or --speculative-max-model-len 100" in message
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1, speculative_max_model_len=100)
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1, max_model_len=96)


def test_a_table_of_positions_cannot_be_left(tiny: str, tmp_path: Path) -> None:
    gpt2 = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 100, "vocab_size": VOCAB_SIZE}
    draft = tiny_model(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2", **gpt2)
    assert "use --max-model-len 100 or less" in refusal(tiny, draft, speculative_max_model_len=64)


def test_a_head_has_the_targets_positions(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path, **HEAD, max_position_embeddings=100)
    assert configured(tiny, speculative_model=draft, num_speculative_tokens=1).method == "eagle"


def test_a_head_of_several_layers(tiny: str, tmp_path: Path) -> None:
    assert "num_hidden_layers is 2 in" in refusal(tiny, tiny_model(tmp_path, is_eagle=True))


def test_another_architecture(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path, architectures=["BloomForCausalLM"])
    assert "architecture BloomForCausalLM in" in refusal(tiny, draft)


@pytest.mark.parametrize(
    ("key", "what"),
    [("medusa_num_heads", "Medusa heads"), ("n_predict", "an MLP speculator"), ("speculators_config", "speculators")],
)
def test_drafts_of_other_kinds_are_refused_by_name(tiny: str, tmp_path: Path, key: str, what: str) -> None:
    draft = tiny_model(tmp_path, **{key: 3})
    assert what in refusal(tiny, draft)


def test_a_method_that_contradicts_the_configuration(tiny: str, tmp_path: Path) -> None:
    draft = tiny_model(tmp_path, is_eagle=True)
    given = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    with pytest.raises(
        ConfigError, match=r"speculative_config\.method='draft_model', but by its config\.json .*'eagle'"
    ):
        configured(tiny, speculative_config=given)


def test_a_head_whose_configuration_does_not_say_so(tiny: str, tmp_path: Path) -> None:
    """As vLLM's guides give the first heads that were published."""
    given = {"method": "eagle", "model": tiny_model(tmp_path, num_hidden_layers=1), "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match=r"is for 'draft_model': .* EAGLE head, add \"is_eagle\": true to its config"):
        configured(tiny, speculative_config=given)


@pytest.mark.parametrize("count", [128, 1000])
def test_more_drafts_than_a_sequence_has_tokens(tiny: str, tmp_path: Path, count: int) -> None:
    expected = f"num_speculative_tokens={count}: a sequence has at most 128 tokens"
    assert expected in refusal(tiny, tiny_model(tmp_path), num_speculative_tokens=count)
    with pytest.raises(ConfigError, match=expected):
        configured(tiny, speculative_model="ngram", num_speculative_tokens=count)


def test_prompt_lookup_has_a_longest_sequence_too(tiny: str) -> None:
    words = ["--speculative-model", "ngram", "--num-speculative-tokens", "4", "--speculative-max-model-len", "64"]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--model", tiny, "--neuronserve.backend", "arithmetic", *words])
    speculation = NeuronConfig.of(AsyncEngineArgs.from_cli_args(given).create_engine_config()).speculation
    assert speculation is not None
    assert (speculation.method, speculation.max_length) == ("ngram", 64)


def test_a_device_that_runs_no_draft(tiny: str, tmp_path: Path) -> None:
    message = refusal(tiny, tiny_model(tmp_path), backend="arithmetic-slots")
    assert "the arithmetic-slots device runs no draft beside the model" in message


def test_settings_of_prompt_lookup(tiny: str, tmp_path: Path) -> None:
    given = {"model": tiny_model(tmp_path), "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    with pytest.raises(ConfigError, match=r"speculative_config\.prompt_lookup_max is for prompt lookup and no draft"):
        configured(tiny, speculative_config=given)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"speculative_config": {"method": "ngram", "model": "/draft"}}, "model='/draft'"),
        ({"spec_method": "ngram", "speculative_model": "/draft"}, "model='/draft'"),
        ({"speculative_config": {"model": "ngram", "revision": "main"}}, "revision='main'"),
    ],
)
def test_prompt_lookup_beside_a_draft(tiny: str, given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculative_config\.{key} is of a draft, and method='ngram' looks"):
        configured(tiny, num_speculative_tokens=4, **given)


def test_a_chunk_too_small_for_a_token_and_its_drafts(tiny: str) -> None:
    asked = {"speculative_model": "ngram", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4 with chunks of 4 prompt tokens: .* allow 5 or"):
        configured(tiny, max_num_batched_tokens=4, **asked)
    assert configured(tiny, max_num_batched_tokens=5, **asked).num_speculative_tokens == 4


def test_a_head_is_not_served_as_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is that of an EAGLE head: serve the model that it was trained for"):
        EngineArgs(model=tiny_model(tmp_path, is_eagle=True), additional_config={}).create_engine_config()


# -- what it takes


def report(target: str, draft: str, capsys: pytest.CaptureFixture[str]) -> str:
    flags = "--max-model-len 128 --max-num-seqs 4 --dtype float32 --neuronserve.backend arithmetic"
    drafts = ["--speculative-model", draft, "--num-speculative-tokens", "4"]
    assert main(["plan", target, *flags.split(), *drafts]) == 0
    return capsys.readouterr().out


def test_a_draft_models_weights_and_cache_are_in_the_plan(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = report(tiny, tiny_model(tmp_path, num_hidden_layers=1), capsys)
    # Keys and values of 8 heads of 4 numbers, 4 bytes each: two layers of the model, and one of the draft.
    assert f"4 x 128 tokens of {3 * 2 * 8 * 4 * 4} bytes" in printed
    assert f"{2 * 8 * 4 * 4} bytes of each token are the draft's" in printed


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_a_head_keeps_a_feature_of_each_position(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    printed = report(tiny, tiny_model(tmp_path, **FORMS[form]), capsys)
    assert f"{2 * 8 * 4 * 4 + 4 * 128} bytes of each token are the draft's" in printed


def test_a_heads_weights_by_hand(tiny: str, tmp_path: Path) -> None:
    shape = size_of(Speculation("eagle", 4, model="x"), tiny_model(tmp_path, **FORMS["eagle"]), CAPABILITIES)
    assert shape is not None
    matrices = 128 * (128 + 2 * 32) + 128 * 128 + 3 * 128 * 128  # qkv, attention's output, MLP
    served = resolve(ServeRequest(tiny, dtype="float32", options={"backend": "arithmetic"}), {}).config
    assert draft_weights(shape, served) == 4 * (matrices + 128 * 2 * 128 + shape.spec.num_vector_parameters)
