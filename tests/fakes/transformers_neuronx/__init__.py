"""A stand-in for the classic Neuron library, for tests: its surface and its behaviour, without a chip.

It follows what is written about the library (argument by argument, error by error), not what our backend happens to
do: every slot's cache cells are really there, idle rows really overwrite position 0, padding really leaves garbage,
configurations are really changed under the caller's hands. What a model answers is a function of the cache cells it
reads (`answers`), so whatever damages a cell shows in the tokens. `chip` has what a test may look at.

What it does not play raises NotImplementedError rather than guess: batches without continuous batching, the BSH and
paged caches, speculation on the host, trees.
"""

from . import testing
from .config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig, QuantizationConfig
from .constants import GQA, Layout
from .gpt2.model import GPT2ForSamplingWithContextBroadcasting
from .llama.model import LlamaForSampling
from .mistral.model import MistralForSampling
from .mixtral.model import MixtralForSampling
from .modeling_auto import NeuronAutoModelForCausalLM
from .others import (
    BloomForSampling,
    GPTJForSampling,
    GPTNeoXForSampling,
    HuggingFaceGenerationModelAdapter,
    OPTForSampling,
)
from .sparse_attn_utils import SparseAttnConfig
from .version import __version__

__all__ = [
    "GQA",
    "BloomForSampling",
    "ContinuousBatchingConfig",
    "GPT2ForSamplingWithContextBroadcasting",
    "GPTJForSampling",
    "GPTNeoXForSampling",
    "GenerationConfig",
    "HuggingFaceGenerationModelAdapter",
    "Layout",
    "LlamaForSampling",
    "MistralForSampling",
    "MixtralForSampling",
    "NeuronAutoModelForCausalLM",
    "NeuronConfig",
    "OPTForSampling",
    "QuantizationConfig",
    "SparseAttnConfig",
    "__version__",
    "testing",
]
