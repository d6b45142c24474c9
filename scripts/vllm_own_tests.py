"""vLLM's own tests of its sampler and scheduler, unmodified, against our platform and our scheduler.

    python scripts/vllm_own_tests.py [--sdist vllm-0.32.0.tar.gz] [pytest arguments]

The tests come from vLLM's source distribution, fetched by pip once. They ask for models by hub name; a small local
directory answers to one of those names, so nothing is downloaded. What our platform refuses (connectors, speculation,
pipeline parallelism, ...) is skipped with the refusal as its reason; everything else must pass.

This file is also the pytest plugin that puts our scheduler in the place of vLLM's. The platform bends a
configuration to its plan of shapes, while these tests are about a scheduler under limits they set; so the limits are
put back before the scheduler is made.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.32.0"
SUITES = ("tests/v1/sample/test_sampler.py", "tests/v1/core/test_scheduler.py")
PATCHED = ("tests.v1.core.utils", "tests.v1.core.test_scheduler")
STAND_IN = "facebook/opt-125m"
LIMITS = {
    "scheduler_config": ("max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling", "max_num_seqs"),
    "cache_config": ("enable_prefix_caching", "block_size"),
}

# More tokens in a chunk than any of these tests schedules: the plan then sets no limit of its own.
ENVIRONMENT = {
    "NEURONSERVE_BACKEND": "arithmetic",
    "NEURONSERVE_CHUNK_TOKENS": "8192",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

NOT_RUN = {"test_encoder_cache_rejects_mismatched_embed_count": "uses a fixture of vLLM's conftest; multi-modal"}

FEWEST_PASSED = 110
"""Fewer passes than this mean that the skips have swallowed what was to be shown."""


# --- the plugin, inside pytest ------------------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    import vllm.platforms

    platform = vllm.platforms.current_platform
    if not type(platform).__module__.startswith("neuronserve"):
        raise SystemExit(f"vLLM chose {type(platform).__name__}; install neuronserve into this environment first")
    from neuronserve.neuron_worker.scheduler import NeuronScheduler

    for name in PATCHED:
        module = importlib.import_module(name)
        module.Scheduler = NeuronScheduler  # type: ignore[attr-defined]
        module.VllmConfig = _keeping_limits(module.VllmConfig)  # type: ignore[attr-defined]
        module.ModelConfig = _or_skip(module.ModelConfig, "Invalid repository ID")  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        if (reason := NOT_RUN.get(item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _keeping_limits(make: Callable[..., Any]) -> Callable[..., Any]:
    from neuronserve.neuron_worker.errors import ConfigError

    @functools.wraps(make, updated=())
    def made(**parts: Any) -> Any:
        import pytest

        kept = [
            (parts[part], name, getattr(parts[part], name)) for part in LIMITS if part in parts for name in LIMITS[part]
        ]
        try:
            config = make(**parts)
        except ConfigError as refusal:
            pytest.skip(str(refusal))
        for part, name, value in kept:
            setattr(part, name, value)
        return config

    return made


def _or_skip(make: Callable[..., Any], message: str) -> Callable[..., Any]:
    @functools.wraps(make, updated=())
    def made(*arguments: Any, **keywords: Any) -> Any:
        import pytest

        try:
            return make(*arguments, **keywords)
        except ValueError as error:
            if message in str(error):
                pytest.skip(f"needs the files of {keywords.get('model')}")
            raise

    return made


# --- the script ---------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sdist", type=Path, help="vLLM's source distribution, if pip is not to fetch it")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = unpack(options.sdist or fetch(place), place)
        write_stand_in(place / "hub")
        return run(source, place, more)


def fetch(place: Path) -> Path:
    build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
    subprocess.run([*pip, "--dest", str(place), f"vllm=={VERSION}"], check=True, env=os.environ | build)
    return next(place.glob("vllm-*.tar.gz"))


def unpack(sdist: Path, place: Path) -> Path:
    """The folder that holds vLLM's `tests`, and nothing else of it: the installed vLLM is the one under test."""
    with tarfile.open(sdist) as archive:
        tests = [member for member in archive if member.name.split("/")[1:2] == ["tests"]]
        archive.extractall(place, members=tests, filter="data")
    return next(path for path in place.iterdir() if (path / "tests").is_dir())


def write_stand_in(hub: Path) -> None:
    """A hub cache in which the tests' favourite model is a Llama of two layers without weights."""
    repository = hub / f"models--{STAND_IN.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50272,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 50256,
    }
    (snapshot / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "</s>": 2}
    unused = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, **unused}
    (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(kind))


def run(source: Path, place: Path, more: list[str]) -> int:
    path = os.pathsep.join([str(source), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"HF_HUB_CACHE": str(place / "hub"), "PYTHONPATH": path.rstrip(os.pathsep)}
    report = place / "report.xml"
    pytest = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
    command = [*pytest, "-q", "-rs", "--tb=short", f"--junitxml={report}", *SUITES, *more]
    status = subprocess.run(command, cwd=source, env=environment).returncode
    if status == 0 and not more and num_passed(report) < FEWEST_PASSED:
        print(f"only {num_passed(report)} tests passed, at least {FEWEST_PASSED} were expected", file=sys.stderr)
        return 1
    return status


def num_passed(report: Path) -> int:
    from xml.etree import ElementTree

    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]


if __name__ == "__main__":
    raise SystemExit(main())
