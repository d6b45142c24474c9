"""A draft model beside the model: its drafts are its own greedy tokens, whatever the two architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.errors import LoadError

from .draft_conformance import drafts_after, keep, verify
from .driver import Stream, decode, prefill
from .models import Reference, make, random_tokens

PAIRS = [
    ("llama", "gpt2"),
    ("gpt2", "llama"),
    ("llama-odd", "qwen3"),
    ("qwen2", "mistral-window"),
    ("llama-head-dim", "qwen2"),
    ("mistral-window", "llama-mqa"),
]


def greedy(reference: Reference, tokens: list[int], count: int) -> list[int]:
    """Of transformers; the models here leave a clear gap between the likeliest and the next."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(reference.logits(found)[-1].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize(("model", "draft"), PAIRS)
def test_drafts_are_the_draft_models_own_tokens(model: str, draft: str, reference, drive) -> None:
    driver = drive(reference(model), draft=reference(draft).directory, num_drafts=4)
    for seed in range(3):
        tokens = random_tokens(30, seed)
        assert drafts_after(driver, tokens) == greedy(reference(draft), tokens, 4)


def test_a_row_of_few_accepted_drafts_goes_on_from_there(reference, drive) -> None:
    driver, draft = drive(reference("llama"), draft=reference("qwen3").directory), reference("qwen3")
    stream, neighbour = Stream(random_tokens(21, 1)), Stream(random_tokens(18, 2))
    driver.step([prefill(each, len(each.tokens) - 1, want=Want.NOTHING) for each in (stream, neighbour)])
    drafts, beside = driver.draft([stream.tokens[-1], neighbour.tokens[-1]])
    for _ in range(4):
        right = verify(driver, stream, drafts)
        standing = keep(stream, drafts, right)
        [drafts] = driver.draft([stream.tokens[-1]], [standing])
        assert drafts == greedy(draft, stream.tokens, 3)
    assert beside == greedy(draft, neighbour.tokens, 3)


@pytest.mark.parametrize("block_size", [1, 5, 16, 96])
def test_block_size_changes_nothing(block_size: int, reference, drive) -> None:
    driver = drive(reference("llama"), block_size=block_size, draft=reference("qwen3").directory)
    tokens = random_tokens(40, 4)
    stream = Stream(list(tokens))
    driver.step([prefill(stream, 20, want=Want.NOTHING)])
    driver.draft([-1])
    driver.step([prefill(stream, 19, want=Want.NOTHING)])
    assert driver.draft([tokens[-1]]) == [greedy(reference("qwen3"), tokens, 3)]


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_options_hold_for_the_draft_too(options: dict[str, str], reference, drive) -> None:
    """A draft drafts what it says itself as a model with these options."""
    alone, driver = (
        drive(reference("qwen3"), **options),
        drive(reference("llama"), draft=reference("qwen3").directory, **options),
    )
    tokens = random_tokens(30, 5)
    stream = Stream(list(tokens))
    [result] = alone.step([prefill(stream, 30, want=Want.TOKEN)])
    expected = [int(result.tokens[0])]
    for _ in range(2):
        stream.tokens.append(expected[-1])
        [result] = alone.step([decode(stream, want=Want.TOKEN)])
        expected.append(int(result.tokens[0]))
    assert drafts_after(driver, tokens) == expected


def test_the_cache_of_both_is_counted(reference, drive) -> None:
    def bytes_per_token(**more: object) -> int:
        driver = drive(reference("llama"), **more)
        options = driver.device._options
        draft = more.get("draft")
        return driver.device.load(str(reference("llama").directory), options, draft and str(draft)).bytes_per_kv_token

    plain, both = bytes_per_token(), bytes_per_token(draft=reference("qwen3").directory)
    assert plain == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their width, float32
    reads_late = isinstance(drive(reference("llama")).device, CpuDevice)
    assert both == plain + 2 * 2 * 2 * 16 * 4 + (4 if reads_late else 0)  # the token that is still to be read


def test_another_vocabulary_is_refused_with_both(reference, drive, tmp_path: Path) -> None:
    small = make("llama", tmp_path, vocab_size=150)
    with pytest.raises(LoadError, match=r"vocabulary of 150, .* of 160"):
        drive(reference("llama"), draft=small.directory)


def test_no_drafts_from_a_draft_are_refused(reference, drive) -> None:
    with pytest.raises(LoadError, match="num_drafts=0"):
        drive(reference("llama"), draft=reference("llama").directory, num_drafts=0)


def test_a_missing_directory_is_named(reference, drive, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no-draft-here"):
        drive(reference("llama"), draft=tmp_path / "no-draft-here")
