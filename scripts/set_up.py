"""`make install`: everything the product needs into one virtual environment; what is in place is left alone.

In: this checkout, requirements.lock, pip's index. Out: the environment with torch's CPU build, vLLM built from its
source as a pure-Python package, this project (editable) and the compiled CPU kernels. Each step leaves a digest of
what it was made from; a step runs again when that changes, and all later ones with it. Progress goes to stderr.

    python3 scripts/set_up.py [--venv .venv] [--product]

With --product, what serves alone, for an image: this project installed as a wheel, and nothing that only tests need.

Needs the standard library alone, and runs on Pythons too old for the product so that they get the one line saying so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Callable, NamedTuple, TextIO  # noqa: UP035 (collections.abc has no Callable[…] on an old Python)

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
CPU_FOLDER = ROOT / "neuron_worker" / "device" / "cpu"

PYTHONS = ((3, 11), (3, 13))
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
DISK_GB, SPARE_GB = 5, 0.5
"""To start with, and once the requirements are installed."""

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 4
VLLM_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"


class SetUpError(Exception):
    """Set-up cannot go on; the message is one line that says what to do."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- what the machine must have ---------------------------------------------------------------------------------


class Machine(NamedTuple):
    """What set-up looks at before it starts. `compiler` is one that works, None if there is none."""

    system: str
    machine: str
    glibc: tuple[int, ...]
    python: tuple[int, int]
    has_venv: bool
    compiler: str | None
    free_gb: float
    folder: str


def this_machine(folder: Path) -> Machine:
    name, version = platform.libc_ver()
    glibc = tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else ()
    return Machine(
        system=platform.system(),
        machine=platform.machine(),
        glibc=glibc,
        python=sys.version_info[:2],
        has_venv=importable("venv") and importable("ensurepip"),
        compiler=working_compiler(),
        free_gb=shutil.disk_usage(str(folder)).free / 1e9,
        folder=str(folder),
    )


def importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def working_compiler() -> str | None:
    """A C compiler that finds its headers and can link; Debian's `gcc` alone, without libc6-dev, cannot."""
    for name in [os.environ.get("CC", ""), "cc", "gcc", "clang"]:
        if not name or not shutil.which(name.split()[0]):
            continue
        command = [*name.split(), "-x", "c", "-", "-o", os.devnull]
        program = "#include <math.h>\nint main(void) { return 0; }\n"
        if subprocess.run(command, input=program.encode(), stderr=subprocess.DEVNULL).returncode == 0:
            return name
    return None


def missing(machine: Machine, needed_gb: float = DISK_GB) -> list[str]:
    """What the machine lacks, each with its remedy; empty if nothing."""
    lowest, highest = (".".join(map(str, version)) for version in PYTHONS)
    found = []
    if machine.system != "Linux":
        found.append(f"{machine.system} found, Linux needed (use a container or a virtual machine)")
    elif machine.glibc < GLIBC:
        libc = "glibc " + ".".join(map(str, machine.glibc)) if machine.glibc else "no glibc"
        found.append(f"{libc} found, glibc 2.28 or later needed (Debian 10, Ubuntu 20.04, Amazon Linux 2023 or newer)")
    if machine.machine not in MACHINES:
        found.append(f"{machine.machine} processor found, {' or '.join(MACHINES)} needed")
    if not PYTHONS[0] <= machine.python <= PYTHONS[1]:
        version = ".".join(map(str, machine.python))
        found.append(f"Python {version} found, {lowest} to {highest} needed (make PYTHON=/path/to/python{lowest})")
    elif not machine.has_venv:
        found.append("Python's venv module not found (apt-get install python3-venv)")
    if machine.compiler is None:
        found.append("no working C compiler found (apt-get install gcc libc6-dev, or set CC)")
    if machine.free_gb < needed_gb:
        found.append(f"{machine.free_gb:.1f} GB free in {machine.folder}, {needed_gb:g} GB needed")
    return found


# --- the environment --------------------------------------------------------------------------------------------


