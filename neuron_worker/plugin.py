"""vLLM's way in: two entry points, each called in every process, some more than once.

`register` answers whether this machine is ours. It runs while vLLM's own modules are half loaded, so it imports none
of them; and vLLM swallows what it raises, so what must be seen is a `SystemExit`. `register_general` runs later, when
vLLM can be imported and before any configuration is made.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from importlib.machinery import PathFinder
from itertools import pairwise

from . import environment, machine, startup_errors, vllm_changes

PLATFORM = "neuronserve.neuron_worker.platform.NeuronPlatform"
SUPPORTED = "0.32"


def register() -> str | None:
    """The platform's class, or None where another device claims the machine."""
    if not is_ours(sys.argv):
        return None
    refuse_other_versions(vllm_version())
    environment.set_defaults(os.environ)
    # Triton is for GPUs and not installed; torch warns of that once in every process.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    join_vllm_log()
    vllm_changes.install_early()
    return PLATFORM


def register_general() -> None:
    from vllm.platforms import current_platform

    if not current_platform.__class__.__module__.startswith(__package__):
        explain_absence()
        return
    vllm_changes.install()
    startup_errors.install_hook()


def vllm_version() -> str:
    """Of the vLLM that is being imported; its `version` module is the first thing it loads."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def refuse_other_versions(version: str) -> None:
    if not version.startswith(SUPPORTED + "."):
        raise SystemExit(
            f"neuronserve serves with vLLM {SUPPORTED}, this is vLLM {version}: install vllm=={SUPPORTED}.*, or remove "
            "neuronserve from this environment to use that vLLM alone"
        )


def is_ours(argv: list[str]) -> bool:
    """Asked for by name, or nothing else claims the machine."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    if ("--device", "neuron") in pairwise(words) or os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "neuron":
        return True
    if os.environ.get("NEURONSERVE_BACKEND") or machine.has_device():
        return True
    return not another_device_claims()


def another_device_claims() -> bool:
    """Whether one of vLLM's own accelerators would serve. A vLLM without compiled kernels can serve none of them."""
    if not has_kernels():
        return False
    platforms = getattr(sys.modules.get("vllm.platforms"), "builtin_platform_plugins", {})
    return any(claims() is not None for name, claims in platforms.items() if name != "cpu")


def has_kernels() -> bool:
    vllm = sys.modules.get("vllm")
    return vllm is not None and PathFinder.find_spec("vllm._C", vllm.__path__) is not None


def join_vllm_log() -> None:
    """Our log lines go where vLLM's go: same handlers, same level."""
    logging.getLogger("neuronserve").parent = logging.getLogger("vllm")


def explain_absence() -> None:
    """vLLM does not ask any plugin when VLLM_TARGET_DEVICE=cpu stands in the shell; say so, or nobody will know."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() != "cpu":
        return
    message = (
        "VLLM_TARGET_DEVICE=cpu makes vLLM use its own CPU platform without asking plugins: "
        "unset it to serve with neuronserve"
    )
    if not has_kernels():
        raise SystemExit(f"{message} (this vLLM was built without CPU kernels)")
    join_vllm_log()
    logging.getLogger(__name__).warning("%s", message)
