"""Classes without continuous batching, so that their names can be imported."""

from .base import NeuronModelBase


class BloomForSampling(NeuronModelBase):
    serves_continuously = False


class OPTForSampling(NeuronModelBase):
    serves_continuously = False


class GPTNeoXForSampling(NeuronModelBase):
    serves_continuously = False


class GPTJForSampling(NeuronModelBase):
    serves_continuously = False


class HuggingFaceGenerationModelAdapter:
    def __init__(self, config, model):
        raise NotImplementedError("the fake has no adapter for generate()")
