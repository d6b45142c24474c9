"""Mistral: no speculation, and a default configuration made once, at import, for everybody."""

from ..base import NeuronModelBase
from ..config import NeuronConfig

_SHARED = NeuronConfig()


class MistralForSampling(NeuronModelBase):
    def __init__(self, config, *, neuron_config=_SHARED, **kwargs):
        super().__init__(config, neuron_config=neuron_config, **kwargs)
