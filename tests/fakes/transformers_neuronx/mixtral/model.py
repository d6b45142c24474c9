"""Mixtral: as Mistral; continuous batching is in the code, and in no document."""

from ..base import NeuronModelBase
from ..config import NeuronConfig
from ..constants import LAYOUT_BSH

_SHARED = NeuronConfig()


class MixtralForSampling(NeuronModelBase):
    def __init__(self, config, *, neuron_config=_SHARED, **kwargs):
        assert neuron_config.attention_layout != LAYOUT_BSH, "BSH layout is currently not supported for moe_layer"
        super().__init__(config, neuron_config=neuron_config, **kwargs)
