"""TGI's limits of tokens, where vLLM renders a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.inputs import tokens_input

from neuronserve.server.tgi.errors import ValidationError
from neuronserve.server.tgi.openai_limits import ANY_LENGTH, UNSAID, hold
from neuronserve.server.tgi.validation import Limits

LIMITS = Limits(2, 4, 5, max_input_tokens=8, max_total_tokens=18)
REFUSAL = ErrorResponse(error=ErrorInfo(message="no", type="BadRequestError", code=400))


class Server:
    """Handlers that render what the test says, with our limits on them."""

    def __init__(self, *lengths: int, refusal: ErrorResponse | None = None) -> None:
        self.prompts = [tokens_input([1] * length) for length in lengths]
        self.config = SimpleNamespace(max_model_len=32, is_encoder_decoder=False)
        self.chat, self.completion = self._handler(), self._handler()
        self.chat.render_chat_request = self._rendering(refusal or ([], self.prompts))
        self.completion.render_completion_request = self._rendering(refusal or self.prompts)
        state: Any = SimpleNamespace(openai_serving_chat=self.chat, openai_serving_completion=self.completion)
        hold(state, LIMITS)

    def _handler(self) -> SimpleNamespace:
        return SimpleNamespace(model_config=self.config, online_renderer=SimpleNamespace(model_config=self.config))

    def _rendering(self, rendered: Any) -> Any:
        async def render(_: Any) -> Any:
            return rendered

        return render

    def complete(self, **asked: Any) -> tuple[Any, CompletionRequest]:
        request = CompletionRequest(prompt="a", **{"max_tokens": UNSAID, **asked})
        return asyncio.run(self.completion.render_completion_request(request)), request

    def reply(self, **asked: Any) -> tuple[Any, ChatCompletionRequest]:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **asked)
        return asyncio.run(self.chat.render_chat_request(request)), request


def test_what_fits_passes() -> None:
    server = Server(8)
    assert server.complete(max_tokens=8)[0] == server.prompts
    assert server.reply(max_completion_tokens=8)[0] == ([], server.prompts)


def test_unsaid_is_all_that_the_total_leaves() -> None:
    server = Server(3, 8)
    assert vars(server.complete()[1])["max_tokens"] == 18
    assert vars(server.reply()[1])["max_tokens"] == 18
    assert vars(server.complete(max_tokens=5)[1])["max_tokens"] == 5
    assert server.completion.model_config.max_model_len == 18


@pytest.mark.parametrize("kind", ["complete", "reply"])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "`inputs` must have less than 8 tokens. Given: 9"),
        (
            {"max_tokens": 10},
            "`inputs` tokens + `max_new_tokens` must be <= 18. Given: 9 `inputs` tokens and 10 `max_new_tokens`",
        ),
    ],
)
def test_refused_in_tgi_s_words(kind: str, asked: dict[str, int], message: str) -> None:
    server = Server(3, 9)
    with pytest.raises(ValidationError) as refused:
        getattr(server, kind)(**asked)
    assert str(refused.value).removeprefix("Input validation error: ") == message


def test_a_prompt_above_the_total_leaves_nothing() -> None:
    with pytest.raises(ValidationError, match="Given: 40 `inputs` tokens and 0 `max_new_tokens`"):
        Server(40).reply()


def test_vllm_s_own_limit_is_out_of_the_way_there_and_nowhere_else() -> None:
    server = Server()
    assert server.chat.online_renderer.model_config.max_model_len == ANY_LENGTH
    assert server.config.max_model_len == 32


def test_vllm_s_own_refusal_stays() -> None:
    assert Server(refusal=REFUSAL).reply()[0] is REFUSAL
    assert Server(refusal=REFUSAL).complete()[0] is REFUSAL
