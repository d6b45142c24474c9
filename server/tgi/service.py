"""What the TGI routes work with: one `TgiService` per API process, made when the engine is ready."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.renderers.chat_utils import load_chat_template
from vllm.sampling_params import SamplingParams
from vllm.tracing import contains_trace_headers, extract_trace_headers

from neuronserve.neuron_worker.config import NeuronConfig

from . import admission, errors, validation
from .admission import Admission
from .generate import Clock, Generator
from .metrics import FailureKind, Recorder, Timings
from .schemas import GenerateParameters
from .settings import TgiSettings
from .tokens import Vocabulary
from .translate import Job, Offers, structured, truncated
from .validation import Limits

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TgiService:
    """Made by `make`; every route of this process reads it."""

    settings: TgiSettings
    limits: Limits
    engine: EngineClient
    vocabulary: Vocabulary
    generator: Generator
    admission: Admission
    recorder: Recorder
    compute_type: str  # number and kind of the cards, as TGI's launcher spells it
    chat_template: str | None  # instead of the tokenizer's own
    samples_by_its_own_rule: bool = False  # the device does
    template_shows_tools: bool = True

    async def prepare(
        self,
        inputs: str,
        asked: GenerateParameters,
        clock: Clock,
        *,
        streaming: bool,
        add_special_tokens: bool = True,
    ) -> Job:
        """Validation, in TGI's order."""
        validation.check_parameters(inputs, asked, self.limits, streaming=streaming)
        if self.samples_by_its_own_rule:
            validation.check_compiled_sampling(asked)
        try:
            encoded = await self.vocabulary.encode(inputs, add_special_tokens=add_special_tokens)
        except Exception as error:  # the tokenizer's own, which have no class
            raise errors.ValidationError(f"tokenizer error {error}") from error
        token_ids = truncated(encoded, asked.truncate)
        max_new_tokens = validation.check_length(len(token_ids), asked.max_new_tokens, self.limits)
        grammar = validation.check_grammar(asked.grammar, self.limits)
        self._compile(grammar)
        self.recorder.request_validated(len(token_ids), max_new_tokens)
        clock.submit()
        return Job(inputs, token_ids, asked, max_new_tokens, grammar, streaming)

    def _compile(self, grammar: dict[str, Any] | str | None) -> None:
        """Whether the engine can follow it; asked alone, so that the refusal can only be the grammar's."""
        if grammar is None:
            return
        config = self.engine.vllm_config
        try:
            params = SamplingParams(structured_outputs=structured(grammar))
            params.verify(config.model_config, None, config.structured_outputs_config, self.engine.renderer.tokenizer)
        except (VLLMClientError, ValueError) as error:
            what = "grammar is not valid" if isinstance(grammar, str) else "cannot compile regex from schema"
            raise errors.ValidationError(f"{what}: {error}") from None

    async def check_health(self) -> None:
        try:
            await self.engine.check_health()
        except Exception:
            raise errors.Unhealthy from None

    async def trace(self, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        """The caller's span, where this server traces."""
        if not contains_trace_headers(headers) or not await self.engine.is_tracing_enabled():
            return None
        return extract_trace_headers(headers)


def make(engine: EngineClient, settings: TgiSettings, args: Namespace, environ: Mapping[str, str]) -> TgiService:
    config = engine.vllm_config
    neuron = NeuronConfig.of(config)
    names = args.served_model_name or [args.model]
    settings = settings.deduced(model_id=names[0], max_model_len=config.model_config.max_model_len)
    limits = Limits.of(settings)
    tokenizer = engine.renderer.get_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    template = load_chat_template(args.chat_template)
    return TgiService(
        settings=settings,
        limits=limits,
        engine=engine,
        vocabulary=vocabulary,
        generator=Generator(engine, vocabulary, _offers(neuron, settings, config.model_config.max_logprobs)),
        admission=Admission(
            admission.share(settings.max_concurrent_requests, config.parallel_config._api_process_count)
        ),
        recorder=Recorder(limits.max_input_tokens, limits.max_total_tokens),
        compute_type=environ.get("COMPUTE_TYPE") or f"{neuron.tensor_parallel_size}-{neuron.backend}",
        chat_template=template,
        samples_by_its_own_rule=neuron.samples_by_its_own_rule,
        template_shows_tools=_shows_tools(template or getattr(tokenizer, "chat_template", None)),
    )


def _shows_tools(template: Any) -> bool:
    """None: the tokenizer has a way of its own with chats. A dictionary: several, by name."""
    return template is None or "tools" in str(template)


def _offers(neuron: NeuronConfig, settings: TgiSettings, max_logprobs: int) -> Offers:
    scores = not neuron.samples_by_its_own_rule
    return Offers(
        logprobs=scores,
        seeds=scores,
        prefill_logprobs=settings.enable_prefill_logprobs,
        max_logprobs=max_logprobs if 0 <= max_logprobs < Offers.max_logprobs else Offers.max_logprobs,
    )


class Recording:
    """A request in the metrics: one start, then one success or one failure."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open = True
        recorder.request_started()

    def __enter__(self) -> Recording:
        return self

    def success(self, timings: Timings, generated_tokens: int) -> None:
        self._open = False
        self._recorder.request_success(timings, generated_tokens)

    def give_up(self) -> None:
        """No failure of its own: the request beside it failed, and the answer of both is that."""
        self._open = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open and error is not None:
            self._recorder.request_failure(failure_kind(error))


_KINDS: Mapping[type[BaseException], FailureKind] = {
    asyncio.CancelledError: "dropped",
    GeneratorExit: "dropped",
    errors.ClientLeft: "dropped",
    errors.ValidationError: "validation",
    errors.Overloaded: "overloaded",
    errors.Incomplete: "incomplete",
    errors.TemplateError: "template",
}


def failure_kind(error: BaseException) -> FailureKind:
    return _KINDS.get(type(error), "generation")
