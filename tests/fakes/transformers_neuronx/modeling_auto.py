"""The class of a checkpoint, by its model_type."""

from .base import _read_config
from .gpt2.model import GPT2ForSamplingWithContextBroadcasting
from .llama.model import LlamaForSampling
from .mistral.model import MistralForSampling
from .mixtral.model import MixtralForSampling
from .others import BloomForSampling, GPTJForSampling, GPTNeoXForSampling, OPTForSampling

_CLASSES = {
    "llama": LlamaForSampling,
    "code_llama": LlamaForSampling,
    "mistral": MistralForSampling,
    "mixtral": MixtralForSampling,
    "gpt2": GPT2ForSamplingWithContextBroadcasting,
    "bloom": BloomForSampling,
    "opt": OPTForSampling,
    "gpt_neox": GPTNeoXForSampling,
    "gptj": GPTJForSampling,
}


class NeuronAutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        model_type = _read_config(path).model_type
        assert model_type in _CLASSES, f"unsupported model type {model_type}"
        return _CLASSES[model_type].from_pretrained(path, *args, **kwargs)
