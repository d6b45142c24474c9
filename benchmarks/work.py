"""How many bytes a step of a model reads and how many operations it takes, at the least: what a floor is made of."""

from __future__ import annotations

from dataclasses import dataclass

import floor

from neuronserve.neuron_worker.device.graph.spec import kv_bytes_per_token, read_spec


@dataclass(frozen=True)
class Step:
    rows: int  # tokens that are computed
    giving: int  # of them, those whose next token is wanted: the head is for them alone
    pairs: int  # of a token and one that it attends to

    @classmethod
    def of_decoding(cls, streams: int, context: int) -> Step:
        return cls(streams, streams, streams * context)

    @classmethod
    def of_prompt(cls, tokens: int) -> Step:
        return cls(tokens, 1, tokens * (tokens + 1) // 2)


@dataclass(frozen=True)
class Work:
    layers: int  # weights of all layers' products
    head: int
    bytes_each: int  # of a weight
    kv_bytes: int  # of one position, all layers
    attention_width: int  # query heads by head size by layers

    @classmethod
    def of(cls, model: str, bytes_each: int) -> Work:
        spec = read_spec(model)
        return cls(
            spec.num_linear_parameters,
            spec.num_head_parameters,
            bytes_each,
            kv_bytes_per_token(spec, "float32"),
            spec.query_size * spec.num_layers,
        )

    def num_bytes(self, step: Step) -> float:
        """All weights once, and in decoding every row's keys and values; a prompt's are in the caches."""
        cached = step.pairs * self.kv_bytes if step.rows == step.giving else 0
        return (self.layers + self.head) * self.bytes_each + cached

    def products(self, step: Step) -> float:
        """Operations; a multiply-add is two."""
        return 2.0 * (self.layers * step.rows + self.head * step.giving)

    def attention(self, step: Step) -> float:
        return 4.0 * self.attention_width * step.pairs

    def operations(self, step: Step) -> float:
        return self.products(step) + self.attention(step)

    def least_seconds(self, step: Step, machine: floor.Floor) -> float:
        """Products of 8-bit weights at the rate of 8-bit dot products, attention in float32."""
        computing = machine.compute_seconds(self.products(step), is_int8=self.bytes_each == 1)
        computing += machine.compute_seconds(self.attention(step), is_int8=False)
        return max(self.num_bytes(step) / machine.bytes_per_second, computing)
