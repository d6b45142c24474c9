"""Every argument of TGI's launcher as data: its variables, its default, and what becomes of it here.

    used        does what TGI's page says
    no effect   accepted, and one line of the start says why it changes nothing
    refused     an error by name: to accept it in silence would serve something else than was asked for

Settings that only the shell has (`HF_NUM_CORES`, tokens, the XLA image's variables) stand in the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neuronserve.neuron_worker.values import Parser, boolean, integer, number, one_of, positive, text
from neuronserve.server.tgi.settings import TgiSettings

Fate = Literal["used", "no effect", "refused"]

INT8 = "int8"
INT8_NAMES = ("bitsandbytes", "eetq", "jetstream_int8", INT8, "s8")
"""TGI's methods that are int8 weights over a plain checkpoint; ours has the same aim and its own arithmetic."""

OTHER_QUANTIZATIONS = (
    "awq",
    "exl2",
    "gptq",
    "marlin",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "fp8",
    "compressed-tensors",
)


def natural(value: object) -> int:
    found = integer(value)
    if found < 0:
        raise ValueError("expected a whole number")
    return found


def port(value: object) -> int:
    found = positive(value)
    if found > 65535:
        raise ValueError("expected a port, 1 to 65535")
    return found


def dtype(value: object) -> str:
    from neuronserve.neuron_worker.served_types import DTYPES

    found = DTYPES.get(text(value).lower())
    if found is None:
        raise ValueError("expected float16, bfloat16 or float32 (fp16, bf16, fp32)")
    return found


def quantization(value: object) -> str:
    """int8, or "none"; `QUANTIZATION=1` of the XLA image is a switch."""
    word = text(value).lower()
    if word in INT8_NAMES or word in ("1", "true"):
        return INT8
    if word in ("0", "false", "none"):
        return "none"
    if word in OTHER_QUANTIZATIONS:
        raise ValueError(
            f"this engine has int8 weights alone, under the names {', '.join(INT8_NAMES)}; use one of them"
        )
    raise ValueError(f"expected one of {', '.join(INT8_NAMES)}")


def origins(value: object) -> tuple[str, ...]:
    words = value if isinstance(value, list) else str(value).split(",")
    return tuple(text(word) for word in words)


@dataclass(frozen=True)
class Argument:
    name: str
    help: str
    parser: Parser = text
    default: object = None
    fate: Fate = "used"
    why: str = ""  # no effect: why not; refused: what to do instead
    variables: tuple[str, ...] = ()  # all of them, in order
    short: str | None = None
    has_flag: bool = True
    is_switch: bool = False  # a flag without a value
    repeats: bool = False
    is_secret: bool = False
    first_wins: bool = False  # of its spellings the flag, then the first variable; otherwise they must agree
    flag_wins: bool = False  # over variables of another name too, which TGI's entrypoints turn into its own
    harmless: tuple[object, ...] = ()  # values of a refused argument that ask for what happens anyway

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def _argument(name: str, help: str, parser: Parser = text, **more: object) -> Argument:
    variables = more.pop("variables", (name.upper(),))
    return Argument(name, help, parser, variables=variables, **more)  # type: ignore[arg-type]


def _switch(name: str, help: str, **more: object) -> Argument:
    return _argument(name, help, boolean, is_switch=True, **more)


def _idle(name: str, why: str, parser: Parser = text, **more: object) -> Argument:
    """Taken as text: a cluster may set PROMETHEUS_PORT or MASTER_PORT to something of its own."""
    return _argument(name, "", parser, fate="no effect", why=why, harmless=(False,), **more)


def _refused(name: str, why: str, parser: Parser = text, **more: object) -> Argument:
    return _argument(name, "", parser, fate="refused", why=why, **more)


def _variable(*variables: str, name: str, help: str, parser: Parser = text, **more: object) -> Argument:
    return _argument(name, help, parser, variables=variables, has_flag=False, **more)


_SETTINGS = TgiSettings()
_SCHEDULED = "requests join and leave the batch at every step"
_GPU = "it is for GPUs"