class Environment:
    """The virtual environment: its paths, its pip, and the digests of the steps done in it."""

    def __init__(self, folder: Path, product: bool = False) -> None:
        self.folder = folder
        self.product = product  # independent of this checkout, and without the tests' requirements
        self.python = folder / "bin" / "python"
        self.wheels = folder / "wheels"
        self.log = folder / "set-up.log"
        self._stamps = folder / "set-up.json"

    @property
    def is_ours(self) -> bool:
        return self._stamps.exists()

    def done(self) -> dict[str, str]:
        if not self.python.exists():
            return {}
        try:
            return dict(json.loads(self._stamps.read_text()))
        except (OSError, ValueError):
            return {}

    def mark_done(self, stamps: dict[str, str]) -> None:
        self._stamps.write_text(json.dumps(stamps, indent=2) + "\n")

    def run(self, *command: str, env: dict[str, str] | None = None, statuses: tuple[int, ...] = (0,)) -> str:
        """Run the environment's Python; its output goes to the log, and the last of it into the error."""
        outcome = subprocess.run(
            [str(self.python), *command],
            capture_output=True,
            text=True,
            cwd=str(ROOT),
            env=dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1") if env is None else env,
        )
        with self.log.open("a") as log:
            log.write(f"$ python {' '.join(command)}\n{outcome.stdout}{outcome.stderr}\n")
        if outcome.returncode not in statuses:
            raise SetUpError(f"`python {' '.join(command[:4])} …` failed: {reason(outcome)} (all of it: {self.log})")
        return outcome.stdout

    def pip(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        return self.run("-m", "pip", *arguments, env=env)


def reason(outcome: subprocess.CompletedProcess[str]) -> str:
    """The last line that speaks of an error, else the last line."""
    lines = [line.strip() for line in (outcome.stderr or outcome.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {outcome.returncode}"])[-1]


def locked(*sections: str) -> list[str]:
    """The requirement lines of the named sections of requirements.lock."""
    lines: list[str] = []
    wanted = False
    for line in LOCK.read_text().splitlines():
        if line.startswith("# --- "):
            wanted = line[6:] in sections
        elif wanted and line and not line.startswith("#"):
            lines.append(line)
    return lines


def install_locked(environment: Environment, *sections: str) -> None:
    wanted = environment.folder / f"{'-'.join(sections)}.txt"
    wanted.write_text("\n".join(locked(*sections)) + "\n")
    environment.pip("install", "--no-deps", "--requirement", str(wanted))


def pinned(name: str) -> str:
    """`name==version` as pyproject.toml's `serve` extra has it."""
    found = re.search(rf'"({name}==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, f"pyproject.toml pins no {name}"
    return found.group(1)


# --- the steps --------------------------------------------------------------------------------------------------


def make_environment(environment: Environment) -> None:
    """A new environment in place of an old one of ours; a folder that set-up did not make is left alone."""
    folder = environment.folder
    if folder.exists() and any(folder.iterdir()) and not environment.is_ours:
        raise SetUpError(f"{folder} was not made by this set-up; move it away or name another with VENV=…")
    shutil.rmtree(str(folder), ignore_errors=True)
    folder.mkdir(parents=True)
    environment.mark_done({})
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, stdout=subprocess.DEVNULL)


def install_build_tools(environment: Environment) -> None:
    install_locked(environment, "build")


def index_answers() -> bool:
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=PROBE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def cuda_packages(environment: Environment, source: list[str]) -> list[str]:
    """The CUDA packages that torch from this source would bring; found without downloading torch."""
    report = environment.pip(
        "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *source, pinned("torch")
    )
    names = [item["metadata"]["name"] for item in json.loads(report)["install"]]
    return sorted(name for name in names if name.lower().startswith(("nvidia-", "cuda-")))


def torch_source(environment: Environment) -> list[str]:
    """pip's arguments for a source that offers torch's CPU build: PyTorch's own index if it answers, else pip's."""
    if index_answers():
        try:
            if not cuda_packages(environment, ["--index-url", TORCH_INDEX]):
                say(f"  torch comes from {TORCH_INDEX}")
                return ["--index-url", TORCH_INDEX]
        except SetUpError as error:
            say(f"  {TORCH_INDEX} answers but has no {pinned('torch')} for this machine: {error}")
    else:
        say(f"  {TORCH_INDEX} does not answer; looking at pip's configured index")
    found = cuda_packages(environment, [])
    if found:
        raise SetUpError(
            f"pip's index offers {pinned('torch')} only with CUDA ({found[0]} and {len(found) - 1} more, gigabytes); "
            f"let this machine reach {TORCH_INDEX}, or set PIP_FIND_LINKS to a folder with the CPU wheel"
        )
    say(f"  torch comes from pip's configured index, which offers {pinned('torch')} without CUDA")
    return []


def install_torch(environment: Environment) -> None:
    environment.pip("install", "--no-deps", *torch_source(environment), pinned("torch"))


def requirement_sections(environment: Environment) -> tuple[str, ...]:
    return ("serve", "s3") if environment.product else ("serve", "s3", "test")


def install_requirements(environment: Environment) -> None:
    install_locked(environment, *requirement_sections(environment))


def vllm_build_environment() -> dict[str, str]:
    """A pure-Python build whatever the shell has set, without vLLM's optional Rust front end (minutes)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    version = pinned("vllm").split("==")[1]
    return dict(kept, VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version, CARGO="not-wanted")


def build_vllm(environment: Environment) -> Path:
    """vLLM's wheel, built from its source; kept in the environment for `make wheelhouse`."""
    shutil.rmtree(str(environment.wheels), ignore_errors=True)
    wanted = environment.folder / "vllm.txt"
    wanted.write_text(f"{pinned('vllm')} --hash=sha256:{VLLM_SHA256}\n")
    build = ["wheel", "--no-build-isolation", "--no-binary", "vllm", "--no-deps", "--require-hashes"]
    build += ["--wheel-dir", str(environment.wheels), "--requirement", str(wanted)]
    environment.pip(*build, env=vllm_build_environment())
    (wheel,) = environment.wheels.glob("vllm-*.whl")
    if any(name.endswith(".so") for name in zipfile.ZipFile(str(wheel)).namelist()):
        raise SetUpError("pip's cache holds a vLLM with device code; run `pip cache remove vllm`, then this again")
    return wheel


def install_vllm(environment: Environment) -> None:
    environment.pip("install", "--no-deps", "--force-reinstall", str(build_vllm(environment)))


def install_ourselves(environment: Environment) -> None:
    here = ["."] if environment.product else ["--editable", "."]
    environment.pip("install", "--no-deps", "--no-build-isolation", *here)
    check_requirements(environment)


def check_requirements(environment: Environment) -> None:
    """Everything asked for is installed, but for the lock's `gpu` section, which is left out on purpose."""
    left_out = [line.split("==")[0] for line in locked("gpu")]
    complaints = [
        line
        for line in environment.run("-m", "pip", "check", statuses=(0, 1)).splitlines()
        if "requires" in line and not any(f"requires {name}, which is not installed" in line for name in left_out)
    ]
    if complaints:
        raise SetUpError(f"requirements.lock is not complete: {'; '.join(complaints)}; `make lock` renews it")


def build_kernels(environment: Environment) -> None:
    if environment.product or not (CPU_FOLDER / "build.py").exists():
        return  # a wheel brings its own
    environment.run(
        "-c",
        "import pathlib, sys; from neuronserve.neuron_worker.device.cpu.build import build; "
        "sys.exit(0 if build(pathlib.Path(sys.argv[1])) else 1)",
        str(CPU_FOLDER),
    )


class Step(NamedTuple):
    name: str
    says: str
    run: Callable[[Environment], None]
    inputs: list[str]


def contents(*paths: Path) -> list[str]:
    return [path.read_text() for path in paths if path.exists()]


def steps(environment: Environment) -> list[Step]:
    kernels = sorted([*CPU_FOLDER.glob("kernels/*"), CPU_FOLDER / "build.py"])
    sections = requirement_sections(environment)
    needed_by = "vLLM needs" if environment.product else "vLLM and the tests need"
    return [
        # Console scripts hold absolute paths, so a moved checkout gets a new environment.
        Step("environment", "virtual environment", make_environment, [str(environment.folder), sys.version]),
        Step("build", "build tools", install_build_tools, locked("build")),
        Step("torch", f"{pinned('torch')}, CPU build, 0.2 GB", install_torch, [pinned("torch")]),
        Step("requirements", f"what {needed_by}, 0.6 GB", install_requirements, locked(*sections)),
        Step("vllm", f"{pinned('vllm')} from source, pure Python", install_vllm, [pinned("vllm"), VLLM_SHA256]),
        Step("neuronserve", "neuronserve", install_ourselves, contents(ROOT / "pyproject.toml", ROOT / "setup.py")),
        Step("kernels", "CPU kernels", build_kernels, contents(*kernels)),
    ]


def digest(before: str, inputs: list[str]) -> str:
    return hashlib.sha256(json.dumps([before, *inputs]).encode()).hexdigest()


def set_up(environment: Environment) -> None:
    """Run every step whose digest is not the recorded one; digests are chained, so later steps follow."""
    wanted: dict[str, str] = {}
    before = ""
    planned = steps(environment)
    for step in planned:
        wanted[step.name] = before = digest(before, step.inputs)
    done = environment.done()
    if done == wanted:
        return
    has_requirements = done.get("requirements") == wanted.get("requirements")
    lacking = missing(this_machine(ROOT), SPARE_GB if has_requirements else DISK_GB)
    if lacking:
        raise SetUpError("cannot set up here: " + "; ".join(lacking))
    finished: dict[str, str] = {}
    for number, step in enumerate(planned, 1):
        if done.get(step.name) != wanted[step.name]:
            start = time.monotonic()
            say(f"set-up {number}/{len(planned)}: {step.says}")
            step.run(environment)
            say(f"  {time.monotonic() - start:.1f} s")
        finished[step.name] = wanted[step.name]
        environment.mark_done(finished)


def wait_for_turn(guard: TextIO) -> None:
    """One set-up at a time: a second one waits and then finds everything done."""
    try:
        import fcntl
    except ImportError:  # not Linux: the check says so
        return
    fcntl.flock(guard, fcntl.LOCK_EX)


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up everything in one virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--product", action="store_true", help="what serves alone, not tied to this checkout")
    options = parser.parse_args()
    try:
        with Path(__file__).open() as guard:
            wait_for_turn(guard)
            set_up(Environment(options.venv.absolute(), options.product))
    except SetUpError as error:
        say(f"neuronserve: {error}")
        return 1
    except KeyboardInterrupt:
        say("neuronserve: set-up interrupted; `make install` goes on from there")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
