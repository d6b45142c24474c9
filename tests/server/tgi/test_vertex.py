"""Several requests in one envelope, out of an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from neuronserve.server.tgi.admission import Admission
from neuronserve.server.tgi.errors import GenerationError, TgiError, ValidationError
from neuronserve.server.tgi.metrics import Recorder
from neuronserve.server.tgi.schemas import ChatRequest, GenerateParameters, VertexRequest
from neuronserve.server.tgi.vertex import _meant, predict

TWO = VertexRequest.model_validate({"instances": [{"inputs": "a"}, {"inputs": "b"}]})


class Service(SimpleNamespace):
    """Refuses `a` with the error given, and never ends with anything else."""

    def __init__(self, error: Exception | None) -> None:
        self.registry = CollectorRegistry()
        recorder = Recorder(8, 16, self.registry)
        super().__init__(error=error, waiting=asyncio.Event(), admission=Admission(4), recorder=recorder)

    async def prepare(self, inputs: str, *_: Any, **__: Any) -> Any:
        if inputs == "a" and self.error is not None:
            await self.waiting.wait()
            raise self.error
        self.waiting.set()
        await asyncio.Event().wait()

    def failures(self) -> dict[str, float]:
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        return {one.labels["err"]: one.value for one in samples if one.name == "tgi_request_failure_total"}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ValidationError("no"), 422, "validation"), (GenerationError("no"), 424, "generation")],
)
def test_the_one_that_fails_is_counted_and_nobody_else(error: TgiError, status: int, kind: str) -> None:
    async def run() -> tuple[TgiError, Service]:
        service: Any = Service(error)
        with pytest.raises(TgiError) as refused:
            await predict(service, TWO, None)
        return refused.value, service

    raised, service = asyncio.run(run())
    assert raised.status == status
    assert service.failures() == {kind: 1}


def test_a_mistake_of_ours_is_shown_as_it_is() -> None:
    async def run() -> None:
        service: Any = Service(KeyError("mistake"))
        await predict(service, TWO, None)

    with pytest.raises(KeyError, match="mistake"):
        asyncio.run(run())


def test_a_client_that_leaves_drops_them_all() -> None:
    async def run() -> dict[str, float]:
        service: Any = Service(None)
        work = asyncio.create_task(predict(service, TWO, None))
        await service.waiting.wait()
        work.cancel()
        await asyncio.wait({work})
        return dict(service.failures())

    assert asyncio.run(run()) == {"dropped": 2}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_a_chat_s_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def text(*_: Any) -> str:
        return "text"

    monkeypatch.setattr("neuronserve.server.tgi.vertex.templated", text)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], name: 3})
    service: Any = None
    assert asyncio.run(_meant(service, chat)) == ("text", GenerateParameters(do_sample=True, max_new_tokens=3))