ARGUMENTS: tuple[Argument, ...] = (
    # the model
    _argument(
        "model_id",
        "A local directory or a hub id.",
        variables=("MODEL_ID", "HF_MODEL_ID", "SM_ON_MODEL"),
        flag_wins=True,
    ),
    _argument(
        "revision",
        "Branch, tag or commit of a hub id.",
        variables=("REVISION", "HF_MODEL_REVISION"),
        flag_wins=True,
    ),
    _argument(
        "dtype",
        "Type the model computes in: float16, bfloat16, float32.",
        dtype,
        variables=("DTYPE", "HF_AUTO_CAST_TYPE"),
    ),
    _argument(
        "quantize",
        f"int8 weights: {', '.join(INT8_NAMES)}. Other methods are refused by name.",
        quantization,
        variables=("QUANTIZE", "HF_MODEL_QUANTIZE", "QUANTIZATION"),
        flag_wins=True,
    ),
    _argument("speculate", "Most drafted tokens of a step, looked up in the prompt; 0 is none.", natural),
    _argument("tokenizer_config_path", "A tokenizer_config.json whose chat template is used."),
    _argument(
        "huggingface_hub_cache",
        "Directory of hub files.",
        variables=("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
        first_wins=True,
    ),
    _argument("weights_cache_override", "Wins over --huggingface-hub-cache."),
    # the limits
    _argument(
        "max_concurrent_requests",
        "Requests admitted at once; the next one is answered 429. Not the batch.",
        positive,
        default=_SETTINGS.max_concurrent_requests,
    ),
    _argument(
        "max_batch_size",
        "Sequences in the batch. Default: the export's, else --max-batch-total-tokens divided by --max-total-tokens, "
        "else the device's.",
        natural,
        variables=("MAX_BATCH_SIZE", "HF_BATCH_SIZE", "SM_ON_BATCH_SIZE"),
    ),
    _argument("max_input_tokens", "Longest prompt. Default: --max-total-tokens less 1.", positive),
    _argument("max_input_length", "The older name of --max-input-tokens.", positive),
    _argument(
        "max_total_tokens",
        "Prompt and answer together. Default: the export's sequence length, else the model's, at most 4096, or twice a "
        "--max-input-tokens that this does not hold.",
        positive,
        variables=("MAX_TOTAL_TOKENS", "HF_SEQUENCE_LENGTH", "SM_ON_SEQUENCE_LENGTH"),
    ),
    _argument("max_batch_prefill_tokens", "Caps the prompt tokens of one step.", positive),
    _argument("max_batch_total_tokens", "Batch size times --max-total-tokens.", positive),
    _argument("max_best_of", "Largest `best_of`.", positive, default=_SETTINGS.max_best_of),
    _argument("max_stop_sequences", "Most `stop` strings.", positive, default=_SETTINGS.max_stop_sequences),
    _argument("max_top_n_tokens", "Largest `top_n_tokens`.", positive, default=_SETTINGS.max_top_n_tokens),
    _argument("max_client_batch_size", "Most prompts of a request.", positive, default=_SETTINGS.max_client_batch_size),
    _argument("payload_limit", "Most bytes of a request's body.", positive, default=_SETTINGS.payload_limit),
    _argument("validation_workers", "Reported by /info.", natural, default=_SETTINGS.validation_workers),
    _switch("disable_grammar_support", "Refuse `grammar`."),
    _switch("enable_prefill_logprobs", "On already; the variable with false turns them off.", default=True),
    # the server
    _argument("hostname", "Address to listen on.", default="0.0.0.0"),
    _argument(
        "port",
        "Port to listen on.",
        port,
        short="-p",
        default=3000,
        variables=("SAGEMAKER_BIND_TO_PORT", "PORT", "SM_ON_PORT"),
        first_wins=True,
    ),
    _argument(
        "api_key",
        "Every route that generates or tokenizes wants it as a bearer token.",
        variables=("API_KEY", "VLLM_API_KEY", "SM_ON_API_KEY"),
        is_secret=True,
        flag_wins=True,
    ),
    _argument("cors_allow_origin", "Origin browsers may call from; repeatable. Default: any.", origins, repeats=True),
    _switch("json_output", "Log lines as JSON, as LOG_FORMAT=JSON."),
    _argument("otlp_endpoint", "Where traces go."),
    _argument("otlp_service_name", "Name of the service in traces.", default="text-generation-inference.router"),
    _argument(
        "graceful_termination_timeout",
        "Seconds that running requests have to finish when the server is told to stop.",
        natural,
        short="-g",
        default=90,
    ),
    # accepted without effect
    _idle("trust_remote_code", "no code of a model is run here", boolean, is_switch=True, variables=(
        "TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"), flag_wins=True),
    _idle("waiting_served_ratio", _SCHEDULED),
    _idle("max_waiting_tokens", _SCHEDULED),
    _idle("cuda_graphs", _GPU),
    _idle("cuda_memory_fraction", _GPU),
    _idle("disable_custom_kernels", _GPU, boolean, is_switch=True),
    _idle("prometheus_port", "metrics are on the server's own port, at /metrics"),
    _idle("shard_uds_path", "there are no shards to connect"),
    _idle("master_addr", "there are no shards to connect"),
    _idle("master_port", "there are no shards to connect"),
    _idle("watermark_gamma", "`watermark` is refused"),
    _idle("watermark_delta", "`watermark` is refused"),
    _idle("usage_stats", "nothing is reported to anybody"),
    _idle("messages_api_enabled", "/invocations takes every body", boolean, is_switch=True),
    # refused
    _refused("sharded", "Sharding is not supported. HF_NUM_CORES says how many cores work as one", boolean,
             harmless=(False,)),
    _refused("num_shard", "Sharding is not supported. HF_NUM_CORES says how many cores work as one", natural,
             harmless=(1,)),
    _refused("kv_cache_dtype", "the cache is never stored as fp8: leave it out"),
    _refused("rope_scaling", "write `rope_scaling` into the model's config.json, which is what is read"),
    _refused("rope_factor", "write `rope_scaling` into the model's config.json, which is what is read", number),
    _refused("lora_adapters", "adapters are not served: merge them into the checkpoint", text),
    _refused("ngrok", "no tunnel is opened: run ngrok beside the server", boolean, is_switch=True, harmless=(False,)),
    _refused("ngrok_authtoken", "no tunnel is opened: run ngrok beside the server", is_secret=True),
    _refused("ngrok_edge", "no tunnel is opened: run ngrok beside the server"),
    # of the shell alone
    _variable("HF_NUM_CORES", "SM_ON_TENSOR_PARALLEL_SIZE", name="num_cores", help="Cores that work as one.",
              parser=positive),
    _variable("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "SM_ON_HF_TOKEN", name="hf_token",
              help="For gated repositories.", is_secret=True, first_wins=True),
    _variable("LOG_LEVEL", name="log_level", help="info, debug, or a directive such as text_generation_router=debug."),
    _variable("LOG_FORMAT", name="log_format", help="JSON or TEXT.", parser=one_of("JSON", "TEXT")),
    _variable("LOG_COLORIZE", name="log_colorize", help="0: no colours.", parser=boolean),
)  # fmt: skip

BY_NAME = {argument.name: argument for argument in ARGUMENTS}
