"""The C kernels, compiled: sources in, one shared library out, with a variant of every kernel per instruction set.

The library's name carries a digest of its sources, so a stale one is never loaded. `build` is for set-up and
packaging; `find` is for the device: the file beside this module, else the user's cache, else compiled there now.
Knows nothing of what the kernels do. Runs by itself, without its package.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent
_OPTIONS = ["-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
_COMMON = ("device.c", "pool.c", "step.c")
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"avx512": _AVX512, "avx2": _AVX2, "base": []},
    "aarch64": {"base": []},
}
_MORE_DOTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"avx512vnni": [*_AVX512, "-mavx512vnni"], "avxvnni": [*_AVX2, "-mavxvnni"]},
}
"""Instructions for int8 alone, which compilers before GCC 11 know in part; the library does without them then."""
_SECONDS = 300


class BuildFailed(Exception):
    """There is no library and none can be made; the message says what to do."""


def library_name() -> str:
    """Different for every change of the sources, the options or the kind of machine."""
    digest = hashlib.sha256(repr((_OPTIONS, _VARIANTS, _MORE_DOTS, platform.system(), platform.machine())).encode())
    for source in sorted((FOLDER / "kernels").glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return f"neuronserve_cpu-{digest.hexdigest()[:16]}.so"


def build(output_dir: Path) -> Path | None:
    """The library in `output_dir`, compiled if it is not there; None, and a log line, where that is impossible."""
    try:
        library = _build(Path(output_dir))
    except BuildFailed as failure:
        log.warning("%s", failure)
        return None
    for old in library.parent.glob("neuronserve_cpu-*.so"):
        if old != library:
            old.unlink(missing_ok=True)
    return library


def find() -> Path:
    """A library that this machine can load, or `BuildFailed`."""
    packaged = FOLDER / library_name()
    return packaged if _loads(packaged) else _build(_cache_dir())


def _build(folder: Path) -> Path:
    library = folder / library_name()
    if _loads(library):
        return library
    compiler = _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the last step is a rename: processes that build at once do not disturb each other.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
            _compile_all(compiler, Path(work))
            objects = sorted(str(path) for path in Path(work).glob("*.o"))
            made = Path(work) / library.name
            _run([*compiler, "-shared", *_OPTIONS, *objects, "-o", str(made), "-lm"])
            os.replace(made, library)
    except OSError as error:
        raise BuildFailed(f"the CPU kernels cannot be written to {folder}: {error}") from error
    if not _loads(library):
        raise BuildFailed(f"{library} was compiled but cannot be loaded; is {compiler[0]} for this machine?")
    return library


def _compile_all(compiler: list[str], work: Path) -> None:
    kernels = FOLDER / "kernels"
    variants = _VARIANTS.get(_machine(), {"base": []})
    more = _MORE_DOTS.get(_machine(), {})

    def compile_one(source: str, options: list[str], variant: str = "") -> None:
        named = [*options, f"-DVARIANT={variant}"] if variant else options
        target = work / f"{source}-{variant}.o"
        _run([*compiler, "-c", *_OPTIONS, *named, str(kernels / source), "-o", str(target)])

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [pool.submit(compile_one, "kernels.c", options, variant) for variant, options in variants.items()]
        jobs += [pool.submit(compile_one, "dots.c", options, variant) for variant, options in variants.items()]
        jobs += [pool.submit(compile_one, name, []) for name in _COMMON]
        extra = {name: pool.submit(compile_one, "dots.c", options, name) for name, options in more.items()}
    for job in jobs:
        job.result()
    for name, job in extra.items():
        if (failure := job.exception()) is not None:
            log.info("the CPU kernels are without %s: %s", name, failure)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"the CPU kernels could not be compiled: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildFailed(f"the CPU kernels could not be compiled by {command[0]}: {first}")


def _compiler() -> list[str]:
    wanted = os.environ.get("CC", "").split()
    for candidate in ([wanted] if wanted else []) + [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildFailed("no C compiler for the CPU kernels; install gcc (Debian: apt-get install gcc libc6-dev)")


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "neuronserve" / "kernels"


def _loads(library: Path) -> bool:
    if not library.is_file():
        return False
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True
