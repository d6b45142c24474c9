"""A head's directory: written from the module that was trained, and read back into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuronserve.neuron_worker.errors import ConfigError

from .. import eagle_form
from .head import EagleHead


def save(directory: Path, head: EagleHead, sizes: Mapping[str, Any], kept: Tensor | None) -> None:
    """bfloat16; `kept` are the tokens of a reduced draft vocabulary, ascending."""
    config = eagle_form.head_config(sizes, None if kept is None else len(kept))
    tensors = {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    if kept is not None:
        d2t, t2d = eagle_form.vocabulary_map(kept.tolist(), sizes["vocab_size"])
        tensors |= {eagle_form.D2T: torch.from_numpy(d2t), eagle_form.T2D: torch.from_numpy(t2d)}
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / (eagle_form.WEIGHTS + ".part")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes files for their owner alone
    unfinished.replace(directory / eagle_form.WEIGHTS)
    (directory / eagle_form.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(directory: Path) -> tuple[EagleHead, dict[str, Any], Tensor | None]:
    """The head in float32, its config.json, and the tokens of its draft vocabulary where it is reduced."""
    config = json.loads((directory / eagle_form.CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(directory / eagle_form.WEIGHTS)
    if wrong := eagle_form.misfits(config, {name: value.shape for name, value in tensors.items()}):
        raise ConfigError(f"{directory / eagle_form.WEIGHTS}: {'; '.join(wrong)}")
    d2t = tensors.pop(eagle_form.D2T, None)
    tensors.pop(eagle_form.T2D, None)
    head = EagleHead(config)
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
    return head, config, None if d2t is None else torch.from_numpy(eagle_form.draft_tokens(d2t.numpy()))
