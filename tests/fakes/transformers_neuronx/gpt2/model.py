"""GPT-2, without continuous batching."""

from ..base import NeuronModelBase


class GPT2ForSampling(NeuronModelBase):
    serves_continuously = False


class GPT2ForSamplingWithContextBroadcasting(GPT2ForSampling):
    pass
