"""EAGLE heads against the reference of `eagle_heads`, which is NumPy in float64 and knows nothing of the device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from neuronserve.neuron_worker.device.base import Device, DeviceOptions, ModelFacts, Want
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.errors import LoadError
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.speculative.train_eagle import checkpoint
from neuronserve.speculative.train_eagle.head import EagleHead

from .cpu.harness import instruction_sets
from .draft_conformance import drafts_after, keep, verify
from .driver import Driver, Stream, prefill
from .eagle_heads import REDUCED, Head, make_head
from .models import LONGEST, Reference, make, random_tokens

K = 4
SEEDS = range(4)

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "as published": ("llama", {}),
    "tied model": ("llama-tied", {}),
    "of a GPT-2": ("gpt2", {}),
    "of a Qwen3": ("qwen3", {"head_dim": 12, "rope_theta": 500.0}),
    "prefix, bias, own embedding": ("llama", {"prefix": "model.", "bias": True, "own_embedding": True}),
    "a norm before attention": ("llama", {"input_norm": True}),
    "reduced vocabulary": ("llama", {"tokens": REDUCED}),
    "reduced vocabulary, tied": ("llama-tied", {"tokens": REDUCED}),
    "bfloat16": ("llama", {"dtype": torch.bfloat16, "tokens": REDUCED}),
    "EAGLE-3": ("llama", {"form": "eagle3", "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}),
    "EAGLE-3, reduced vocabulary": (
        "qwen2",
        {
            "form": "eagle3",
            "eagle_aux_hidden_state_layer_ids": [1, 0],
            "tokens": REDUCED,
            "norm_before_residual": True,
        },
    ),
}


def matches(driver: Driver, head: Head, **wrong: int) -> list[bool]:
    found = []
    for seed in SEEDS:
        tokens = random_tokens(24 + seed, seed)
        found.append(drafts_after(driver, tokens) == head.drafts(tokens, K, **wrong))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_reference(name: str, reference, drive, tmp_path: Path) -> None:
    model, how = HEADS[name]
    head = make_head(tmp_path, reference(model), **how)
    driver = drive(reference(model), draft=tmp_path, num_drafts=K)
    assert all(matches(driver, head))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, {"shift": shift}) for name in ("as published", "EAGLE-3") for shift in (1, -1)),
        ("as published", {"first": 0}),
    ],
)
def test_a_wrong_feature_or_entry_would_show(
    name: str, wrong: dict[str, int], reference, drive, tmp_path: Path
) -> None:
    model, how = HEADS[name]
    head = make_head(tmp_path, reference(model), **how)
    driver = drive(reference(model), draft=tmp_path, num_drafts=K)
    assert all(matches(driver, head))
    assert not all(matches(driver, head, **wrong))


def older(directory: Path) -> Path:
    """The head as pytorch_model.bin, in which published heads come."""
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()
    return directory / "pytorch_model.bin"


@pytest.mark.parametrize("how", [{"own_embedding": True, "bias": True}, {"tokens": REDUCED, "dtype": torch.bfloat16}])
def test_an_older_file_is_read_too(how: dict[str, Any], reference, drive, tmp_path: Path) -> None:
    head = make_head(tmp_path, reference("llama"), **how)
    older(tmp_path)
    assert all(matches(drive(reference("llama"), draft=tmp_path, num_drafts=K), head))


def test_an_older_file_runs_no_code(reference, drive, tmp_path: Path) -> None:
    class Surprise:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "ran").touch, ()

    make_head(tmp_path, reference("llama"))
    torch.save({"fc.weight": Surprise()}, older(tmp_path))
    with pytest.raises(LoadError, match=r"pytorch_model.bin is not readable .* convert it once"):
        drive(reference("llama"), draft=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["as published", "EAGLE-3, reduced vocabulary"])
def test_every_tensor_of_the_file_is_read(name: str, reference, drive, tmp_path: Path) -> None:
    """One after the other is written anew with other numbers: drafts are those of the reference with the new ones."""
    model, how = HEADS[name]
    head = make_head(tmp_path, reference(model), **how)
    path = tmp_path / "model.safetensors"
    written = load_file(path)
    assert set(head.tensors) <= set(written) <= {*head.tensors, "d2t", "t2d"}
    for tensor, values in head.tensors.items():
        other = np.flip(values).copy()  # its own numbers elsewhere, so that none is lost in the others
        save_file({**written, tensor: torch.from_numpy(other).float()}, path)
        changed = replace(head, tensors={**head.tensors, tensor: other})
        driver = drive(reference(model), draft=tmp_path, num_drafts=K)
        assert all(matches(driver, changed)), tensor
        assert not all(matches(driver, head)), tensor


@pytest.mark.parametrize("kept", [None, REDUCED], ids=["whole", "reduced"])
def test_a_file_that_the_trainer_wrote(kept: list[int] | None, reference, drive, tmp_path: Path) -> None:
    """Drafts of the head as it was in the trainer, but for what bfloat16 rounds; its published form is this one."""
    config = make_head(tmp_path / "like", reference("llama"), tokens=kept).config
    torch.manual_seed(3)
    trained = EagleHead(config)
    for weight in trained.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=1.5 * weight.shape[-1] ** -0.5)
    checkpoint.save(tmp_path, trained, config, None if kept is None else torch.tensor(kept))
    rounded = {name: w.detach().bfloat16().double().numpy() for name, w in trained.state_dict().items()}
    head = Head(tmp_path, config, rounded, reference("llama"), kept)
    assert all(matches(drive(reference("llama"), draft=tmp_path, num_drafts=K), head))


def test_the_shortest_prompt(reference, drive, tmp_path: Path) -> None:
    head = make_head(tmp_path, reference("llama"))
    driver = drive(reference("llama"), draft=tmp_path, num_drafts=K)
    for token in range(5):
        assert drafts_after(driver, [token, 50 + token]) == head.drafts([token, 50 + token], K)


def test_steps_of_accepted_and_rejected_drafts(reference, drive, tmp_path: Path) -> None:
    head = make_head(tmp_path, reference("llama"), tokens=REDUCED)
    driver, stream = drive(reference("llama"), draft=tmp_path, num_drafts=K), Stream(random_tokens(11, 3))
    driver.step([prefill(stream, 10, want=Want.NOTHING)])
    [drafts] = driver.draft([stream.tokens[-1]])
    for step in range(6):
        assert drafts == head.drafts(stream.tokens, K)
        if step % 2:  # the model's own tokens, so that some are accepted
            drafts = own_tokens(reference("llama"), stream.tokens, step % K)
        right = verify(driver, stream, drafts)
        standing = keep(stream, drafts, right)
        [drafts] = driver.draft([stream.tokens[-1]], [standing])


def own_tokens(model: Reference, tokens: list[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(int(model.logits(found)[-1].argmax()))
    return found[len(tokens) :]


def loaded(device: Device, reference: Reference, draft: Path, **options: Any) -> tuple[Driver, ModelFacts]:
    given = DeviceOptions(4, LONGEST, 8, 4, threads=1, num_drafts=K, **options)
    facts = device.load(str(reference.directory), given, str(draft))
    return Driver(device, block_size=8, num_blocks=300, max_model_len=LONGEST, num_drafts=K), facts


@pytest.mark.skipif(not instruction_sets(), reason="the kernels cannot be compiled here")
@pytest.mark.parametrize("tokens", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_int8_drafts_are_the_same_on_both_executors(
    activations: str, tokens: list[int] | None, reference, tmp_path: Path
) -> None:
    """Both follow one rule of rounding; the head's own weights and the rows of the reduced vocabulary are rounded."""
    make_head(tmp_path, reference("llama"), tokens=tokens)
    how = {"quantization": "int8", "activations": activations}
    native = CpuDevice()
    (cpu, facts), (torch_, _) = (loaded(each, reference("llama"), tmp_path, **how) for each in (native, TorchDevice()))
    prompts = [random_tokens(9 + seed, seed) for seed in range(20)]
    found = [drafts_after(cpu, prompt) for prompt in prompts]
    same = sum(drafts == drafts_after(torch_, prompt) for drafts, prompt in zip(found, prompts, strict=True))
    assert same >= 18  # sums in another order may part them at a near tie
    plain, wide = loaded(CpuDevice(), reference("llama"), tmp_path)
    assert facts.weight_bytes < wide.weight_bytes - (3 * 32 * 3 * 32 if tokens is None else 3 * 32 * (3 * 32 + 70))
    assert found != [drafts_after(plain, prompt) for prompt in prompts]
    native.close()
    plain.device.close()


