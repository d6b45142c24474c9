"""int8 and narrow weights: the same logits as transformers gives with weights that were rounded by the same rule."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .driver import Stream, decode, prefill
from .models import Reference, random_tokens


def rounded_to_int8(reference: Reference, head: bool = False) -> Reference:
    """Body matrices as scale * clamp(round(w / scale)), scale = max|w| / 127 per output channel."""
    model = copy.deepcopy(reference.model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or (name == "lm_head" and not head):
            continue
        axis = 0 if isinstance(module, Conv1D) else 1
        scale = module.weight.detach().abs().amax(dim=axis, keepdim=True) / 127
        rounded = (module.weight.detach() / scale).round().clamp(-128, 127)
        module.weight = nn.Parameter(rounded * scale)  # also parts the head from a tied table
    return Reference(reference.directory, model)


def with_int8_products(reference: Reference, head: bool = False) -> Reference:
    """As `rounded_to_int8`, and what enters each of those matrices is rounded too: per token, in blocks of 64."""
    result = rounded_to_int8(reference, head)

    def rounded(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        blocks = [
            (block / scale).round() * scale
            for block in inputs[0].double().split(64, dim=-1)
            for scale in [block.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127]
        ]
        return (torch.cat(blocks, dim=-1).float(),)

    for name, module in result.model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and (name != "lm_head" or head):
            module.register_forward_pre_hook(rounded)
    return result


def rounded_to(reference: Reference, dtype: torch.dtype) -> Reference:
    """Matrices and tables in a narrow type; norms and biases stay float32."""
    model = copy.deepcopy(reference.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.to(dtype))
    return Reference(reference.directory, model)


def check(driver, reference: Reference) -> None:
    stream = Stream(random_tokens(20, 5))
    expected = reference.logits(stream.tokens)
    first = driver.step([prefill(stream, 13)])[0]
    second = driver.step([decode(stream, 2)])[0]
    np.testing.assert_allclose(first.logits, expected[12:13], atol=1e-4)
    np.testing.assert_allclose(second.logits, expected[13:15], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "llama-odd", "qwen2", "qwen3", "gpt2"])
def test_int8_body(name: str, reference, drive) -> None:
    model = reference(name)
    check(drive(model, quantization="int8"), rounded_to_int8(model))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_int8_head_keeps_the_embedding_exact(name: str, reference, drive) -> None:
    model = reference(name)
    check(drive(model, quantization="int8", quantize_head=True), rounded_to_int8(model, head=True))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-odd", "mistral-window", "qwen2", "qwen3", "gpt2"])
def test_int8_activations(name: str, head: bool, reference, drive) -> None:
    model, stream = reference(name), Stream(random_tokens(20, 5))
    expected = with_int8_products(model, head).logits(stream.tokens)[12:15]
    driver = drive(model, quantization="int8", quantize_head=head, activations="int8")
    found = np.concatenate([driver.step([rows])[0].logits for rows in (prefill(stream, 13), decode(stream, 2))])
    # Where a sum in another order moves a number across the middle between two steps, the logits move by a little.
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    near, far = (np.abs(found - other).mean() for other in (expected, reference(name).logits(stream.tokens)[12:15]))
    assert near < far / 4, "the rounding is transformers' with the same rule, not another"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "llama-odd"])
def test_narrow_weights(name: str, dtype: str, reference, drive) -> None:
    model = reference(name)
    check(drive(model, dtype=dtype), rounded_to(model, getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("quantization", "activations"), [(None, "float32"), ("int8", "float32"), ("int8", "int8")], ids=str
)
def test_a_row_does_not_depend_on_its_neighbours(quantization: str | None, activations: str, reference, drive) -> None:
    model = reference("llama")

    def last_logits(neighbours: int) -> np.ndarray:
        driver = drive(model, quantization=quantization, activations=activations)
        stream = Stream(random_tokens(20, 0))
        others = [Stream([token * (i + 7) % 160 for token in random_tokens(20, i + 1)]) for i in range(neighbours)]
        driver.step([prefill(stream, 9)] + [prefill(other, 5 + i) for i, other in enumerate(others)])
        return driver.step([decode(stream)] + [decode(other) for other in others])[0].logits

    np.testing.assert_allclose(last_logits(0), last_logits(3), atol=2e-6)
