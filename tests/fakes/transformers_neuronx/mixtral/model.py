"""Mixtral: as Mistral; continuous batching is in the code, and in no document."""

from ..base import NeuronModelBase
from ..config import NeuronConfig

_SHARED = NeuronConfig()


class MixtralForSampling(NeuronModelBase):
    def __init__(self, config, *, neuron_config=_SHARED, **kwargs):
        super().__init__(config, neuron_config=neuron_config, **kwargs)
