"""`make lock`: the exact version of every distribution the product needs, read from the environment it was tested in.

In: pyproject.toml's requirements and the distributions installed beside the running interpreter. Out: requirements.lock
in sections (build, serve, s3, test, gpu), for every supported Python and architecture at once: each environment's
closure is walked with its own markers, and a line that not all of them need carries a marker. torch and vLLM
themselves are left out: `scripts/set_up.py` installs them in its own way, at pyproject.toml's versions.

    python scripts/lock.py [--check]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
ENVIRONMENTS = tuple(itertools.product(PYTHONS, MACHINES))
APART = ("torch", "vllm")
BUILD = ("cmake", "jinja2", "ninja", "packaging", "pip", "setuptools<81", "setuptools-rust", "setuptools-scm", "wheel")
"""vLLM's build requirements but for torch, and pip itself."""

GPU = ("triton",)
"""What xgrammar asks for on x86_64 and uses on GPUs alone: 0.3 GB to download, 1 GB on disk, loaded at every start."""

HEADER = """\
# Exact versions for a reproducible install; made by `make lock`, not by hand.
# torch and vLLM are not here: `make install` takes torch's CPU build and builds vLLM from source.
# The section `gpu` is not installed; only pip's resolver asks for it.
"""

Environment = tuple[str, str]
Needs = dict[str, set[Environment]]


def environment_markers(environment: Environment) -> dict[str, str]:
    python, machine = environment
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def requirements_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []


def closure(roots: Iterable[str], environment: Environment) -> set[str]:
    """Names of everything the roots need in one environment."""
    markers = environment_markers(environment)
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *sorted(wanted.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            waiting += [
                needed
                for needed in requirements_of(name)
                if needed.marker is None or needed.marker.evaluate(markers | {"extra": extra})
            ]
    return {name for name, _ in seen}


def needs(roots: Iterable[str]) -> Needs:
    """Name -> the environments that need it."""
    roots = list(roots)
    found: Needs = {}
    for environment in ENVIRONMENTS:
        for name in closure(roots, environment):
            found.setdefault(name, set()).add(environment)
    return {name: where for name, where in found.items() if name not in APART}


def marker(where: set[Environment]) -> str:
    """A marker true in exactly these environments, none if in all of them."""
    pythons = sorted({python for python, _ in where})
    machines = sorted({machine for _, machine in where})
    if where != set(itertools.product(pythons, machines)):
        raise SystemExit(f"no simple marker for {sorted(where)}")
    terms = []
    if set(pythons) != set(PYTHONS):
        terms.append(" or ".join(f'python_version == "{python}"' for python in pythons))
    if set(machines) != set(MACHINES):
        terms.append(" or ".join(f'platform_machine == "{machine}"' for machine in machines))
    return " and ".join(f"({term})" if " or " in term and len(terms) > 1 else term for term in terms)


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return locked_version(name) or newest_version(name)


def locked_version(name: str) -> str | None:
    text = LOCK.read_text() if LOCK.exists() else ""
    found = re.search(rf"^{re.escape(name)}==(\S+)", text, re.MULTILINE)
    return found and found[1]


def newest_version(name: str) -> str:
    """What pip would take; for the few that another Python or architecture needs and this one does not."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", name]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return str(report["install"][0]["metadata"]["version"])


def without(wanted: Needs, *others: Needs) -> Needs:
    """What the others leave out, where they do."""
    left = {name: where.difference(*(other.get(name, ()) for other in others)) for name, where in wanted.items()}
    return {name: where for name, where in left.items() if where}


def section(title: str, wanted: Needs) -> list[str]:
    lines = ["", f"# --- {title}"]
    for name in sorted(wanted):
        condition = marker(wanted[name])
        lines.append(f"{name}=={version_of(name)}" + (f" ; {condition}" if condition else ""))
    return lines


def lock() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    build = needs(BUILD)
    serve = needs([*project["dependencies"], *extras["serve"]])
    s3 = needs(extras["s3"])
    test = needs(extras["test"])
    gpu = {name: serve[name] for name in GPU}
    lines = section("build", build)
    # Complete in itself, for `make wheelhouse`: some build tools are needed at run time too and stand in both.
    lines += section("serve", without(serve, gpu))
    lines += section("s3", without(s3, serve))
    lines += section("test", without(test, serve, s3))
    lines += section("gpu", gpu)
    return HEADER + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date")
    options = parser.parse_args()
    text = lock()
    if options.check:
        if LOCK.exists() and LOCK.read_text() == text:
            return 0
        print(f"{LOCK.name} does not describe this environment; run `make lock`", file=sys.stderr)
        return 1
    LOCK.write_text(text)
    print(f"{LOCK.name}: {sum('==' in line for line in text.splitlines())} distributions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
