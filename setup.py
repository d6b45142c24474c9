"""The one thing pyproject.toml cannot say: a wheel carries the CPU kernels, compiled, and is tagged for the platform.

The library is loaded with ctypes and knows nothing of Python, so one wheel serves every Python 3 of a platform.
Without a C compiler the wheel is pure, and the kernels are compiled where it runs.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = Path(__file__).resolve().parent / "neuron_worker" / "device" / "cpu"
BUILT = Path("neuronserve", "neuron_worker", "device", "cpu")


def build_kernels(folder: Path) -> Path | None:
    """Compile the kernels into `folder`, by the module the product uses itself, loaded without its package."""
    source = CPU / "build.py"
    if not source.exists():
        return None
    spec = importlib.util.spec_from_file_location("kernel_build", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library: Path | None = module.build(folder)
    return library


class BuildWithKernels(build_py):
    """Copies the modules, then compiles the kernels beside them. An editable install leaves that to `make install`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.distribution.kernels = build_kernels(Path(self.build_lib) / BUILT)


class PlatformWheel(bdist_wheel):
    """`py3-none-<platform>` when there is a library inside, `py3-none-any` when there is none."""

    def get_tag(self) -> tuple[str, str, str]:
        if getattr(self.distribution, "kernels", None) is None:
            return "py3", "none", "any"
        return "py3", "none", re.sub(r"[-.]", "_", sysconfig.get_platform())


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