def test_features_are_counted_with_the_cache(reference, tmp_path: Path) -> None:
    make_head(tmp_path, reference("llama"))
    _, facts = loaded(TorchDevice(), reference("llama"), tmp_path)
    assert facts.bytes_per_kv_token == 4 * (2 * 2 * 2 * 8 + 2 * 2 * 8 + 32)  # the model's, the head's, the feature


# -- what is refused


def test_another_models_head_is_refused_with_both_widths(reference, drive, tmp_path: Path) -> None:
    make_head(tmp_path, reference("llama-odd"), num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(LoadError, match=r"hidden states of 54 numbers, .* has 32"):
        drive(reference("llama"), draft=tmp_path)


def test_another_vocabulary_is_refused_with_both_sizes(reference, drive, tmp_path: Path) -> None:
    make_head(tmp_path / "head", make("llama", tmp_path / "model", vocab_size=150))
    with pytest.raises(LoadError, match=r"vocabulary of 150 tokens, .* has 160"):
        drive(reference("llama"), draft=tmp_path / "head")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"draft_vocab_size": 60}, "d2t .*must be I64 .60"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"intermediate_size": 44}, "config.json and weights do not belong together"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], text: str, reference, drive, tmp_path: Path
) -> None:
    make_head(tmp_path, reference("llama"), tokens=REDUCED)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(LoadError, match=text):
        drive(reference("llama"), draft=tmp_path)


def test_a_map_beyond_the_vocabulary_is_refused(reference, drive, tmp_path: Path) -> None:
    make_head(tmp_path, reference("llama"), tokens=[1, 2, 161])
    with pytest.raises(LoadError, match=r"d2t .* leads to tokens 1 to 161"):
        drive(reference("llama"), draft=tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "which has 2"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"target_hidden_size": 64}, r"hidden states of 64 numbers, .* has 32"),
    ],
)
def test_variants_of_eagle3_are_refused(change: dict[str, Any], text: str, reference, drive, tmp_path: Path) -> None:
    make_head(tmp_path, reference("llama"), "eagle3", eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(LoadError, match=text):
        drive(reference("llama"), draft=tmp_path)
