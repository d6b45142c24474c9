"""How rows end: by logits that cross to the caller or are sampled here, or by the chip's own sampler.

The chip's sampler has one line of parameters per slot, written before the slot's first call, and the lines it was
compiled with until then: so an ending belongs to one build of the graphs. It knows no temperature
0 (it divides by it), so greedy is "the likeliest of one". Its random numbers are its own: no seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..base import Float32, Int32, RowSampling, Want
from ..errors import DeviceError
from ..graph.torch_sampling import SamplingTensors, sampled_tokens
from .neuron_config import Values, copied
from .settings import KEY, refuse_generation

SETTING = "sampling"


@dataclass(frozen=True)
class Ended:
    """Rows of one call of the library, and what it gave."""

    places: list[int]  # output rows
    result: Tensor  # [n, vocabulary] logits, or [n, tokens]


class Ending(Protocol):
    def prepare(self, slots: Sequence[int], places: Sequence[int], sampling: RowSampling) -> Values | None:
        """The parameters to write before the call, if the chip may have others."""

    def written(self, parameters: Values) -> None:
        """The chip took those of `prepare`."""

    def end(self, calls: Sequence[Ended], sampling: RowSampling, width: int) -> tuple[Int32, Float32 | None]:
        """(tokens [N, width], logits of the rows that wanted them)."""


class HostEnding:
    """From logits, by the rule that every device of logits follows."""

    def prepare(self, slots: Sequence[int], places: Sequence[int], sampling: RowSampling) -> Values | None:
        return None

    def written(self, parameters: Values) -> None:
        pass

    def end(self, calls: Sequence[Ended], sampling: RowSampling, width: int) -> tuple[Int32, Float32 | None]:
        tokens = np.full((len(sampling.want), width), -1, dtype=np.int32)
        logits_of = {place: row for call in calls for place, row in zip(call.places, call.result.float(), strict=True)}
        wanted = [place for place in sorted(logits_of) if sampling.want[place] == Want.LOGITS]
        drawn = [place for place in sorted(logits_of) if sampling.want[place] == Want.TOKEN]
        if drawn:
            rows = torch.stack([logits_of[place] for place in drawn])
            tokens[drawn, 0] = sampled_tokens(rows, _tensors(sampling, drawn)).numpy()
        return tokens, torch.stack([logits_of[place] for place in wanted]).numpy() if wanted else None


def _tensors(sampling: RowSampling, places: list[int]) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.from_numpy(sampling.temperature[places]),
        top_k=torch.from_numpy(sampling.top_k[places]),
        top_p=torch.from_numpy(sampling.top_p[places]),
        min_p=torch.from_numpy(sampling.min_p[places]),
        uniforms=torch.from_numpy(sampling.uniforms[places, 0]),
    )


class ChipEnding:
    """By the sampler that was compiled in."""

    def __init__(self, fields: Values) -> None:
        self._written = copied(fields)
        self._is_in_doubt = False  # a write that failed may have reached the chip, or a part of it
        self._is_greedy = not fields.get("do_sample")
        refuse_generation(fields)
        self._most = int(fields.get("global_top_k") or 0)

    def prepare(self, slots: Sequence[int], places: Sequence[int], sampling: RowSampling) -> Values | None:
        for place in places:
            self._check(place, sampling)
        if self._is_greedy:
            return None
        lines = [(slot, self._line(place, sampling)) for slot, place in zip(slots, places, strict=True)]
        if not self._is_in_doubt and all(self._has(slot, line) for slot, line in lines):
            return None
        wanted = copied(self._written)
        for slot, line in lines:
            for name, value in line.items():
                wanted[name][slot] = value
        self._is_in_doubt = True
        return wanted

    def _has(self, slot: int, line: Mapping[str, float]) -> bool:
        return all(self._written[name][slot] == value for name, value in line.items())

    def written(self, parameters: Values) -> None:
        self._written, self._is_in_doubt = parameters, False

    def _line(self, place: int, sampling: RowSampling) -> dict[str, float]:
        temperature, top_k = float(sampling.temperature[place]), int(sampling.top_k[place])
        if temperature == 0:
            return {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
        kept = min(top_k, self._most) if top_k > 0 else self._most
        return {"top_k": kept, "top_p": float(sampling.top_p[place]), "temperature": temperature}

    def _check(self, place: int, sampling: RowSampling) -> None:
        temperature, top_k = float(sampling.temperature[place]), int(sampling.top_k[place])
        if sampling.want[place] == Want.LOGITS:
            raise DeviceError(
                f"a row wants logits, but sampling is compiled into the device; start with {SETTING}=host"
            )
        if sampling.min_p[place] > 0:
            raise DeviceError(
                f"min_p={sampling.min_p[place]}: the device's sampler has none; start with {SETTING}=host"
            )
        if self._is_greedy and temperature > 0 and top_k != 1:
            raise DeviceError(
                f"temperature={temperature}: greedy decoding is compiled in; leave {KEY}.on_device_generation out"
            )

    def end(self, calls: Sequence[Ended], sampling: RowSampling, width: int) -> tuple[Int32, Float32 | None]:
        tokens = np.full((len(sampling.want), width), -1, dtype=np.int32)
        for call in calls:
            found = call.result.numpy()
            for row, place in enumerate(call.places):
                if sampling.want[place] == Want.TOKEN:
                    tokens[place, : found.shape[1]] = found[row]
        return tokens, None
