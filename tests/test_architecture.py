"""Who must not know what: import directions, read from the source and from a real import in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "neuron_worker", "bucketing", "speculative")
SDKS = {"torch_neuronx", "transformers_neuronx", "neuronxcc", "libneuronxla", "torch_xla"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "requests", "openai"}
TEXT = {"transformers", "tokenizers", "vllm.transformers_utils", "vllm.tokenizers", "vllm.entrypoints"}

RULES: dict[str, set[str]] = {
    "server": {"torch", "neuronserve.neuron_worker.device", "neuronserve.speculative"} | SDKS,
    "bucketing": {"vllm", "torch", "transformers", "neuronserve.server", "neuronserve.speculative"} | HTTP | SDKS,
    "speculative/verify.py": {"vllm", "neuronserve.server", "neuronserve.neuron_worker.state"} | HTTP | SDKS,
    "speculative/ngram.py": {"vllm", "neuronserve.server", "neuronserve.neuron_worker.state"} | HTTP | SDKS,
    "neuron_worker/device": {"vllm", "transformers", "safetensors", "neuronserve"} | HTTP,
    "neuron_worker/scheduler.py": {"torch", "numpy", "neuronserve.neuron_worker.device.graph"} | HTTP | SDKS,
    "neuron_worker/platform.py": {"numpy", "neuronserve.neuron_worker.device.graph"} | HTTP | SDKS,
    "neuron_worker/runner.py": TEXT | HTTP | SDKS | {"neuronserve.bucketing.ladder", "neuronserve.server"},
}
"""Path (a folder or a file) -> modules it may not import. `bucketing` may use the device protocol's types alone."""

ALLOWED = {
    # vLLM's own platform interface is written in torch's dtypes; nothing of a model is touched.
    ("neuron_worker/platform.py", "torch"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("neuronserve", *parts)).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, at any depth of its functions; `from a import b` gives a and a.b."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def sources(where: str) -> list[Path]:
    path = ROOT / where
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def breaks(name: str, forbidden: set[str], own: str) -> bool:
    return any(name == f or name.startswith(f + ".") for f in forbidden) and not name.startswith(own)


@pytest.mark.parametrize("where", RULES)
def test_does_not_import_what_it_must_not_know(where: str) -> None:
    own = ".".join(("neuronserve", *Path(where).with_suffix("").parts))
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(where)
        for name in imports(path)
        if breaks(name, RULES[where], own) and (where, name.split(".")[0]) not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_the_reader_of_imports_sees_nested_and_relative_ones(tmp_path: Path) -> None:
    file = ROOT / "neuron_worker" / "device" / "base.py"
    assert "numpy" in set(imports(file))
    sample = "def f():\n    import torch.nn\n    from . import x\n"
    names = [n.name for n in ast.walk(ast.parse(sample)) if isinstance(n, ast.alias)]
    assert names == ["torch.nn", "x"]


def test_sdks_are_imported_only_inside_their_backend() -> None:
    homes = {"transformers_neuronx", "torch_neuronx"}
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in FOLDERS
        for path in sources(folder)
        if not homes & set(path.parts)
        for name in imports(path)
        if name.split(".")[0] in SDKS
    ]
    assert not found, "\n".join(found)


def test_bucketing_uses_only_the_protocol_of_the_device_side() -> None:
    allowed = ("neuronserve.neuron_worker.device.base", "neuronserve.neuron_worker.device.errors")
    found = [
        f"{path.name} imports {name}"
        for path in sources("bucketing")
        for name in imports(path)
        if name.startswith("neuronserve.neuron_worker") and not name.startswith(allowed)
    ]
    assert not found, "\n".join(found)


def test_the_device_side_runs_from_its_own_folder_without_the_package() -> None:
    """What another interpreter does, where nothing of ours is installed."""
    code = (
        # Last on the path: our `platform` must not hide the standard library's.
        "import sys; sys.path.append(sys.argv[1]); import device.base, device.registry, device.host\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('vllm', 'transformers', 'neuronserve', 'torch')]\n"
        "print(bad); sys.exit(bool(bad))"
    )
    command = [sys.executable, "-I", "-c", code, str(ROOT / "neuron_worker")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planning_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, neuronserve.bucketing.plan, neuronserve.neuron_worker.config\n"
        "sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
