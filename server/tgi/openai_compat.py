"""vLLM's /v1/chat/completions and /v1/completions for clients that were written against TGI's.

TGI's spellings are turned into OpenAI's before vLLM reads the body; a body that needs nothing passes byte for byte.
What a server of TGI's launcher also promises (any model name, TGI's limits and defaults, a place among
`max_concurrent_requests`) applies where `any_model_name` is set, so that `vllm serve` keeps vLLM's own answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from . import body, errors, openai_tools
from .admission import Admission
from .dispatch import replayed
from .errors import TgiError, ToolError, TransportError
from .errors import ValidationError as TgiValidationError
from .metrics import Recorder
from .openai_exchange import CURRENT, Exchange
from .openai_headers import CountingRefusals, Describing
from .openai_limits import UNSAID
from .parsing import WRONG_SHAPE
from .schemas import Grammar
from .validation import Limits, check_grammar

Json = dict[str, Any]

CHAT, COMPLETIONS, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/invocations"
PATHS = (CHAT, COMPLETIONS, INVOCATIONS)

_GRAMMAR: TypeAdapter[Grammar] = TypeAdapter(Grammar)


class SuffixNotSupported(TgiError):
    status, error_type = 422, "suffix not supported"

    def __init__(self) -> None:
        super().__init__("Suffix is not supported and can be achieved by preprocessing the prompt.")


class BatchSizeExceeded(TgiError):
    status, error_type = 422, "batch size exceeded"

    def __init__(self, most: int) -> None:
        super().__init__(f"Number of prompts exceeds the maximum allowed batch size of {most}")


@dataclass(frozen=True)
class Rules:
    """Of this server. Made by the middleware from the service's settings."""

    served: Sequence[str]  # model names that vLLM knows
    limits: Limits
    recorder: Recorder | None = None  # None: refusals are not counted
    as_launcher: bool = False
    max_client_batch_size: int = 4
    admission: Admission | None = None  # None: vLLM's own queue is the only limit
    compute_type: str | None = None  # None: answers have vLLM's headers alone
    template_shows_tools: bool = True


def num_answers(asked: Json) -> int:
    """Places that a body needs, as the TGI routes count them; 0 where it asks for no answer."""
    if "messages" not in asked and "prompt" not in asked:
        return 0
    each = n if type(n := asked.get("n")) is int and n > 0 else 1
    return each * (1 if "messages" in asked else _num_prompts(asked["prompt"]))


def _num_prompts(prompt: Any) -> int:
    """A list of numbers is one prompt."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def rewrite(asked: Json, rules: Rules) -> Json:
    """The body as vLLM understands it."""
    result = dict(asked)
    if "messages" in asked:
        _drop_nulls_of_messages(result)
        _rewrite_response_format(result, rules.limits)
        openai_tools.rewrite_choice(result)
    if not rules.limits.grammar_support:
        check_support(asked)
    if isinstance(asked.get("logit_bias"), list):
        del result["logit_bias"]  # TGI takes a list, and does nothing with it; OpenAI's is an object
    if rules.as_launcher:
        _apply_launcher_rules(result, rules)
    return result


def _drop_nulls_of_messages(result: Json) -> None:
    """text-generation's client sends every field of a message that it knows; vLLM has no null for them."""
    if isinstance(messages := result["messages"], list):
        result["messages"] = [_without_nulls(message) for message in messages]


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def check_support(asked: Json) -> None:
    """Where grammars are turned off, whatever would be held to one is refused, in everybody's spellings."""
    forms = [asked.get("response_format")]
    forms += [outer.get("format") for name in ("text", "output_config") if isinstance(outer := asked.get(name), dict)]
    is_form = any(isinstance(form, dict) and form.get("type", "text") != "text" for form in forms)
    if is_form or asked.get("structured_outputs") is not None or openai_tools.are_wanted(asked):
        raise TgiValidationError("grammar is not supported")


