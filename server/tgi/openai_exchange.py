"""What is known of one request of vLLM's chat and completion routes: its prompts' characters and its answers' times.

The middleware opens an `Exchange`. The handlers find it where they render the prompts and where they ask the engine,
for vLLM carries nothing of ours from one place to the other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .generate import Clock
from .metrics import Timings

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput

Render = Callable[[Any], Awaitable[Any]]


@dataclass
class Asked:
    """One prompt given to the engine; with `n` it has several answers."""

    clock: Clock
    num_tokens: int = 0  # generated; counted at the end alone
    is_done: bool = False

    @property
    def timings(self) -> Timings:
        return self.clock.timings


@dataclass
class Exchange:
    started: float = field(default_factory=time.monotonic)
    characters: int | None = None  # None: a prompt came as token ids, or none has come yet
    asked: list[Asked] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        return bool(self.asked) and all(one.is_done for one in self.asked)


CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""Of the request that this task works for."""


def follow(state: State) -> None:
    """From now on, by the handlers in `state`."""
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    chat.render_chat_request = _noting(chat.render_chat_request)
    completion.render_completion_request = _noting(completion.render_completion_request)
    for serving in (chat, completion):
        serving.engine_client = Followed(serving.engine_client)


def _noting(render: Render) -> Render:
    async def render_and_note(request: Any) -> Any:
        rendered = await render(request)
        exchange = CURRENT.get()
        if exchange is not None:
            exchange.characters = _characters(prompts_of(rendered))
        return rendered

    return render_and_note


def prompts_of(rendered: Any) -> Sequence[Any]:
    """A completion's, or a chat's, which stand behind its conversation; a refusal of vLLM's has none."""
    found = rendered[-1] if isinstance(rendered, tuple) else rendered
    return found if isinstance(found, Sequence) else ()


def _characters(prompts: Sequence[Any]) -> int | None:
    texts = [prompt.get("prompt") for prompt in prompts]
    return sum(map(len, texts)) if all(isinstance(text, str) for text in texts) else None


class Followed:
    """The engine as the handlers know it, the times of whose answers are noted."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *arguments: Any, **more: Any) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.generate(*arguments, **more)
        exchange = CURRENT.get()
        return outputs if exchange is None else _timed(outputs, exchange)


def _timed(outputs: AsyncGenerator[RequestOutput, None], exchange: Exchange) -> AsyncGenerator[RequestOutput, None]:
    asked = Asked(Clock(exchange.started))
    asked.clock.submit()
    exchange.asked.append(asked)
    return _read(outputs, asked)


async def _read(outputs: AsyncGenerator[RequestOutput, None], asked: Asked) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(outputs):
        async for output in outputs:
            asked.clock.note(output)
            if output.finished:
                asked.clock.ended, asked.is_done = time.monotonic(), True
                asked.num_tokens = sum(len(part.token_ids) for part in output.outputs)
            yield output
