"""Sessions: requests whose prompt comes in parts, as vLLM's `AsyncLLM.generate` takes them from a generator."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from neuronserve.neuron_worker import vllm_changes
from neuronserve.neuron_worker.config import RESOLVED_KEY, ServeRequest
from neuronserve.neuron_worker.resolve import resolve

from .engine import Engine, expected, greedy


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    vllm_changes.install()


def add_part(engine: Engine, name: str, prompt: list[int]) -> None:
    """As `AsyncLLM` adds each part of a session, all under one id."""
    core: Any = engine.core
    asked = {"prompt": {"prompt_token_ids": prompt}, "params": greedy(4, output_kind=RequestOutputKind.DELTA)}
    request = core.input_processor.process_inputs(name, **asked, supported_tasks=("generate",), resumable=True)
    request.external_req_id = name
    core.output_processor.add_request(request, None, None, 0)
    core.engine_core.add_request(request)


def serve_a_session_beside_a_request(engine: Engine) -> None:
    engine.add("neighbour", [5, 6], greedy(20))
    add_part(engine, "session", [3, 4])
    engine.step(8)
    add_part(engine, "session", [7, 8])
    engine.step(30)
    engine.core.abort_request(["session"], internal=True)


def test_where_rows_may_be_left_out_a_session_is_served(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    serve_a_session_beside_a_request(engine)

    assert engine.tokens["neighbour"] == expected([5, 6], 20)
    assert engine.worker.neuronserve_metrics()["failed_steps"] == 0


def test_where_they_may_not_it_ends_its_neighbours(make_engine: Callable[..., Engine]) -> None:
    """Why it is refused; once this fails, the refusal can go."""
    engine = make_engine(options={"backend": "arithmetic-slots"})
    serve_a_session_beside_a_request(engine)

    assert engine.reasons["neighbour"] == "error"


# -- the door


async def parts() -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput(prompt={"prompt_token_ids": [3, 4]})


def take(add: Callable[..., Any], model: str, backend: str) -> str:
    """The session that vLLM's front end takes, of a server on this backend."""
    config = resolve(ServeRequest(model, max_model_len=128, max_num_seqs=4, options={"backend": backend}), {}).config

    async def tasks() -> tuple[str, ...]:
        return ("generate",)

    requests = SimpleNamespace(
        process_inputs=lambda **asked: SimpleNamespace(request_id=asked["request_id"]),
        assign_request_id=lambda request: None,
    )
    front = SimpleNamespace(
        errored=False,
        vllm_config=SimpleNamespace(
            additional_config={"neuronserve": {RESOLVED_KEY: config.to_json()}},
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        ),
        get_supported_tasks=tasks,
        input_processor=requests,
        _validate_streaming_input_sampling_params=lambda params: None,
        _run_output_handler=lambda: None,
    )
    front._add_streaming_input_request = MethodType(add, front)

    async def taken() -> str:
        queue: Any = await AsyncLLM.add_request(front, "session", parts(), greedy(4))  # type: ignore[arg-type]
        reading, queue._input_stream_task = queue._input_stream_task, None
        reading.cancel()
        return str(queue.request_id)

    return asyncio.run(taken())


@pytest.mark.parametrize("backend", ["arithmetic-slots", "transformers-neuronx"])
def test_it_is_refused_before_its_first_part(tiny: str, backend: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"the {backend} device .* send each turn as a request of its own"):
        take(AsyncLLM._add_streaming_input_request, tiny, backend)


@pytest.mark.parametrize("backend", ["arithmetic", "torch-neuronx"])
def test_elsewhere_it_is_taken(tiny: str, backend: str) -> None:
    assert take(AsyncLLM._add_streaming_input_request, tiny, backend) == "session"


def test_vllm_still_takes_it_everywhere(tiny: str) -> None:
    original = inspect.unwrap(AsyncLLM._add_streaming_input_request)

    assert take(original, tiny, "arithmetic-slots") == "session"
