"""The requests and answers of the TGI routes, as pydantic models: what is parsed, and what the OpenAPI page shows.

Unknown fields are ignored, as TGI's router does. Bounds that the router checks after parsing (a top_p above 1, say) are
not here but in `validation`, whose messages clients know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class RustType:
    """What the router's parser calls a number's type in its messages."""

    name: str


Float = Annotated[float, RustType("f32")]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1), RustType("u32")]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1), RustType("u64")]
Unsigned = Annotated[int, Field(ge=0, le=2**64 - 1), RustType("usize")]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), RustType("i32")]


POSITIVE = {"exclusiveMinimum": 0}
SHARE = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}


def bounded(description: str, **bounds: Any) -> Any:
    """A nullable field, with bounds for the OpenAPI page; `validation` checks them, after parsing and in its words."""
    return Field(default=None, description=description, json_schema_extra=_bound(bounds))


def _bound(bounds: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def extend(schema: dict[str, Any]) -> None:
        schema["anyOf"][0].update(bounds)  # the second is null

    return extend


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class JsonGrammar(_Request):
    type: Literal["json", "json_object"]
    value: Any = Field(description="A JSON schema with `properties`, as an object or as a string.")


class RegexGrammar(_Request):
    type: Literal["regex"]
    value: str


class JsonSchemaValue(_Request):
    name: str | None = None
    strict: bool | None = None
    # An alias: `schema` is a method of the base class.
    json_schema: Any = Field(alias="schema")


class JsonSchemaGrammar(_Request):
    type: Literal["json_schema"]
    value: JsonSchemaValue


Grammar = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar, Field(discriminator="type")]


class GenerateParameters(_Request):
    best_of: Unsigned | None = Field(default=None, description="Generate this many answers, and return the likeliest.")
    temperature: Float | None = bounded(
        "Strictly positive. Any value but 1 turns sampling on.", exclusiveMinimum=0, maximum=2
    )
    repetition_penalty: Float | None = bounded("1 is none.", minimum=1e-6, maximum=1e6)
    frequency_penalty: Float | None = bounded(
        "Penalty x count / length, over all tokens, the prompt's included.", minimum=-2, maximum=2
    )
    top_k: I32 | None = bounded("Strictly positive. Turns sampling on.", **POSITIVE)
    top_p: Float | None = bounded(
        "Strictly between 0 and 1. Turns sampling on.", exclusiveMinimum=0, exclusiveMaximum=1
    )
    typical_p: Float | None = bounded(
        "Strictly between 0 and 1. Turns sampling on.", exclusiveMinimum=0, exclusiveMaximum=1
    )
    do_sample: bool = Field(
        default=False, description="Sample; greedy otherwise, unless another field turns sampling on."
    )
    max_new_tokens: U32 | None = bounded("Null: as many as max_total_tokens leaves.", **POSITIVE)
    return_full_text: bool | None = Field(default=None, description="Prompt and answer. Null: the route's default.")
    stop: list[str] = Field(default_factory=list, description="End when the text ends with one of these; it stays in.")
    truncate: Unsigned | None = bounded("Keep the last n tokens of the input.", **POSITIVE)
    watermark: bool = Field(
        default=False, description="Not supported: true is refused.", json_schema_extra={"const": False}
    )
    details: bool = Field(
        default=False, description="Return each token with its log-probability, and why the text ended."
    )
    decoder_input_details: bool = Field(default=False, description="Return the input's tokens and log-probabilities.")
    seed: U64 | None = Field(default=None, description="Null: drawn at random when sampling; the details tell which.")
    top_n_tokens: U32 | None = Field(default=None, description="Return the n likeliest tokens of each position.")
    grammar: Grammar | None = Field(default=None, description="What the answer must match.")
    adapter_id: str | None = Field(
        default=None, description="Not supported: this server has no adapters.", json_schema_extra={"const": None}
    )


DEFAULT_PARAMETERS = GenerateParameters(do_sample=True)
"""Of a request without the key `parameters`; an empty object is greedy."""


class GenerateRequest(_Request):
    inputs: str = Field(json_schema_extra={"minLength": 1})
    parameters: GenerateParameters = DEFAULT_PARAMETERS


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False


class ChatMessage(_Request):
    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: Any = None


class ChatRequest(_Request):
    model_config = ConfigDict(extra="allow", frozen=True)

    messages: list[ChatMessage]
    tools: list[Any] | None = None
    max_tokens: U32 | None = None
    max_completion_tokens: U32 | None = Field(default=None, description="Another name of max_tokens.")
    seed: U64 | None = None


class VertexRequest(_Request):
    instances: list[GenerateRequest | ChatRequest]


class Token(BaseModel):
    id: int = Field(ge=0)
    text: str
    logprob: float
    special: bool


class PrefillToken(BaseModel):
    id: int = Field(ge=0)
    text: str
    logprob: float | None


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class BestOfSequence(BaseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int = Field(ge=0)
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class Details(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int = Field(ge=0)
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | None = None
    top_tokens: list[list[Token]] | None = None


class GenerateResponse(BaseModel):
    generated_text: str
    details: Details | None = None


class StreamDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int = Field(ge=0)
    seed: int | None
    input_length: int = Field(ge=0)


class StreamResponse(BaseModel):
    index: int = Field(ge=1)
    token: Token
    top_tokens: list[Token] | None = None
    generated_text: str | None
    details: StreamDetails | None


class ErrorResponse(BaseModel):
    error: str
    error_type: str


class SimpleToken(BaseModel):
    id: int = Field(ge=0)
    text: str
    start: int = Field(ge=0)
    stop: int = Field(ge=0)


class ChatTokenizeResponse(BaseModel):
    tokenize_response: list[SimpleToken]
    templated_text: str


class VertexResponse(BaseModel):
    predictions: list[str]


class Info(BaseModel):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
