"""The trainer from data to a head's directory, on a tiny target; broken off and resumed; and what it refuses."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.cli import main as command
from neuronserve.speculative.train_eagle.command import parse, run
from neuronserve.speculative.train_eagle.device_writer import DeviceWriter
from neuronserve.speculative.train_eagle.features import TorchFeatures
from neuronserve.speculative.train_eagle.target import Target

from .tiny_target import some_data, tiny_target

SHORT = ["--answers-by", "transformers", "--features-by", "torch", "--answer-tokens", "10", "--imagine", "2"]
SHORT += ["--batch-tokens", "48", "--epochs", "2", "--rounds", "2", "--report-every", "2", "--num-drafts", "2"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def words(target: Path, tmp_path: Path) -> list[str]:
    data = some_data(tmp_path / "data.jsonl")
    places = ["--target", target, "--data", data, "--out", tmp_path / "head", "--work", tmp_path / "work"]
    return [*map(str, places), *SHORT]


class BrokenOff(Exception):
    pass


def trained(words: list[str], break_off_at: str | None = None) -> list[str]:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if break_off_at is not None and line.startswith(break_off_at):
            raise BrokenOff

    run(parse(words), say)
    return lines


def test_a_head_and_its_acceptance(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train-eagle", *words, "--draft-vocab", "64"]) == 0
    shown = capsys.readouterr().out
    reports = re.findall(r"step \d+/\d+, loss [\d.]+, held out: ([\d.]+) tokens per target step, acceptance by", shown)
    assert len(reports) >= 2
    assert all(1 <= float(report) <= 3 for report in reports)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert weights["fc.weight"].shape == (32, 64)
    assert weights["d2t"].shape == (64,)


@pytest.mark.parametrize(
    ("key", "value"),
    [("--imagine", "7"), ("--answer-tokens", "7"), ("--answers-by", "device"), ("--features-by", "device")],
)
def test_what_was_made_otherwise_is_not_taken_for_it(words: list[str], tmp_path: Path, key: str, value: str) -> None:
    trained(words)
    with pytest.raises(ConfigError, match=rf"^{key} {value}: what is in {tmp_path}/work was made with \w+; give that"):
        trained([*words, key, value])


def test_a_head_is_not_written_over_the_one_it_starts_from(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--start and --out are both .*; give another --out"):
        trained([*words, "--start", str(tmp_path / "head")])


def test_prompts_that_are_too_long_are_counted(words: list[str], tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "and " * 600}]}
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    [line, *_] = [line for line in trained(words) if "left out" in line]
    assert re.fullmatch(r"1 of \d+ prompts are left out: more than 448 tokens", line)


def test_work_lies_where_caches_do(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    without_work = [word for word in words if word not in ("--work", str(tmp_path / "work"))]
    trained(without_work)
    assert (tmp_path / "caches" / "neuronserve" / "train-eagle").is_dir()


@pytest.mark.parametrize("place", ["answers", "features", "step 2"])
def test_a_run_that_was_broken_off_ends_as_if_it_had_not_been(words: list[str], tmp_path: Path, place: str) -> None:
    trained(words)
    whole = load_file(tmp_path / "head" / "model.safetensors")
    places = ["--out", str(tmp_path / "other"), "--work", str(tmp_path / "other work")]
    with pytest.raises(BrokenOff):
        trained([*words, *places], break_off_at=place)
    trained([*words, *places])
    resumed = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_the_data_as_it_stands_is_learnt_from_too(words: list[str], tmp_path: Path) -> None:
    with_texts = trained([*words, "--texts", "5"])
    assert any(line.endswith("; 5 texts") for line in with_texts)
    without = trained([*words, "--work", str(tmp_path / "other")])
    assert steps_of(with_texts) > steps_of(without)


def test_a_head_is_trained_further(words: list[str], target: Path, tmp_path: Path) -> None:
    trained([*words, "--draft-vocab", "64"])
    first = load_file(tmp_path / "head" / "model.safetensors")
    further = ["--start", str(tmp_path / "head"), "--work", str(tmp_path / "more"), "--out", str(tmp_path / "next")]
    trained([*words, *further, "--learning-rate", "0"])
    again = load_file(tmp_path / "next" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_a_head_trained_further_may_draft_other_tokens(words: list[str], tmp_path: Path) -> None:
    trained([*words, "--draft-vocab", "64"])
    first = load_file(tmp_path / "head" / "model.safetensors")
    further = ["--start", str(tmp_path / "head"), "--work", str(tmp_path / "more"), "--out", str(tmp_path / "next")]
    trained([*words, *further, "--learning-rate", "0", "--draft-vocab", "80"])
    again = load_file(tmp_path / "next" / "model.safetensors")
    assert again["d2t"].shape == (80,)
    assert torch.equal(again["fc.weight"], first["fc.weight"])


def test_features_of_the_device_are_those_of_torch(target: Path) -> None:
    draw = random.Random(0)
    rows = [[draw.randrange(258) for _ in range(count)] for count in (5, 150, 64, 65, 1, 30, 70, 2, 9, 128, 40)]
    by_torch = TorchFeatures(Target.of(str(target), torch.device("cpu")).model.model)(rows)
    by_device = DeviceWriter(str(target), 32, 160).read(rows)
    for ours, theirs in zip(by_device, by_torch, strict=True):
        assert ours.shape == theirs.shape
        off = np.square(ours.astype(np.float64) - theirs).mean() / np.square(theirs.astype(np.float64)).mean()
        assert off < 0.05**2  # int8 rounding; a row shifted by one token is off by more than 1


def test_an_answer_s_features_are_those_of_its_tokens(target: Path) -> None:
    """More prompts than places, of which some are read while others are written; some answers end early."""
    draw = random.Random(1)
    prompts = [[draw.randrange(258) for _ in range(count)] for count in (5, 70, 64, 65, 1, 2, 30, 90, 3, 12, 7, 40, 66)]
    greedy = DeviceWriter(str(target), 32, 128, num_places=9).write(prompts, 12, 0.0)
    ends = {greedy[0].tokens[3], greedy[7].tokens[5]}
    written = DeviceWriter(str(target), 32, 128, ends, num_places=9).write(prompts, 12, 0.0)
    rows = [prompt + answer.tokens for prompt, answer in zip(prompts, written, strict=True)]
    for answer, whole, features in zip(
        written, greedy, DeviceWriter(str(target), 32, 128).read([row[:-1] for row in rows]), strict=True
    ):
        end = next((at + 1 for at, token in enumerate(whole.tokens) if token in ends), 12)
        assert answer.tokens == whole.tokens[:end]
        assert answer.features is not None
        np.testing.assert_array_equal(answer.features, features)


def test_a_target_says_in_either_file_what_ends_an_answer(target: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(target, tmp_path / "plain"))
    (plain / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 7]}))
    assert Target.of(str(plain), torch.device("cpu")).ends == {5, 7}
    (plain / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert Target.of(str(plain), torch.device("cpu")).ends == {9}


def test_hot_answers_differ(target: Path) -> None:
    hot = DeviceWriter(str(target), 32, 64).write([[5, 6, 7]] * 4, 20, 2.0)
    assert len({tuple(answer.tokens) for answer in hot}) == 4


def steps_of(lines: list[str]) -> int:
    return int(lines[-2].split("/")[1].split(",")[0])


def test_training_learns(words: list[str]) -> None:
    words += ["--epochs", "30", "--report-every", "20", "--rounds", "1", "--learning-rate", "0.005"]
    lines = [line for line in trained(words) if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0] - 0.1


def test_a_state_of_another_recipe_is_not_gone_on_with(words: list[str]) -> None:
    trained(words)
    with pytest.raises(
        ConfigError, match=r"state\.pt was trained with another learning_rate; give the same, or remove"
    ):
        trained([*words, "--learning-rate", "0.5"])


def test_a_complete_run_given_again_writes_the_head_where_it_is_wanted_now(words: list[str], tmp_path: Path) -> None:
    trained(words)
    trained([*words, "--out", str(tmp_path / "elsewhere")])
    first, again = (load_file(tmp_path / place / "model.safetensors") for place in ("head", "elsewhere"))
    assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("--texts", "5", "--data or --texts"), ("--draft-vocab", "64", "--draft-vocab"), ("--start", "head", "--start")],
)
def test_a_state_of_other_beginnings_is_not_gone_on_with(
    words: list[str], tmp_path: Path, key: str, value: str, what: str
) -> None:
    trained(words)
    if key == "--start":
        value = str((tmp_path / value).rename(tmp_path / "before"))
    with pytest.raises(ConfigError, match=rf"state\.pt was trained with another {what}; give the same, or remove"):
        trained([*words, key, value])


def test_answers_of_another_model_are_not_taken(words: list[str], target: Path, tmp_path: Path) -> None:
    trained(words)
    other = shutil.copytree(target, tmp_path / "another place" / target.name)
    with pytest.raises(ConfigError, match=rf"^--target {other}: what is in .* was made with {target}; give that"):
        trained([*words, "--target", str(other)])


def test_answers_to_other_prompts_are_not_taken(words: list[str]) -> None:
    trained(words)
    with pytest.raises(ConfigError, match=r"answers\.jsonl answers other prompts; give the --data and --seed"):
        trained([*words, "--seed", "1"])


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command(["train-eagle", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "data.jsonl is no file; give a JSONL file of messages or text, or a .txt file"),
        ("\n", "data.jsonl is empty; give one JSON object a line with messages or text"),
        ("{\n", "data.jsonl line 1 is not JSON"),
        ('{"a": 1}\n', "data.jsonl line 1 has neither messages nor text; one of the two is needed"),
    ],
)
def test_wrong_data(
    words: list[str], tmp_path: Path, content: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.unlink()
    if content is not None:
        data.write_text(content)
    assert says in refused(words, capsys)


def test_a_draft_vocabulary_larger_than_the_target_s(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused([*words, "--draft-vocab", "300"], capsys)
    assert "--draft-vocab 300" in line
    assert "has 258 tokens; give at most that many" in line


def test_a_target_of_another_architecture(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    line = refused([*words, "--target", str(tmp_path / "t5")], capsys)
    assert "T5ForConditionalGeneration" in line
    assert "LlamaForCausalLM" in line


def test_a_start_that_is_no_head(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused([*words, "--start", str(tmp_path / "none")], capsys)
    assert "none has no config.json; give the directory of an EAGLE-1 head" in line


def test_a_target_that_is_no_directory(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--target nowhere has no config.json" in refused([*words, "--target", "nowhere"], capsys)
