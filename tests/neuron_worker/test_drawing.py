"""A token from a row of logits: by hand, and the same as the device side's reference draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.neuron_worker.device.graph.torch_sampling import SamplingTensors, sampled_tokens
from neuronserve.neuron_worker.drawing import InverseDraw, limited, pick

EIGHTS = np.log(np.array([1, 4, 2, 1], dtype=np.float32) / 8)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (4, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 2]),
        (3, 1.0, [0, 1, 2]),  # of two equals the lower id
        (4, 0.5, [1]),
        (4, 0.51, [1, 2]),
        (4, 0.76, [0, 1, 2]),
        (2, 0.67, [1, 2]),  # 4/6 is a little less
        (2, 0.66, [1]),
    ],
)
def test_what_the_limits_keep(top_k: int, top_p: float, kept: list[int]) -> None:
    assert np.flatnonzero(limited(EIGHTS, top_k, top_p)).tolist() == kept


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.12, 0), (0.13, 1), (0.62, 1), (0.63, 2), (0.99, 3)])
def test_picks_in_the_order_of_ids(uniform: float, token: int) -> None:
    assert pick(limited(EIGHTS, 4, 1.0), uniform) == token


def test_a_number_next_to_one_picks_the_last_token_kept() -> None:
    assert pick(limited(EIGHTS, 2, 1.0), np.nextafter(1, 0)) == 2


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([3, 40, 3000]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    top_k=st.sampled_from([0, 1, 2, 37, 2000]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_draws_what_the_device_s_reference_draws(
    seed: int, width: int, spread: float, top_k: int, top_p: float, uniform: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(width) * spread).astype(np.float32)
    limits = SamplingTensors(
        *(torch.tensor([value]) for value in (1.0, top_k, top_p, 0.0)), torch.tensor([uniform]).double()
    )
    [reference] = sampled_tokens(torch.from_numpy(logits)[None], limits).tolist()
    top_p = float(np.float32(top_p))  # as the device gets it
    assert pick(limited(logits, top_k or width, top_p), uniform) == reference


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
def test_gives_back_what_was_left_where_vllm_asks_for_it(mode: str) -> None:
    draw = InverseDraw(mode)
    draw.uniforms = [0.0]
    tokens, left = draw(torch.from_numpy(EIGHTS.copy())[None], {}, torch.tensor([2]), None)
    assert tokens.tolist() == [1]
    assert left is not None
    assert torch.isinf(left[0]).tolist() == [True, False, False, True]
    expected = [4 / 8, 2 / 8] if mode == "processed_logits" else [4 / 6, 2 / 6]
    assert left[0, 1:3].exp().tolist() == pytest.approx(expected)
