"""The library's models behind three verbs: read prompts, decode, set sampling parameters.

An engine holds the compiled graphs of one model, or of a model and its draft. Tensors are the library's own kind
(CPU, int64) and made for one call. Whatever the library raises comes out as one of our errors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import DeviceError, DeviceLost, DoesNotFit, LoadError
from .artifacts import Artifacts, logger
from .prompts import NARROWEST, NARROWEST_WITH_EAGLE, Call

PADDING = -1
"""Outside any vocabulary: the library replaces genuine tokens that equal its padding."""


class Engine(Protocol):
    num_tokens: int  # most that a row gains in a decode
    narrowest: int  # columns that a call of prompts has at least

    def read(self, call: Call) -> Tensor:
        """Logits [n, vocabulary], or tokens [n, 1]."""

    def decode(self, call: Call) -> Tensor:
        """Logits [n, vocabulary], or tokens [n, num_tokens], PADDING past those a row gained."""

    def set_sampling(self, generation_config: Any) -> None:
        """The configuration is the library's to keep."""


class PlainEngine:
    num_tokens = 1
    narrowest = NARROWEST

    def __init__(self, model: Any) -> None:
        self._model = model

    def read(self, call: Call) -> Tensor:
        return self._run(call)

    def decode(self, call: Call) -> Tensor:
        return self._run(call)

    def _run(self, call: Call) -> Tensor:
        input_ids, cache_ids, start_ids = _tensors(call)
        result: Tensor = _called(lambda: self._model(input_ids, cache_ids=cache_ids, start_ids=start_ids))
        return result

    def set_sampling(self, generation_config: Any) -> None:
        _called(lambda: self._model.update_generation_config(generation_config))


class FusedEngine:
    """Draft and target in one graph: a row gains 1 to k+1 tokens."""

    def __init__(self, decoder: Any, num_drafts: int, *, is_eagle: bool) -> None:
        self._decoder = decoder
        self.num_tokens = num_drafts + 1
        self.narrowest = NARROWEST_WITH_EAGLE if is_eagle else NARROWEST

    def read(self, call: Call) -> Tensor:
        return self._run(call)

    def decode(self, call: Call) -> Tensor:
        return self._run(call)

    def _run(self, call: Call) -> Tensor:
        tokens: Tensor = _called(lambda: self._decoder.speculative_iteration(*_tensors(call)))[0]
        return tokens

    def set_sampling(self, generation_config: Any) -> None:
        _called(lambda: self._decoder.update_generation_config(generation_config))


def _tensors(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(call.input_ids), torch.from_numpy(call.cache_ids), torch.from_numpy(call.start_ids)


def _called(what: Callable[[], Any]) -> Any:
    try:
        with torch.inference_mode():
            return what()
    except StopIteration:  # how the library says that no bucket is large enough
        raise DoesNotFit("a row is past the library's largest token-generation bucket") from None
    except RuntimeError as error:  # what the Neuron runtime raises
        raise DeviceLost(f"the library failed at a step: {error}") from error
    except Exception as error:
        raise DeviceError(f"the library refused a step: {type(error).__name__}: {error}") from error


def bring_up(make: Callable[[], Any], artifacts: Artifacts) -> Any:
    """A model of `make` on the chip, from kept graphs where they are there; what is compiled anew is kept."""
    try:
        model = make()
        directory = artifacts.found()
        if directory is not None:
            model.load(str(directory))
            try:
                model.to_neuron()
                artifacts.loaded(directory)
                return model
            except FileNotFoundError as error:
                artifacts.check_compiling(f"compiled graphs in {directory} do not fit ({error})")
                logger.warning("compiled graphs in %s do not fit, compiling anew: %s", directory, error)
                shutil.rmtree(directory, ignore_errors=True)
                model = make()
        else:
            artifacts.check_compiling("there are no compiled graphs for this model")
        model.to_neuron()
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"the library refused the model: {type(error).__name__}: {error}") from error
    artifacts.keep(model)
    return model
