"""Set-up: what it asks of a machine, where torch may come from, and which steps run again."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import set_up
from set_up import Environment, Machine, SetUpError, Step

GOOD = Machine("Linux", "x86_64", (2, 36), (3, 11), has_venv=True, compiler="cc", free_gb=40, folder="/srv/checkout")


def test_a_debian_machine_lacks_nothing() -> None:
    assert set_up.missing(GOOD) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "Darwin"}, "Darwin found, Linux needed"),
        ({"machine": "riscv64"}, "riscv64 processor found, x86_64 or aarch64 needed"),
        ({"glibc": ()}, "no glibc found, glibc 2.28 or later needed"),
        ({"glibc": (2, 17)}, "glibc 2.17 found, glibc 2.28 or later needed"),
        ({"python": (3, 9)}, "Python 3.9 found, 3.11 to 3.13 needed (make PYTHON="),
        ({"python": (3, 14)}, "Python 3.14 found, 3.11 to 3.13 needed"),
        ({"has_venv": False}, "apt-get install python3-venv"),
        ({"compiler": None}, "no working C compiler found (apt-get install gcc libc6-dev"),
        ({"free_gb": 1.25}, "1.2 GB free in /srv/checkout, 5 GB needed"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(change: dict[str, object], message: str) -> None:
    (line,) = set_up.missing(GOOD._replace(**change))

    assert message in line
    assert "\n" not in line


def test_a_compiler_that_cannot_link_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cc", "gcc", "clang"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    assert set_up.working_compiler() is None


def test_an_old_python_can_read_the_script_that_refuses_it() -> None:
    ast.parse(Path(set_up.__file__).read_text(), feature_version=(3, 7))


# --- where torch comes from -------------------------------------------------------------------------------------


class Index:
    """Answers pip's dry run as an index with these packages behind torch would."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def pip(self, *arguments: str) -> str:
        assert "--dry-run" in arguments, "only looked at"
        return json.dumps({"install": [{"metadata": {"name": name}} for name in self.packages]})


def test_pytorchs_own_index_is_preferred_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "index_answers", lambda: True)

    assert set_up.torch_source(Index("torch", "sympy")) == ["--index-url", set_up.TORCH_INDEX]


def test_pips_index_serves_when_it_has_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "index_answers", lambda: False)

    assert set_up.torch_source(Index("torch", "sympy")) == []


def test_cuda_is_refused_before_it_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "index_answers", lambda: False)

    with pytest.raises(SetUpError, match=r"torch==\S+ only with CUDA \(cuda-bindings and 1 more.*PIP_FIND_LINKS"):
        set_up.torch_source(Index("torch", "nvidia-cublas", "cuda-bindings"))


def test_vllm_is_built_without_device_code_whatever_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "neuron")
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")

    built = {key: value for key, value in set_up.vllm_build_environment().items() if key.startswith("VLLM_")}

    assert built == {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.32.0"}


class Checked:
    """Answers `pip check` with these lines."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def run(self, *arguments: str, statuses: tuple[int, ...]) -> str:
        assert 1 in statuses, "a complaint is no failure of the command"
        return "\n".join(self.lines)


def test_only_what_is_left_out_on_purpose_may_be_missing() -> None:
    set_up.check_requirements(Checked("xgrammar 0.2.8 requires triton, which is not installed."))

    with pytest.raises(SetUpError, match=r"not complete: torch 2\.13\.0 requires sympy"):
        set_up.check_requirements(Checked("torch 2.13.0 requires sympy, which is not installed."))


def test_an_image_can_read_caches_at_s3_and_has_nothing_that_tests_alone_need(tmp_path: Path) -> None:
    wanted = set_up.locked(*set_up.requirement_sections(Environment(tmp_path, product=True)))
    names = {line.partition("==")[0] for line in wanted}

    assert {"s3fs", "aiobotocore", "botocore", "fsspec"} <= names
    assert not {"pytest", "mypy"} & names


# --- which steps run --------------------------------------------------------------------------------------------


class Recorder:
    """Three steps that write down that they ran; `inputs` is what they are made from."""

    def __init__(self, folder: Path) -> None:
        self.environment = Environment(folder)
        self.inputs = {"first": "1", "second": "1", "third": "1"}
        self.broken: str | None = None
        self.ran: list[str] = []
        self.environment.python.parent.mkdir(parents=True)
        self.environment.python.touch()

    def run(self, name: str) -> None:
        if name == self.broken:
            raise SetUpError(name)
        self.ran.append(name)

    def steps(self, environment: Environment) -> Iterable[Step]:
        return [Step(name, name, lambda _, name=name: self.run(name), [value]) for name, value in self.inputs.items()]

    def set_up(self) -> list[str]:
        self.ran = []
        set_up.set_up(self.environment)
        return self.ran


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(tmp_path / "venv")
    monkeypatch.setattr(set_up, "steps", recorder.steps)
    return recorder


def test_a_second_set_up_does_nothing(recorder: Recorder) -> None:
    assert recorder.set_up() == ["first", "second", "third"]
    assert recorder.set_up() == []


def test_a_changed_input_repeats_its_step_and_the_later_ones(recorder: Recorder) -> None:
    recorder.set_up()
    recorder.inputs["second"] = "2"

    assert recorder.set_up() == ["second", "third"]


def test_an_interrupted_set_up_goes_on_where_it_stopped(recorder: Recorder) -> None:
    recorder.broken = "second"
    with pytest.raises(SetUpError):
        recorder.set_up()
    recorder.broken = None

    assert recorder.set_up() == ["second", "third"]


def test_a_folder_that_set_up_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(SetUpError, match="was not made by this set-up"):
        set_up.make_environment(Environment(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_a_failing_command_is_one_line_with_its_log(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.python = Path(set_up.sys.executable)

    with pytest.raises(SetUpError, match=r"failed: ValueError: no such thing \(all of it: .*set-up\.log\)") as failure:
        environment.run("-c", "raise ValueError('no such thing')")
    assert "\n" not in str(failure.value)
    assert "Traceback" in environment.log.read_text()