def _rewrite_response_format(result: Json, limits: Limits) -> None:
    """TGI's forms have a `value`; OpenAI's pass."""
    wanted = result.get("response_format")
    if not isinstance(wanted, dict) or "value" not in wanted:
        return
    if result.get("tools") is not None:
        raise ToolError("Grammar and tools are mutually exclusive")
    try:
        grammar = check_grammar(_GRAMMAR.validate_python(wanted), limits)
    except ValidationError:
        return  # of no known form: vLLM says what it knows
    if isinstance(grammar, str):
        del result["response_format"]
        result["structured_outputs"] = {"regex": grammar}
    else:
        result["response_format"] = {"type": "json_schema", "json_schema": {"name": "response", "schema": grammar}}


def _apply_launcher_rules(result: Json, rules: Rules) -> None:
    if "requestType" in result and not num_answers(result):
        return  # a session of SageMaker's, which is vLLM's
    if result.get("model") not in rules.served:
        result["model"] = rules.served[0]
    if result.get("truncate_prompt_tokens") == -1:
        result["truncate_prompt_tokens"] = rules.limits.max_input_tokens
    if "messages" in result:
        _continue_the_assistant(result)
        openai_tools.apply_launcher_rules(result, template_shows_them=rules.template_shows_tools)
        return
    if result.get("suffix") is not None:
        raise SuffixNotSupported
    prompts: Any = result.get("prompt")
    if prompts == []:
        raise TransportError(422, f"{WRONG_SHAPE}Empty array detected. Do not use an empty array for the prompt.")
    are_texts = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    if are_texts and len(prompts) > rules.max_client_batch_size:
        raise BatchSizeExceeded(rules.max_client_batch_size)
    if result.get("max_tokens") is None:
        result["max_tokens"] = UNSAID


def _continue_the_assistant(result: Json) -> None:
    """A reply to an unfinished message of the assistant's is its continuation."""
    messages = result["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and last.get("content"):
        result.setdefault("add_generation_prompt", False)
        result.setdefault("continue_final_message", True)


class OpenAiCompat:
    """ASGI middleware in front of vLLM's routes."""

    def __init__(self, app: ASGIApp, rules_of: Callable[[Any], tuple[Rules, int]]) -> None:
        self._app = app
        self._rules_of = rules_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or path_of(scope) not in PATHS:
            return await self._app(scope, receive, send)
        rules, limit = self._rules_of(scope["app"])
        with ExitStack() as held:
            try:
                raw = await body.read_bytes(Request(scope, receive), limit)
                asked = _asked(raw)
                if asked is not None and num_answers(asked):
                    send = held.enter_context(_followed(send, rules, is_chat="messages" in asked))
                changed = raw if asked is None else _changed(raw, asked, rules)
                if rules.admission is not None and asked is not None:
                    held.enter_context(rules.admission.admit(num_answers(asked)))
            except (TgiError, TransportError) as error:
                return await errors.response(error)(scope, receive, send)
            return await self._app(resized(scope, len(changed)), replayed(changed, receive), send)


@contextmanager
def _followed(send: Send, rules: Rules, *, is_chat: bool) -> Iterator[Send]:
    """`send` of a request for an answer, with what this server counts and shows of it."""
    exchange = Exchange()
    if rules.compute_type is not None:
        send = Describing(send, rules.compute_type, exchange, is_chat=is_chat)
    if rules.recorder is not None:
        send = CountingRefusals(send, rules.recorder)
    token = CURRENT.set(exchange)
    try:
        yield send
    finally:
        CURRENT.reset(token)


def _asked(raw: bytes) -> Json | None:
    """None: the route says what is wrong with it, or it is a TGI route's, which does all this itself."""
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return asked if isinstance(asked, dict) and "inputs" not in asked else None


def _changed(raw: bytes, asked: Json, rules: Rules) -> bytes:
    result = rewrite(asked, rules)
    return raw if result == asked else json.dumps(result).encode()


def path_of(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def resized(scope: Scope, size: int) -> Scope:
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(size).encode())]}
