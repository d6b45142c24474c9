"""Every change made to vLLM's own classes (and one to torch), as data: what, why, and when it can go.

`install_early` runs before vLLM's modules are loaded, `install` once they can be imported; both may run again. Each
replaced function keeps the original as `__wrapped__`, and the tests call that original: a change whose original no
longer misbehaves fails its test and is to be removed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from neuronserve.speculative.settings import BY_A_DRAFT

from . import draining, engine_end, first_line, legacy_args, startup_errors


@dataclass(frozen=True)
class Change:
    target: str
    reason: str
    until: str
    apply: Callable[[], None]


ENGINE_ARGS = "vllm.engine.arg_utils"


def _mark(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(replacement, original)
    replacement._neuronserve = True  # type: ignore[attr-defined]
    return replacement


def _is_ours(function: object) -> bool:
    return getattr(function, "_neuronserve", False)


# -- the classic keywords and flags


def change_engine_arguments() -> None:
    """General plugins load inside `EngineArgs.__post_init__`, too late for a keyword it does not know."""
    module = sys.modules.get(ENGINE_ARGS)
    if module is None:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    elif hasattr(module, "AsyncEngineArgs"):
        _change_both(module)
    elif not _is_ours(module.__dict__["dataclass"]):
        _change_while_loading(module)


def _change_both(module: ModuleType) -> None:
    for name in ("EngineArgs", "AsyncEngineArgs"):
        _change_class(getattr(module, name))


def _change_class(cls: Any) -> Any:
    original = cls.__init__
    if _is_ours(original):
        return cls

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:  # noqa: N807
        original(self, *args, **legacy_args.translate(keywords, os.environ))

    cls.__init__ = _mark(__init__, original)
    if cls.__name__ == "EngineArgs":
        # `pre_register_and_update` reaches the servers' parsers alone; `bench latency` and `bench startup` come here.
        add_stock_flags = cls.add_cli_args

        def add_cli_args(parser: Any, *args: Any, **keywords: Any) -> Any:
            parser = add_stock_flags(parser, *args, **keywords)
            legacy_args.add_flags(parser)
            return parser

        cls.add_cli_args = staticmethod(_mark(add_cli_args, add_stock_flags))
    return cls


def _change_while_loading(module: ModuleType) -> None:
    """The module's own import is what asked for the platform: its classes come into being after this."""
    original = module.__dict__["dataclass"]

    def dataclass_(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda made: dataclass_(made, **options)
        made = original(cls, **options)
        return _change_class(made) if made.__name__ in ("EngineArgs", "AsyncEngineArgs") else made

    module.__dict__["dataclass"] = _mark(dataclass_, original)


class _Finder(importlib.abc.MetaPathFinder):
    """Steps in once, for one module: lets the others find it, and changes its classes when it has loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ENGINE_ARGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _change_both(module)


# -- tensor parallelism


def change_head_check() -> None:
    from vllm.config import ModelConfig

    original = ModelConfig.verify_with_parallel_config
    if _is_ours(original):
        return

    def verify_with_parallel_config(self: Any, parallel_config: Any) -> Any:
        one_core = copy.copy(parallel_config)
        one_core.tensor_parallel_size = 1
        return original(self, one_core)

    ModelConfig.verify_with_parallel_config = _mark(verify_with_parallel_config, original)  # type: ignore[method-assign]


# -- drafts


def change_draft_config() -> None:
    from vllm.config import SpeculativeConfig

    original = SpeculativeConfig.__post_init__
    if _is_ours(original):
        return

    def __post_init__(self: Any) -> None:  # noqa: N807
        if self.method not in BY_A_DRAFT or self.model is None:
            original(self)  # type: ignore[no-untyped-call]
            return
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = copy.copy(self.target_model_config)  # read for its name, and for its heads
        self.draft_model_config.model = self.model
        self.draft_parallel_config = self.target_parallel_config

    SpeculativeConfig.__post_init__ = _mark(__post_init__, original)  # type: ignore[method-assign]


# -- exit


def change_cache_release() -> None:
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        original = getattr(torch.accelerator, name)
        if not _is_ours(original):
            setattr(torch.accelerator, name, _mark(lambda: None, original))


# -- start-up errors


def change_engine_process() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.run_engine_core
    if not _is_ours(original):
        functools.update_wrapper(run_engine_core, original, assigned=())
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **keywords: Any) -> None:
    """vLLM's engine process; a new interpreter finds this function by name, so it is the module's own."""
    from vllm.v1.engine.core import EngineCoreProc

    with startup_errors.engine_errors_in_one_line():
        inspect.unwrap(EngineCoreProc.run_engine_core)(*args, **keywords)


run_engine_core._neuronserve = True  # type: ignore[attr-defined]


def change_server_socket() -> None:
    from vllm.entrypoints.launchers import launcher

    original = launcher.create_server_socket
    if _is_ours(original):
        return

    def create_server_socket(addr: tuple[str, int], **keywords: Any) -> Any:
        try:
            return original(addr, **keywords)
        except OSError as error:
            host, port = addr[0] or "0.0.0.0", addr[1]
            raise OSError(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose another --port"
            ) from None

    launcher.create_server_socket = _mark(create_server_socket, original)


def change_first_line() -> None:
    launched = [
        importlib.import_module(f"vllm.entrypoints.{name}") for name in ("launchers.api_server.entry", "cli.serve")
    ]
    for module in launched:
        if not _is_ours(module.setup_server):
            module.setup_server = _mark(_after_the_device(module.setup_server), module.setup_server)  # type: ignore[attr-defined]


def _after_the_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def setup_server(args: Any, **keywords: Any) -> Any:
        first_line.foretell(args.additional_config, os.environ)
        return original(args, **keywords)

    return setup_server


# -- routes


def change_routes() -> None:
    launched: Any = importlib.import_module("vllm.entrypoints.launchers.app")
    original = launched.register_api_routers
    if _is_ours(original):
        return

    def register_api_routers(args: Any, app: Any, *rest: Any, **keywords: Any) -> None:
        from neuronserve.server import refused_routes

        original(args, app, *rest, **keywords)
        refused_routes.add_to(app)

    launched.register_api_routers = _mark(register_api_routers, original)


# -- the API process's environment


def change_environment_lookups() -> None:
    serving: Any = importlib.import_module("vllm.entrypoints.launchers.utils.server_utils")
    original = serving.freeze_gc_heap
    if _is_ours(original):
        return

    def freeze_gc_heap() -> None:
        from vllm.envs import enable_envs_cache

        enable_envs_cache()
        original()

    serving.freeze_gc_heap = _mark(freeze_gc_heap, original)


# -- prompts in parts


def change_streamed_inputs() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM._add_streaming_input_request
    if _is_ours(original):
        return

    async def _add_streaming_input_request(self: Any, *args: Any, **keywords: Any) -> Any:
        from . import refusals
        from .config import NeuronConfig

        try:
            refusals.check_session(NeuronConfig.of(self.vllm_config))
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        return await original(self, *args, **keywords)

    AsyncLLM._add_streaming_input_request = _mark(_add_streaming_input_request, original)  # type: ignore[method-assign]


# -- the error of a failed step


STEP_FAILED = (
    "the device failed while it computed this request, which ended here; the server recovers by itself: send it again"
)


def change_generation_error() -> None:
    from vllm.exceptions import GenerationError

    original = GenerationError.__init__
    if _is_ours(original):
        return
    says_nothing = inspect.signature(original).parameters["message"].default

    def __init__(self: Any, message: str = says_nothing) -> None:  # noqa: N807
        original(self, STEP_FAILED if message == says_nothing else message)

    GenerationError.__init__ = _mark(__init__, original)  # type: ignore[method-assign]


# -- the engine's end


def change_engine_dead_error() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    original = EngineDeadError.__init__
    if _is_ours(original):
        return

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:  # noqa: N807
        original(self, *args, **keywords)
        self.args = (engine_end.CLIENTS_ARE_TOLD, *args)

    EngineDeadError.__init__ = _mark(__init__, original)  # type: ignore[method-assign]


HANDLERS = "vllm.entrypoints.serve.exception_handling.handlers.vllm_error"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"


def change_end_of_server() -> None:
    from vllm import envs
    from vllm.entrypoints.launchers import launcher

    original = launcher.terminate_if_errored
    if not _is_ours(original):

        def terminate_if_errored(server: Any, engine: Any) -> None:
            engine_end.end_server_later(server, engine, envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH)

        launcher.terminate_if_errored = _mark(terminate_if_errored, original)
    if (handlers := sys.modules.get(HANDLERS)) is not None:  # it has the function by name
        handlers.__dict__["terminate_if_errored"] = launcher.terminate_if_errored
    # Only a server has loaded it; the engine's process need not.
    if (entry := sys.modules.get(ENTRY)) is not None and not _is_ours(entry.__dict__["build_and_serve"]):
        build_and_serve = entry.__dict__["build_and_serve"]
        entry.__dict__["build_and_serve"] = _mark(functools.partial(engine_end.serve, build_and_serve), build_and_serve)


# -- stopping


def change_shutdown() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM.shutdown
    if _is_ours(original):
        return

    def shutdown(self: Any, timeout: float | None = None) -> None:
        if timeout is not None:
            timeout = draining.drain(self, timeout)
            draining.expect_the_end(self)
        original(self, timeout)

    AsyncLLM.shutdown = _mark(shutdown, original)  # type: ignore[method-assign]


def change_patience() -> None:
    """Of a server of several API processes: each of them drains, and then the engine ends."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.utils import APIServerProcessManager

    for manager, patience in (
        (APIServerProcessManager, draining.patience_with_servers),
        (CoreEngineProcManager, draining.patience_with_the_engine),
    ):
        if not _is_ours(manager.shutdown):
            _change_patience(manager, patience)


def _change_patience(manager: Any, patience: Callable[[float], float]) -> None:
    original = manager.shutdown

    def shutdown(self: Any, timeout: float | None = None) -> None:
        original(self, None if timeout is None else patience(timeout))

    manager.shutdown = _mark(shutdown, original)


EARLY = (
    Change(
        target="vllm.engine.arg_utils.EngineArgs and AsyncEngineArgs: __init__, add_cli_args",
        reason="LLM(device='neuron', override_neuron_config=…) is a TypeError there, the same flags an argparse error",
        until="vLLM lets a platform plugin add engine arguments",
        apply=change_engine_arguments,
    ),
)

CHANGES = (
    Change(
        target="vllm.config.ModelConfig.verify_with_parallel_config",
        reason="it refuses heads that do not divide by tensor_parallel_size; Neuron pads heads and replicates KV heads",
        until="vLLM leaves the check to the platform",
        apply=change_head_check,
    ),
    Change(
        target="vllm.config.SpeculativeConfig.__post_init__",
        reason="it takes a draft for what its path sounds like (a Llama under eagle- for EAGLE, an is_eagle directory "
        "for a draft model), and refuses heads that its own model classes do not know; we read the draft's config.json",
        until="vLLM believes the method it is given, and leaves the draft's configuration to the platform",
        apply=change_draft_config,
    ),
    Change(
        target="torch.accelerator.empty_cache and empty_host_cache",
        reason="vLLM calls them at exit on every platform but its own CPU one; without an accelerator they raise",
        until="vLLM asks the platform, or torch makes them no-ops without an accelerator",
        apply=change_cache_release,
    ),
    Change(
        target="vllm.v1.engine.core.EngineCoreProc.run_engine_core",
        reason="an engine that cannot start prints its traceback twice; people need the one line that says why",
        until="vLLM reports start-up errors without a traceback",
        apply=change_engine_process,
    ),
    Change(
        target="vllm.entrypoints.launchers.launcher.create_server_socket",
        reason="the error of a busy port does not name the port",
        until="vLLM's message names the address",
        apply=change_server_socket,
    ),
    Change(
        target="vllm.entrypoints.launchers.launcher.setup_server, where it was imported to",
        reason="its banner comes before anything is known of the device, and the first line should name that",
        until="vLLM asks the platform for its first line",
        apply=change_first_line,
    ),
    Change(
        target="vllm.entrypoints.launchers.app.register_api_routers",
        reason="/v1/embeddings and others that need another kind of model are a bare 404, which does not say why",
        until="vLLM names the task that a route needs",
        apply=change_routes,
    ),
    Change(
        target="vllm.entrypoints.launchers.utils.server_utils.freeze_gc_heap",
        reason="the API process looks variables up in the environment with every token, which is 4 % of its time; the "
        "engine's looks once, when it is set up",
        until="vLLM calls enable_envs_cache in the API process too",
        apply=change_environment_lookups,
    ),
    Change(
        target="vllm.v1.engine.async_llm.AsyncLLM._add_streaming_input_request",
        reason="it takes a prompt in parts on every device; where each live row must be in every decode, one that "
        "waits for its next part is lost, and the step in which it goes on fails and ends its neighbours",
        until="vLLM tells Platform.validate_request that a request is resumable",
        apply=change_streamed_inputs,
    ),
    Change(
        target="vllm.exceptions.GenerationError.__init__",
        reason="'Internal server error' is all a client learns of its failed request: neither why, nor what to do",
        until="an output can carry the message of its error",
        apply=change_generation_error,
    ),
    Change(
        target="vllm.v1.engine.exceptions.EngineDeadError.__init__",
        reason="'EngineCore encountered an issue. See stack trace (above)' is no help to a client, who has no trace",
        until="vLLM's message is for clients",
        apply=change_engine_dead_error,
    ),
    Change(
        target="vllm.entrypoints.launchers: launcher.terminate_if_errored, api_server.entry.build_and_serve",
        reason="a server whose engine died closes its port at once and exits with 0: no probe sees a 503, no restart",
        until="vLLM stays for a probe and exits with another status",
        apply=change_end_of_server,
    ),
    Change(
        target="vllm.v1.engine.async_llm.AsyncLLM.shutdown",
        reason="a drained engine exits at once: a server that lags behind it loses the ends of its streams, those at "
        "the limit end in an error, and every stop logs the traceback of a dead engine",
        until="vLLM waits for the answers, ends what it cuts as aborted, and knows its own stop from an engine's death",
        apply=change_shutdown,
    ),
    Change(
        target="vllm.v1.utils.APIServerProcessManager.shutdown, vllm.v1.engine.utils.CoreEngineProcManager.shutdown",
        reason="with several API processes the limit of the drain is also when they are killed, before they have ended "
        "the requests they cut, and their engine has no time left and is killed too",
        until="vLLM gives its processes time to end beyond the limit of the requests",
        apply=change_patience,
    ),
)


def install_early() -> None:
    for change in EARLY:
        change.apply()


def install() -> None:
    for change in (*EARLY, *CHANGES):
        change.apply()
