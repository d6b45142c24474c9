"""The training loop: batches in a drawn order, Muon for the matrices, a state from which it goes on.

The state is written every `Recipe.report_every` steps together with the acceptance on held-out answers. What a step
does follows from the recipe and its number alone, so a run that was broken off ends as if it had not been. The rate is
level in the middle, so a run may also be gone on with for more epochs, or for fewer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from neuronserve.neuron_worker.errors import ConfigError

from .acceptance import Acceptance, acceptance
from .answers import Say
from .batches import Row, batch_of, dealt, noisy
from .head import EagleHead
from .loss import Frozen, loss_of
from .muon import Muon

_CLIP = 1.0


@dataclass(frozen=True)
class Recipe:
    epochs: int = 3
    rounds: int = 3  # most rounds, in the last part of the training
    batch_tokens: int = 4096  # answer tokens of a step
    learning_rate: float = 3e-4
    feature_weight: float = 0.1
    temperature: float = 1.0  # of the target's distribution that is learnt
    noise: float = 0.2  # on the target's features, so that a head does not learn them by heart
    weight_decay: float = 0.1
    num_drafts: int = 5  # of the acceptance report
    report_every: int = 100  # steps
    seed: int = 0

    def rate(self, step: int, num_steps: int) -> float:
        """Up in the first steps, down in the last 40 %."""
        return self.learning_rate * min(1.0, (step + 1) / _WARM_UP, 0.02 + (1 - step / num_steps) / 0.4)

    def num_rounds(self, step: int, num_steps: int) -> int:
        """One round at first, where it teaches most for its time; in the last 40 % one more at a time."""
        late = max(0.0, step / num_steps - 0.6) / 0.4
        return min(self.rounds, 1 + math.ceil(late * (self.rounds - 1)))


_WARM_UP = 20
"""Steps."""

_MAY_CHANGE = ("epochs", "rounds", "report_every")
"""What a run may be gone on with in another size."""


class Optimizers:
    """Muon's matrices and AdamW's vectors."""

    def __init__(self, head: nn.Module, recipe: Recipe) -> None:
        matrices = [weight for weight in head.parameters() if weight.dim() == 2]
        vectors = [weight for weight in head.parameters() if weight.dim() != 2]
        muon = Muon(matrices, recipe.weight_decay)
        self._all: tuple[torch.optim.Optimizer, ...] = (muon, torch.optim.AdamW(vectors, weight_decay=0.0))

    def step(self, rate: float) -> None:
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def resume(self, state: Sequence[dict[str, Any]]) -> None:
        for optimizer, own in zip(self._all, state, strict=True):
            optimizer.load_state_dict(own)


@dataclass
class Report:
    step: int
    steps: int
    loss: float
    held_out: Acceptance
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step}/{self.steps}, loss {self.loss:.3f}, held out: {self.held_out}, {self.seconds:.0f} s"


def train(
    head: EagleHead,
    frozen: Frozen,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    recipe: Recipe,
    state_file: Path,
    say: Say,
    after_report: Callable[[], None] = lambda: None,
    beginnings: Mapping[str, str] = MappingProxyType({}),
) -> Report:
    """Trains `head` in place, on its device. `beginnings`: what else a state must have been made of to be gone on with,
    by what the user knows it as."""
    device = frozen.lm_head.device
    in_bfloat16 = multiplies_bfloat16(device)
    optimizers = Optimizers(head, recipe)
    num_steps = sum(1 for _ in _all_batches(rows, recipe))
    report = _resume(state_file, head, optimizers, recipe, beginnings, say)
    done, before = (report.step, report.seconds) if report else (0, 0.0)
    started, losses = time.monotonic(), list[float]()
    for step, chosen in enumerate(_all_batches(rows, recipe)):
        if step < done:
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            num_rounds = recipe.num_rounds(step, num_steps)
            batch = noisy(batch_of(chosen), recipe.noise, seed=recipe.seed + step).to(device)
            loss = loss_of(head, frozen, batch, num_rounds, recipe.feature_weight, recipe.temperature)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
        optimizers.step(recipe.rate(step, num_steps))
        losses.append(loss.item())
        if (step + 1) % recipe.report_every == 0 or step + 1 == num_steps:
            found = acceptance(head, frozen, held_out, recipe.num_drafts, device, in_bfloat16=in_bfloat16)
            seconds = before + time.monotonic() - started
            report = Report(step + 1, num_steps, sum(losses) / len(losses), found, seconds)
            say(str(report))
            losses.clear()
            _save(state_file, head, optimizers, recipe, beginnings, report)
            after_report()
    assert report is not None
    return report


def multiplies_bfloat16(device: torch.device) -> bool:
    """Faster than float32: where it is emulated it takes five times as long."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def _all_batches(rows: Sequence[Row], recipe: Recipe) -> Iterator[list[Row]]:
    for epoch in range(recipe.epochs):
        yield from dealt(rows, recipe.batch_tokens, recipe.seed, epoch)


def _save(
    path: Path,
    head: nn.Module,
    optimizers: Optimizers,
    recipe: Recipe,
    beginnings: Mapping[str, str],
    report: Report,
) -> None:
    unfinished = path.with_suffix(".part")
    state = {"head": head.state_dict(), "optimizers": optimizers.state(), "beginnings": dict(beginnings)}
    torch.save({**state, "recipe": asdict(recipe), "report": json.dumps(asdict(report))}, unfinished)
    unfinished.replace(path)


def _resume(
    path: Path, head: nn.Module, optimizers: Optimizers, recipe: Recipe, beginnings: Mapping[str, str], say: Say
) -> Report | None:
    """The report of the state in `path`, whose weights are now those of `head`."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    differs = [
        key for key, value in asdict(recipe).items() if key not in _MAY_CHANGE and state["recipe"].get(key) != value
    ]
    differs += [what for what, digest in beginnings.items() if state.get("beginnings", {}).get(what) != digest]
    if differs:
        raise ConfigError(
            f"{path} was trained with another {', '.join(differs)}; give the same, or remove it to start over "
            "(--start goes on from a head)"
        )
    head.load_state_dict(state["head"])
    optimizers.resume(state["optimizers"])
    report = json.loads(state["report"])
    say(f"going on after step {report['step']}")
    return Report(**{**report, "held_out": Acceptance(**report["held_out"])})
