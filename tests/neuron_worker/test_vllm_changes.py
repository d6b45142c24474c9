"""Every change made to vLLM, and for each whether it is still needed: the original must still misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm import AsyncEngineArgs, EngineArgs, envs
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.entrypoints.cli import serve as cli_serve
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.launchers import app as launchers_app
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.utils import server_utils
from vllm.envs import disable_envs_cache
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.utils import APIServerProcessManager

from neuronserve.neuron_worker import draining, engine_end, first_line, vllm_changes
from neuronserve.neuron_worker.vllm_changes import CHANGES, EARLY

from .tiny_model import SMOLLM2_HEADS, tiny_model

TWO_CORES = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="uni")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    vllm_changes.install()


def test_each_change_says_why_and_until_when() -> None:
    assert all(change.target and change.reason and change.until for change in (*EARLY, *CHANGES))


def test_installing_again_changes_nothing_more() -> None:
    replaced = (EngineArgs.__init__, ModelConfig.verify_with_parallel_config, launcher.create_server_socket)

    vllm_changes.install()

    assert (EngineArgs.__init__, ModelConfig.verify_with_parallel_config, launcher.create_server_socket) == replaced


# -- engine arguments


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize("keyword", ["device", "override_neuron_config", "speculative_model", "use_v2_block_manager"])
def test_vllm_does_not_know_the_classic_keywords(cls: Any, keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        inspect.unwrap(cls.__init__)(object.__new__(cls), **{keyword: "x"})


@pytest.mark.parametrize(
    "imports",
    [
        "from vllm import LLM",  # vllm.engine.arg_utils asks for the platform while it is half loaded
        "from vllm.platforms import current_platform; current_platform.device_type",  # before arg_utils is loaded
    ],
)
def test_whatever_is_imported_first(imports: str, tiny: str) -> None:
    code = (
        f"{imports}\nimport sys\nfrom vllm import AsyncEngineArgs, EngineArgs\n"
        "for cls in (EngineArgs, AsyncEngineArgs):\n"
        "    args = cls(model=sys.argv[1], device='neuron', override_neuron_config={'fuse_qkv': True})\n"
        "    assert args.additional_config['override_neuron_config'] == {'fuse_qkv': True}, args.additional_config\n"
    )

    done = subprocess.run([sys.executable, "-c", code, tiny], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


# -- head counts


@pytest.fixture(scope="module")
def smollm2_heads(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(model=tiny_model(tmp_path_factory.mktemp("smollm2"), **SMOLLM2_HEADS))


def test_heads_need_not_divide_by_the_cores(smollm2_heads: ModelConfig) -> None:
    smollm2_heads.verify_with_parallel_config(TWO_CORES)


def test_vllm_still_refuses_heads_that_do_not_divide(smollm2_heads: ModelConfig) -> None:
    original = inspect.unwrap(ModelConfig.verify_with_parallel_config)

    with pytest.raises(ValueError, match="must be divisible by tensor parallel size"):
        original(smollm2_heads, TWO_CORES)


# -- drafts


def speculative_config(target: str, method: str, draft: str) -> SpeculativeConfig:
    values: dict[str, Any] = {
        "target_model_config": ModelConfig(model=target),
        "target_parallel_config": ParallelConfig(),
    }
    return SpeculativeConfig(method=method, model=draft, num_speculative_tokens=2, **values)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_draft_has_the_method_it_is_given(tiny: str, tmp_path: Path, method: str) -> None:
    draft = tiny_model(tmp_path / "eagle-7b", num_hidden_layers=1)
    assert speculative_config(tiny, method, draft).method == method


def test_vllm_still_goes_by_the_path(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeConfig, "__post_init__", inspect.unwrap(SpeculativeConfig.__post_init__))
    assert speculative_config(tiny, "draft_model", tiny_model(tmp_path / "eagle-7b")).method == "eagle"


# -- exit


@pytest.mark.parametrize("name", ["empty_cache", "empty_host_cache"])
def test_caches_of_an_accelerator_that_is_not_there(name: str) -> None:
    getattr(torch.accelerator, name)()

    with pytest.raises(RuntimeError):
        inspect.unwrap(getattr(torch.accelerator, name))()


# -- start-up errors


def test_the_engine_process_starts_through_us() -> None:
    assert EngineCoreProc.run_engine_core is vllm_changes.run_engine_core
    assert "failed to start" in inspect.getsource(inspect.unwrap(EngineCoreProc.run_engine_core))


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]

        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port} .* choose another --port"):
            launcher.create_server_socket(("127.0.0.1", port), reuse_port=False)


def test_vllms_own_message_does_not_name_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]

        with pytest.raises(OSError) as error:  # noqa: PT011
            inspect.unwrap(launcher.create_server_socket)(("127.0.0.1", port), reuse_port=False)

        assert str(port) not in str(error.value)


# -- the first line


def said_first(setup_server: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    class Stop(Exception):
        pass

    def banner(*_: Any) -> None:
        said.append("banner")
        raise Stop

    monkeypatch.setattr(launcher, "log_version_and_model", banner)
    monkeypatch.setattr(first_line, "_foretold", set())
    monkeypatch.setattr(first_line.logger, "info", lambda _, line: said.append(line))
    options = {"neuronserve": {"backend": "arithmetic"}}
    with pytest.raises(Stop):
        setup_server(Namespace(model="m", additional_config=options), reuse_port=False)
    return said


@pytest.mark.parametrize("module", [entry, cli_serve])
def test_the_device_is_named_before_the_banner(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, banner = said_first(module.setup_server, monkeypatch)
    assert (device.partition(" (")[0], banner) == ("device: arithmetic", "banner")


def test_what_was_foretold_is_not_said_again_but_for_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(first_line, "_foretold", set())
    monkeypatch.setattr(first_line.logger, "info", lambda _, line: said.append(line))
    first_line.foretell({"neuronserve": {"backend": "arithmetic"}}, {})
    [line] = said
    first_line.say(line)
    assert said == [line]
    first_line.say(line)
    assert said == [line, line]


def test_vllm_begins_with_its_banner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_first(inspect.unwrap(entry.setup_server), monkeypatch) == ["banner"]


def test_options_that_are_not_well_formed_are_left_to_their_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_line, "say", pytest.fail)
    first_line.foretell({"neuronserve": {"backend": "no-such"}}, {})
    first_line.foretell("no object", {})


# -- routes


def embeddings(register: Any) -> Any:
    """What an application with these routes answers to a request for embeddings."""
    app = FastAPI()
    app.state.args = Namespace(disable_log_stats=True)
    register(Namespace(), app, ("generate",))
    return TestClient(app).post("/v1/embeddings", json={"model": "m", "input": "a text"})


def test_embeddings_are_refused_by_name() -> None:
    answer = embeddings(launchers_app.register_api_routers)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "/v1/embeddings needs an embedding model, which is not supported; this server generates text: use "
        "/v1/chat/completions or /v1/completions"
    )


def test_vllms_own_answer_does_not_say_why() -> None:
    answer = embeddings(inspect.unwrap(launchers_app.register_api_routers))

    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


# -- the API process's environment


@pytest.fixture
def lookups_start_anew() -> Iterator[None]:
    disable_envs_cache()
    yield
    disable_envs_cache()


@pytest.mark.usefixtures("lookups_start_anew")
def test_a_server_that_has_started_looks_variables_up_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    server_utils.freeze_gc_heap()

    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "77")
    assert envs.VLLM_LOG_STATS_INTERVAL != 77


@pytest.mark.usefixtures("lookups_start_anew")
def test_vllms_own_goes_on_looking_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    inspect.unwrap(server_utils.freeze_gc_heap)()

    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "77")
    assert envs.VLLM_LOG_STATS_INTERVAL == 77


# -- the error of a failed step


def test_a_failed_step_says_what_happened_and_what_to_do() -> None:
    with pytest.raises(GenerationError, match=r"the device failed .* send it again"):
        GenerateBaseServing._raise_if_error(None, "error", "cmpl-1")  # type: ignore[arg-type]
    assert str(GenerationError("another reason")) == "another reason"
    assert "retry" in str(RetryableRequestError())


def test_vllms_own_error_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationError, "__init__", inspect.unwrap(GenerationError.__init__))
    with pytest.raises(GenerationError, match=r"^Internal server error$"):
        GenerateBaseServing._raise_if_error(None, "error", "cmpl-1")  # type: ignore[arg-type]


# -- the engine's end


class Engine:
    """What the end of a server looks at."""

    errored, is_running = True, False

    def __init__(self, exit_code: int | None, *, said_so: bool = True) -> None:
        manager = SimpleNamespace(processes=[SimpleNamespace(exitcode=exit_code)])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=said_so, engine_manager=manager))


async def ending(terminate: Any, engine: Engine, grace: float) -> tuple[bool, bool]:
    """Whether the server is told to end: at once, and in the end."""
    server = SimpleNamespace(should_exit=False)
    terminate(server, engine)
    at_once = server.should_exit
    await asyncio.sleep(grace)
    return at_once, server.should_exit


@pytest.mark.parametrize(
    ("engine", "dies"),
    [
        (Engine(None), True),
        (Engine(1), True),
        (Engine(0), False),  # the terminal's Ctrl-C reached it too
        (Engine(1, said_so=False), False),  # this process is ending it
    ],
)
def test_a_server_stays_a_while_after_its_engine(engine: Engine, dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "GRACE_SECONDS", 0.05)
    assert asyncio.run(ending(launcher.terminate_if_errored, engine, 0.5)) == (False, dies)


def test_a_server_that_is_to_stay_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "GRACE_SECONDS", 0.05)
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    assert asyncio.run(ending(launcher.terminate_if_errored, Engine(1), 0.5)) == (False, False)


def test_vllms_own_server_ends_at_once() -> None:
    assert asyncio.run(ending(inspect.unwrap(launcher.terminate_if_errored), Engine(1), 0.0)) == (True, True)


def test_the_end_of_an_engine_is_an_exit_status() -> None:
    async def done() -> None: ...

    async def build_and_serve(engine: Engine) -> Any:
        launcher.terminate_if_errored(SimpleNamespace(), engine)
        return done()

    async def run(engine: Engine) -> None:
        await (await engine_end.serve(build_and_serve, engine))

    asyncio.run(run(Engine(0)))
    with pytest.raises(SystemExit, match="the engine's last CRITICAL line above says why"):
        asyncio.run(run(Engine(1)))
    assert entry.build_and_serve.func is engine_end.serve  # type: ignore[attr-defined]


def test_the_error_of_a_dead_engine_is_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "send the request again" in str(EngineDeadError())
    monkeypatch.setattr(EngineDeadError, "__init__", inspect.unwrap(EngineDeadError.__init__))
    assert "See stack trace" in str(EngineDeadError())


# -- draining


# -- stopping


class LaggingServer:
    """What `AsyncLLM.shutdown` touches: an engine with nothing left to do, and a request not yet answered."""

    errored = False

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={"a": object()})
        self.engine_core: Any = None
        self.cut: list[str] = []
        self.unanswered_when_the_engine_ends: list[str] = []

    def answer(self) -> None:
        self.output_processor.request_states.clear()

    async def abort(self, requests: list[str], internal: bool) -> None:
        assert internal
        self.cut += requests
        self.answer()

    async def end(self, shutdown: Any, timeout: float | None) -> list[str]:
        """The requests that lose the end of their answer."""

        def engine_ends(timeout: float | None = None) -> None:
            self.unanswered_when_the_engine_ends = list(self.output_processor.request_states)

        self.engine_core = SimpleNamespace(shutdown=engine_ends)
        self.output_handler = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.to_thread(shutdown, self, timeout)
        return self.unanswered_when_the_engine_ends


def test_the_engine_ends_after_the_answers() -> None:
    server = LaggingServer()
    answering = threading.Timer(0.2, server.answer)
    answering.start()

    assert asyncio.run(server.end(AsyncLLM.shutdown, timeout=60.0)) == []
    assert server.cut == []


@pytest.mark.parametrize("limit", [0.1, 0.0])
def test_at_the_limit_what_is_unanswered_ends_as_aborted(limit: float) -> None:
    server = LaggingServer()

    assert asyncio.run(server.end(AsyncLLM.shutdown, timeout=limit)) == []
    assert server.cut == ["a"]


@pytest.mark.parametrize("limit", [60.0, 0.0])
def test_vllms_own_shutdown_neither_waits_nor_aborts(limit: float) -> None:
    assert asyncio.run(LaggingServer().end(inspect.unwrap(AsyncLLM.shutdown), timeout=limit)) == ["a"]


@pytest.fixture
def vllm_says(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logging.getLogger(draining.ENGINE_LOGGER), "filters", [])
    return lambda: [record.getMessage() for record in caplog.records]


async def stop_one_where_one_dies(stopped: LaggingServer, dying: LaggingServer) -> None:
    async def handle() -> None:
        await asyncio.sleep(0)
        try:
            raise EngineDeadError
        except EngineDeadError:
            logging.getLogger(AsyncLLM.__module__).exception("AsyncLLM output_handler failed.")

    stopped.output_handler = asyncio.create_task(asyncio.sleep(3600))
    dying.output_handler = asyncio.create_task(handle())
    draining.expect_the_end(stopped)
    await dying.output_handler


def test_a_stopped_engine_is_no_dead_one(vllm_says: Callable[[], list[str]]) -> None:
    server = LaggingServer()

    asyncio.run(stop_one_where_one_dies(server, server))

    assert vllm_says() == []


def test_a_dead_engine_is_told_of(vllm_says: Callable[[], list[str]]) -> None:
    server = LaggingServer()
    server.errored = True  # before it was told to stop

    asyncio.run(stop_one_where_one_dies(server, server))

    assert vllm_says() == ["AsyncLLM output_handler failed."]


def test_another_engine_s_death_is_told_of(vllm_says: Callable[[], list[str]]) -> None:
    asyncio.run(stop_one_where_one_dies(LaggingServer(), LaggingServer()))

    assert vllm_says() == ["AsyncLLM output_handler failed."]


def test_vllm_makes_a_dead_engine_of_its_own_stop() -> None:
    assert "except asyncio.CancelledError:\n                outputs_queue.put_nowait(EngineDeadError())" in (
        inspect.getsource(AsyncMPClient._ensure_output_queue_task)
    )


# -- stopping several API processes


class Draining:
    """A process that ends with 0 half a second after it was told to, with what vLLM's managers ask of theirs."""

    name = "draining"

    def __init__(self) -> None:
        script = "trap 'sleep 0.5; exit 0' TERM; echo; while :; do sleep 0.01; done"
        self._process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has set its trap
        self._process.stdout.close()
        self.pid = self._process.pid
        self.terminate = self._process.terminate

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def ends_with(self) -> int:
        return self._process.wait()


MANAGERS = (APIServerProcessManager, CoreEngineProcManager)


def end_at_the_limit(shutdown: Callable[..., None]) -> int:
    process = Draining()
    facts = {"processes": [process], "_listeners": [], "manager_stopped": threading.Event()}
    made = SimpleNamespace(**facts, _finalizer=SimpleNamespace(detach=lambda: True), _request_shutdown_timeout=0)
    shutdown(made, timeout=0.0)
    return process.ends_with()


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_process_has_time_to_end_beyond_the_limit(manager: type[Any]) -> None:
    assert end_at_the_limit(manager.shutdown) == 0


@pytest.mark.parametrize("manager", MANAGERS)
def test_vllm_kills_it_at_the_limit(manager: type[Any]) -> None:
    assert end_at_the_limit(inspect.unwrap(manager.shutdown)) == -signal.SIGKILL
