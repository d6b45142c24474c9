"""What the classic library's stand-in answers, as `neuronserve verify` holds a device to it."""

from __future__ import annotations

import numpy as np

from neuronserve.neuron_worker.config import NeuronConfig
from neuronserve.neuron_worker.device.base import Float32
from neuronserve.neuron_worker.reference import Reference, texts_of

from ..fakes.transformers_neuronx import answers


def by_the_stand_in(config: NeuronConfig, model_dir: str) -> Reference:
    """In the place of `reference.logits_of`."""
    texts = texts_of(config)
    return Reference("the stand-in's rule", texts, tuple(_logits(text, config.vocab_size) for text in texts), 0.0)


def _logits(text: tuple[int, ...], vocab_size: int) -> Float32:
    before, rows = 0, []
    for position, token in enumerate(text):
        before = answers.extend(before, answers.make_cell(token, position, before), position)
        rows.append(answers.logits(before, vocab_size))
    return np.stack(rows)
