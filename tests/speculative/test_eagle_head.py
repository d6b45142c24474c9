"""The head against an independent reference, its checkpoint form and draft vocabulary; how acceptance is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.speculative import eagle_form
from neuronserve.speculative.train_eagle import checkpoint
from neuronserve.speculative.train_eagle.acceptance import acceptance, walk
from neuronserve.speculative.train_eagle.answers import Answer
from neuronserve.speculative.train_eagle.batches import Row, batch_of, rows_of
from neuronserve.speculative.train_eagle.head import EagleHead
from neuronserve.speculative.train_eagle.loss import Frozen, loss_of, rounds_of
from neuronserve.speculative.train_eagle.muon import orthogonal

from .head_reference import HeadReference

HIDDEN, VOCAB = 16, 40
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
}
LENGTHS = ((5, 9), (2, 6), (7, 7))  # tokens of prompt and answer


class World:
    """Random answers with random features, a random head, and the same head as a reference."""

    def __init__(self, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        draw = np.random.default_rng(0)
        self.head = EagleHead(SIZES)
        for weight in self.head.parameters():
            torch.nn.init.normal_(weight, std=scale * 0.3)
        self.embeddings = torch.randn(VOCAB, HIDDEN)
        self.lm_head = torch.randn(VOCAB, HIDDEN)
        self.answers = [
            Answer("chat", draw.integers(0, VOCAB, p).tolist(), draw.integers(0, VOCAB, a).tolist()) for p, a in LENGTHS
        ]
        self.features = [draw.standard_normal((p + a - 1, HIDDEN)).astype(np.float16) for p, a in LENGTHS]

    @property
    def rows(self) -> list[Row]:
        return rows_of(list(zip(self.answers, self.features, strict=True)), torch.arange(VOCAB))

    def rounds(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        """Of each round, [A, H] of each row."""
        batch = batch_of(self.rows)
        with torch.no_grad():
            rounds = rounds_of(self.head, Frozen(self.embeddings, self.lm_head), batch, count)
            return [made.split(list(batch.entries)) for made in rounds]

    def reference(self) -> HeadReference:
        weights = {name: value.double().numpy() for name, value in self.head.state_dict().items()}
        return HeadReference(SIZES, weights)

    def embedding(self, token: int) -> NDArray[np.float64]:
        return self.embeddings[token].double().numpy()


def drafted(world: World, row: int, first: int, depth: int, feature_shift: int = 0) -> list[NDArray[np.float64]]:
    """The features of `depth` drafts, the first one's entry at position `first`; later tokens are the answer's."""
    answer, features = world.answers[row], world.features[row].astype(np.float64)
    tokens = answer.prompt_ids + answer.answer_ids
    reference = world.reference()
    for position in range(1, first):
        reference.read(world.embedding(tokens[position]), features[position - 1 + feature_shift])
    made = [reference.read(world.embedding(tokens[first]), features[first - 1 + feature_shift])]
    for position in range(first + 1, first + depth):
        made.append(reference.read(world.embedding(tokens[position]), made[-1]))
    return made


def test_every_round_is_drafting_at_that_depth() -> None:
    world = World()
    rounds = world.rounds(3)
    for row, (prompt, answer) in enumerate(LENGTHS):
        for first in range(prompt, prompt + answer - 3):
            for depth, feature in enumerate(drafted(world, row, first, 3)):
                entry = first - prompt + depth
                np.testing.assert_allclose(rounds[depth][row][entry].numpy(), feature, rtol=2e-4, atol=2e-4)


def test_a_feature_one_position_off_is_noticed() -> None:
    world = World()
    (made,) = world.rounds(1)
    wrong = drafted(world, 0, 6, 1, feature_shift=1)[0]
    assert np.abs(made[0][1].numpy() - wrong).max() > 0.1


def test_what_is_learnt_is_the_same_position_and_the_next_token() -> None:
    world = World()
    batch = batch_of(world.rows)
    first = 0
    for answer, features in zip(world.answers, world.features, strict=True):
        prompt = len(answer.prompt_ids)
        assert batch.tokens[first] == answer.answer_ids[0]
        assert torch.equal(batch.features[first], torch.from_numpy(features[prompt - 1].astype(np.float32)))
        assert torch.equal(batch.goals[first], torch.from_numpy(features[prompt].astype(np.float32)))
        assert batch.next_rows[first] == answer.answer_ids[1]
        first += len(answer.answer_ids) - 1


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_the_loss_and_its_gradient_are_the_cross_entropy(num_rounds: int) -> None:
    world = World()
    frozen, batch = Frozen(world.embeddings, world.lm_head), batch_of(world.rows)
    batch.next_rows[3] = -1  # outside the draft vocabulary
    ours = loss_of(world.head, frozen, batch, num_rounds, 0.0, 0.7)
    torch.autograd.backward(ours)
    gradients = [weight.grad.clone() for weight in world.head.parameters() if weight.grad is not None]
    world.head.zero_grad()
    wanted = (batch.goals @ frozen.lm_head.T / 0.7).softmax(-1)
    losses = []
    for depth, made in enumerate(rounds_of(world.head, frozen, batch, num_rounds)):
        taught = (batch.next_rows >= 0) & (batch.places >= depth)
        losses.append(torch.nn.functional.cross_entropy((made @ frozen.lm_head.T)[taught], wanted[taught]))
    plain = torch.stack(losses).mean()
    torch.autograd.backward(plain)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-5)
    for mine, weight in zip(gradients, world.head.parameters(), strict=True):
        torch.testing.assert_close(mine, weight.grad, rtol=1e-3, atol=1e-5)


def test_rows_in_a_batch_do_not_see_each_other() -> None:
    world = World()
    together = world.rounds(2)
    for row in range(len(LENGTHS)):
        with torch.no_grad():
            frozen = Frozen(world.embeddings, world.lm_head)
            alone = list(rounds_of(world.head, frozen, batch_of([world.rows[row]]), 2))
        for ours, by_itself in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[row], by_itself)


def test_muon_s_steps_are_orthogonal() -> None:
    torch.manual_seed(0)
    for size in ((8, 20), (20, 8), (8, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(size)))
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_acceptance_is_that_of_real_drafting() -> None:
    world = World()
    # The answers say what the head drafts, mostly: real drafting then accepts chains of every length.
    draw = np.random.default_rng(1)
    for row, answer in enumerate(world.answers):
        for place in range(1, len(answer.answer_ids)):
            (feature,) = drafted(world, row, len(answer.prompt_ids) + place - 1, 1)
            if draw.random() < 0.7:
                answer.answer_ids[place] = int((world.lm_head.double().numpy() @ feature).argmax())
    found = acceptance(world.head, Frozen(world.embeddings, world.lm_head), world.rows, 2, torch.device("cpu"))
    steps = []
    for row, answer in enumerate(world.answers):
        tokens = answer.prompt_ids + answer.answer_ids
        at = len(answer.prompt_ids)
        while at + 2 <= len(tokens) - 1:
            stood = drafts_that_stand(world, row, at, 2)
            steps.append(stood)
            at += stood + 1
    assert found.tokens_per_step == pytest.approx(1 + np.mean(steps))
    assert found.by_position == pytest.approx([np.mean([s >= 1 for s in steps]), np.mean([s >= 2 for s in steps])])
    assert {0, 1, 2} <= set(steps)


def drafts_that_stand(world: World, row: int, first: int, count: int) -> int:
    """Drafts greedily with what was drafted fed back, as a device does."""
    answer, features = world.answers[row], world.features[row].astype(np.float64)
    tokens = answer.prompt_ids + answer.answer_ids
    reference = world.reference()
    for position in range(1, first):
        reference.read(world.embedding(tokens[position]), features[position - 1])
    token, feature = tokens[first], features[first - 1]
    for depth in range(count):
        feature = reference.read(world.embedding(token), feature)
        token = int((world.lm_head.double().numpy() @ feature).argmax())
        if token != tokens[first + depth + 1]:
            return depth
    return count


@pytest.mark.parametrize(
    ("right", "steps"),
    [
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [2]),  # three tokens, and what is left is too short for two drafts
        ([[0, 1, 0, 1], [1, 1, 1, 1]], [0, 2]),
        ([[1, 0, 0, 0], [0, 0, 0, 0]], [1, 0]),
    ],
)
def test_steps_of_an_answer(right: list[list[int]], steps: list[int]) -> None:
    assert walk(np.array(right, dtype=bool)) == steps


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    head = World().head
    kept = torch.tensor([3, 4, 9, 39])
    checkpoint.save(tmp_path, head, SIZES, kept)
    again, config, tokens = checkpoint.load(tmp_path)
    assert tokens is not None
    assert tokens.tolist() == [3, 4, 9, 39]
    assert config["is_eagle"] is True
    assert config["draft_vocab_size"] == 4
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(torch.bfloat16).float()), name


def test_the_file_has_the_published_names_and_types(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, World().head, SIZES, torch.tensor([1, 5]))
    tensors = load_file(tmp_path / "model.safetensors")
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]
    assert set(tensors) == {"fc.weight", "d2t", "t2d", *(f"layers.0.{name}.weight" for name in layer)}
    assert {str(value.dtype) for name, value in tensors.items() if "." in name} == {"torch.bfloat16"}
    assert tensors["d2t"].tolist() == [1, 4]
    assert tensors["t2d"].nonzero().flatten().tolist() == [1, 5]


def test_without_a_draft_vocabulary_there_is_no_map(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, World().head, SIZES, None)
    _, config, tokens = checkpoint.load(tmp_path)
    assert tokens is None
    assert "draft_vocab_size" not in config
    assert "d2t" not in load_file(tmp_path / "model.safetensors")


def test_a_file_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, World().head, SIZES, None)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight is \[24, 16\], config\.json makes it \[32, 16\]"):
        checkpoint.load(tmp_path)


def test_vocabulary_map() -> None:
    d2t, t2d = eagle_form.vocabulary_map([9, 2, 2, 0], 12)
    assert eagle_form.draft_tokens(d2t).tolist() == [0, 2, 9]
    assert np.flatnonzero(t2d).tolist() == [0, 2, 9]
    with pytest.raises(ValueError, match="token 12, the target's vocabulary has 12"):
        eagle_form.vocabulary_map([12], 12)


def test_the_shipped_head_is_small_and_what_its_config_says() -> None:
    shipped = Path(eagle_form.__file__).parent / "heads" / "SmolLM2-135M-Instruct"
    _, config, tokens = checkpoint.load(shipped)
    assert (shipped / "model.safetensors").stat().st_size < 12e6
    assert config["hidden_size"] == 576
    assert tokens is not None
    assert len(tokens) == config["draft_vocab_size"]
    assert tokens.max() < config["vocab_size"] == 49152
