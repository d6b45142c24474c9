"""The target, as far as a head's training needs it: its sizes, its tokenizer, its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronserve.neuron_worker.device.errors import LoadError, UnsupportedModel
from neuronserve.neuron_worker.device.graph.spec import ModelSpec, read_spec
from neuronserve.neuron_worker.errors import ConfigError


@dataclass(frozen=True)
class Target:
    directory: str
    device: torch.device
    spec: ModelSpec

    @classmethod
    def of(cls, directory: str, device: torch.device) -> Target:
        if not (Path(directory) / "config.json").is_file():
            raise ConfigError(f"--target {directory} has no config.json; give a local model directory")
        try:
            spec = read_spec(directory)
        except (LoadError, UnsupportedModel) as error:
            raise ConfigError(f"--target {directory}: {error}") from None
        if spec.family != "llama" or spec.rope is None or spec.activation != "silu_gate":
            raise ConfigError(
                f"--target {directory} is a {spec.architecture}: an EAGLE-1 head is a layer of a Llama and is trained "
                "for Llama, Mistral and Qwen models alone"
            )
        return cls(directory, device, spec)

    @property
    def sizes(self) -> dict[str, Any]:
        """What a head's layer takes over, as keys of a Llama's config.json."""
        spec = self.spec
        assert spec.rope is not None
        return {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "max_position_embeddings": spec.max_positions,
            "rms_norm_eps": spec.epsilon,
            "rope_theta": spec.rope.theta,
            "vocab_size": spec.vocab_size,
        }

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.directory)
        if not tokenizer.chat_template:
            raise ConfigError(f"--target {self.directory} has no chat template; give an instruct model's directory")
        return tokenizer

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id  # of config.json, where no generation_config.json is
        return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        return model.to(self.device).eval()

    @cached_property
    def decoder(self) -> Any:
        """Without its lm_head, in bfloat16: twice as fast, and less exact only than what a head could learn."""
        return self.model.model.to(torch.bfloat16)

    def rows(self, weight: str, kept: Tensor | None = None) -> Tensor:
        """Rows of the embeddings or the lm_head, float32."""
        layer = self.model.get_input_embeddings() if weight == "embeddings" else self.model.get_output_embeddings()
        values: Tensor = layer.weight.detach().to(self.device, torch.float32)
        return values if kept is None else values[kept.to(values.device)]
