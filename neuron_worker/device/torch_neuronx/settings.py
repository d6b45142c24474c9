"""Settings of the classic library, none of which this backend has. Asked before anything starts and again when a model
loads. Imports no torch and no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModel


def refuse(given: Mapping[str, Any], num_slots: int) -> None:
    if given:
        names = ", ".join(sorted(given))
        raise UnsupportedModel(
            f"override_neuron_config: {names} are settings of transformers-neuronx, and the torch-neuronx backend has "
            "none of them; leave them out"
        )
