"""Peak memory while a checkpoint is loaded, against what is kept of it. Measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, VOCABULARY = 512, 1536, 6, 8192

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}

LOAD = """
import json, sys
from importlib import import_module
from pathlib import Path
from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

device = TorchDevice()
if sys.argv[2] == "cpu":
    native = import_module("neuronserve.neuron_worker.device.cpu.device")
    device = native.create(native.CAPABILITIES)
options = DeviceOptions(2, 128, 16, 2, quantization=sys.argv[3] or None, threads=1)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = status("VmRSS")
facts = device.load(sys.argv[1], options)
print(json.dumps({"peak": status("VmHWM") - before, "kept": facts.weight_bytes}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(LAYERS):
        at = f"model.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = torch.randn(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}mlp.{name}.weight"] = torch.randn(INNER, HIDDEN)
        tensors[f"{at}mlp.down_proj.weight"] = torch.randn(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantization", ["", "int8"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_peak_is_at_most_1_3_times_the_weights_kept(backend: str, quantization: str, checkpoint: Path) -> None:
    assert (checkpoint / "model.safetensors").stat().st_size > 90e6
    command = [sys.executable, "-c", LOAD, str(checkpoint), backend, quantization]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["peak"] <= 1.3 * measured["kept"], measured
