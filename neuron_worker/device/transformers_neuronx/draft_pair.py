"""Which drafts the library takes beside a model: asked before anything starts, and again when they load.

Reads config.json of both and the names of a head's tensors. Imports no torch and no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..base import DeviceOptions
from ..errors import LoadError
from ..graph.safetensors import SafetensorsFile
from . import checkpoint
from .checkpoint import Checkpoint
from .settings import KEY

NAMES_OF_A_HEAD = ("model.fc.weight", "lm_head.weight")
"""Published heads have neither: their names begin below `model.`, and the last matrix is the model's."""

_SERVED: Mapping[str, tuple[bool, str]] = {
    "on_device_embedding": (True, "the step that holds both models looks tokens up itself"),
    "shard_over_sequence": (False, "the draft's cache is not sharded, and both must have the same buckets"),
}
"""Fields of the override that the library would refuse, or mistake, only once both models are compiled."""


def refuse(model_dir: str, draft_dir: str, options: DeviceOptions) -> None:
    """`LoadError` says what of the two directories, or of the options beside them, is not served."""
    check(read(model_dir, options), read(draft_dir, options), options)


def read(directory: str, options: DeviceOptions) -> Checkpoint:
    return checkpoint.read(directory, options.dtype, options.quantization, options.max_model_len)


def check(target: Checkpoint, draft: Checkpoint, options: DeviceOptions) -> None:
    for name, each in (("model", target), ("draft", draft)):
        if not each.architecture.speculates:
            raise LoadError(
                f"the {name} is {each.architecture.name}: the library speculates with LlamaForCausalLM only; "
                "serve without a draft"
            )
    if target.vocab_size != draft.vocab_size:
        raise LoadError(
            f"the draft's vocabulary is {draft.vocab_size}, the model's {target.vocab_size}: they must be the same; "
            "take a draft of the model's own family"
        )
    if draft.is_eagle and target.hidden_size != draft.hidden_size:
        raise LoadError(
            f"the EAGLE head is {draft.hidden_size} wide, the model {target.hidden_size}: it reads the model's hidden "
            "states; take a head that was trained for this model"
        )
    if draft.is_eagle:
        _check_names(Path(draft.directory) / "model.safetensors")
    if options.require_artifacts:
        raise LoadError(
            "require_cached: graphs that hold draft and model together are kept by the compiler's own cache alone; "
            "leave it out, or serve without a draft"
        )
    if options.quantization is not None:
        raise LoadError(f"quantization={options.quantization} is not served with a draft; leave one of them out")
    for name, (served, why) in _SERVED.items():
        given = options.neuron_config.get(name, served)
        if given != served:
            raise LoadError(
                f"{KEY}.{name}={given!r} is not served with a draft: {why}; leave it out, or serve without a draft"
            )


def _check_names(path: Path) -> None:
    if not path.is_file():
        return  # shards, or only config.json is here yet
    file = SafetensorsFile(path)
    names = file.names
    file.close()
    lacking = [name for name in NAMES_OF_A_HEAD if name not in names]
    if names and lacking:
        raise LoadError(
            f"the EAGLE head in {path} has no {' and no '.join(lacking)}: the library reads a head's tensors by "
            "Llama's names, below model., and its last matrix from the same file; rename them, and copy the model's "
            "lm_head.weight (where that is tied, its model.embed_tokens.weight) into it"
        )
