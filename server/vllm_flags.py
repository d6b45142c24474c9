"""Flags of `vllm serve` that a plan has no use for: how many words each takes, so that the model is told from a value.

vLLM's own parser takes seconds to import. So what stands here is what is no flag with one value, and a test compares
it with that parser. Knows nothing of what a flag means.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_SWITCHES = """
aggregate-engine-logging allow-credentials allow-deprecated-quantization async-scheduling
cohere-is-reasoning-model cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb
data-parallel-multi-port-external-lb dcp-q-replicate disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats
disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
enable-auto-tool-choice enable-batch-sharded-sampling enable-cumem-allocator enable-dbo enable-elastic-ep
enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance enable-flash-late-interaction
enable-flashinfer-autotune enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing
enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details enable-lora
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend
enable-offline-docs enable-per-request-metrics enable-prompt-embeds enable-prompt-tokens-details
enable-request-id-headers enable-return-routed-experts enable-scale-out enable-server-load-tracking
enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint
enable-tower-connector-lora enable-trace-replay enforce-eager exclude-tools-when-tool-choice-none
fail-on-environ-validation fully-sharded-loras grpc headless interleave-mm-strings jit-monitor-verbose
kv-cache-metrics kv-sharing-fast-prefill language-model-only log-error-stack
long-prefill-token-threshold-adaptive mm-device-do-normalize mm-encoder-only numa-bind ray-workers-use-nsight
return-sampling-mask return-tokens-as-token-ids scheduler-reserve-full-isl skip-mm-profiling
skip-tokenizer-init sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay tokens-only
trust-remote-code trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel use-replayssm
use-tqdm-on-load
"""
SWITCHES = frozenset(_SWITCHES.split())
"""Without a value, each also as --no-..."""

SHORT_SWITCHES = frozenset({"-dpe", "-dph", "-dpm", "-ep"})

_LISTS = """
allowed-media-domains api-key collect-detailed-traces cpu-offload-params cudagraph-capture-sizes hf-token
ignore-patterns kv-cache-dtype-skip-layers logits-processors lora-modules lora-target-modules numa-bind-cpus
numa-bind-nodes offload-params served-model-name sleep-preserve-parameter-names
"""
LISTS = frozenset(_LISTS.split())
"""With as many values as follow."""


def split(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """(what belongs to a plan, names of the flags that do not). `known`: the plan's own flags."""
    kept: list[str] = []
    foreign: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word) or word.split("=")[0] in known:
            kept.append(word)
            continue
        foreign.append(word.split("=")[0])
        at += _values(word, words[at:])
    return kept, foreign


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not word[1].isdigit()


def _values(flag: str, rest: Sequence[str]) -> int:
    """How many of the words behind `flag` are its own."""
    name = flag.removeprefix("--")
    if "=" in flag or flag in SHORT_SWITCHES or name.removeprefix("no-") in SWITCHES:
        return 0
    if not flag.startswith("--") and flag[-1].isdigit():  # -O3
        return 0
    if name not in LISTS:
        return min(1, len(rest))
    return next((count for count, word in enumerate(rest) if _is_flag(word)), len(rest))
