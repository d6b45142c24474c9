"""The library's configuration classes: what they take, refuse and turn into what."""

import os

from .constants import GQA, Layout
from .sparse_attn_utils import SparseAttnConfig

__all__ = [
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "KVCacheQuantizationConfig",
    "NeuronConfig",
    "QuantizationConfig",
    "SparseAttnConfig",
    "valid_dtypes",
]

valid_dtypes = ["float32", "float16", "bfloat16"]


def _only(value, known):
    if value not in known:
        raise NotImplementedError(f"{value} is not implemented. Available options are {','.join(known)}")
    return value


class QuantizationConfig:
    def __init__(
        self,
        quant_dtype="s8",
        dequant_dtype="f16",
        quantize_method="vector_dynamic",
        quantize_attn=True,
        no_quantize_list=(),
    ):
        self.quant_dtype = _only(quant_dtype, ["s8", "f8e4m3fn"])
        self.dequant_dtype = dequant_dtype
        self.quantize_method = _only(quantize_method, ["vector_dynamic", "direct_cast"])
        self.quantize_attn = quantize_attn
        self.no_quantize_list = list(no_quantize_list)


class KVCacheQuantizationConfig:
    def __init__(self, quant_dtype="s8", dequant_dtype="bf16", quantize_method="direct_cast"):
        self.quant_dtype = _only(quant_dtype, ["s8", "f16", "bf16", "f8e4m3fn"])
        self.dequant_dtype = dequant_dtype
        self.quantize_method = _only(quantize_method, ["direct_cast"])


class ContinuousBatchingConfig:
    def __init__(self, **kwargs):
        alias = "max_num_seqs" if kwargs.get("max_num_seqs") is not None else "batch_size_for_shared_caches"
        self.max_num_seqs = kwargs.pop(alias)
        self.max_model_len = kwargs.pop("max_model_len", None)
        self.optimized_paged_attention = kwargs.pop("optimized_paged_attention", False) or False
        self.enable_chunked_prefill = kwargs.pop("enable_chunked_prefill", False) or False
        if self.enable_chunked_prefill:
            assert self.optimized_paged_attention, "chunked prefill is only supported with optimized paged attention"
        self.block_size = self.num_blocks = None
        assert not kwargs, f"unexpected key word arguments: {kwargs.keys()}"

    @property
    def batch_size_for_shared_caches(self):
        return self.max_num_seqs

    def init_cache_engine(self, block_size, num_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks


def _floats(value):
    return [float(each) for each in value] if isinstance(value, list) else float(value)


class GenerationConfig:
    """The library's own, not Hugging Face's."""

    def __init__(
        self,
        *,
        max_length=None,
        do_sample=False,
        top_k=50,
        top_p=1.0,
        top_p_min_tokens=1,
        global_top_k=None,
        eos_token_id=None,
        temperature=1.0,
        dynamic=False,
        deterministic=False,
        per_batch_line=False,
    ):
        self.max_length = max_length
        self.do_sample = do_sample
        self.top_k = top_k
        self.top_p = _floats(top_p)
        self.top_p_min_tokens = top_p_min_tokens
        self.global_top_k = global_top_k
        self.eos_token_id = eos_token_id
        self.temperature = _floats(temperature)
        self.dynamic = dynamic
        self.deterministic = deterministic
        self.per_batch_line = per_batch_line

    def __eq__(self, other):
        return isinstance(other, GenerationConfig) and self.__dict__ == other.__dict__

    __hash__ = None


_PLAIN = {
    "sparse_attn": None,
    "quant": None,
    "kv_cache_quant": None,
    "continuous_batching": None,
    "attention_layout": Layout.HSB,
    "collectives_layout": Layout.HSB,
    "cache_layout": Layout.SBH,
    "padding_side": "left",
    "group_query_attention": None,
    "sequence_parallel_norm": False,
    "sequence_parallel_norm_threshold": 2048,
    "bf16_rms_norm": False,
    "on_device_embedding": False,
    "on_device_generation": None,
    "all_reduce_dtype": None,
    "cast_logits_dtype": "float32",
    "fuse_qkv": False,
    "qkv_tiling": False,
    "weight_tiling": False,
    "mlp_in_weight_tiling_permute_order": [1, 2, 0, 3],
    "mlp_out_weight_tiling_permute_order": [1, 2, 0, 3],
    "mlp_out_weight_transpose": False,
    "log_softmax_scores": False,
    "shard_over_sequence": False,
    "duplicate_q_weight_sos": False,
    "output_all_logits": False,
    "attn_output_transposed": False,
    "fused_rmsnorm_qkv": False,
    "fused_rmsnorm_mlp": False,
    "fuse_mlp": False,
    "is_eagle_target": False,
    "is_eagle_draft": False,
    "has_pre_attention_norm": True,
    "compilation_worker_count": None,
}
_ALIASES = ("use_2d_cache_ids", "lhs_aligned")


class NeuronConfig:
    def __init__(self, **kwargs):
        given = {**_PLAIN, **kwargs}
        aliases = [given.pop(alias, False) for alias in _ALIASES]
        self.lhs_aligned = any(aliases) or given["padding_side"] == "right"
        unknown = {name: value for name, value in given.items() if name not in _PLAIN}
        assert not unknown, f"Unexpected NeuronConfig keyword arguments: {unknown}"
        for name, value in given.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self._check()
        if self.continuous_batching:
            self.lhs_aligned, self.padding_side = True, "right"
        if self.group_query_attention is not None:
            self.group_query_attention = GQA(self.group_query_attention)
        self._drop_kernels_that_do_not_apply()
        self.is_sequence_parallel = False
        self.rank_id = int(os.getenv("NEURON_RANK_ID", "0"))
        local_tp = os.getenv("NEURON_LOCAL_TP")
        self.local_tp = None if local_tp is None else int(local_tp)
        self.pp_stages = int(os.getenv("NEURON_PP_STAGES", "1"))

    def _check(self):
        assert self.cast_logits_dtype in valid_dtypes, f"cast_logits_dtype must be one of {valid_dtypes}"
        assert self.padding_side in ("left", "right"), "padding_side must be either 'left' or 'right'"
        assert self.sequence_parallel_norm_threshold > 0, "sequence_parallel_norm_threshold must be greater than zero"
        assert not self.qkv_tiling or self.fuse_qkv, "QKV weight tiling needs QKV fusion"
        for order in (self.mlp_in_weight_tiling_permute_order, self.mlp_out_weight_tiling_permute_order):
            assert order.index(2) < order.index(3), "dim 2 has to be in front of dim 3"
        if self.shard_over_sequence:
            assert self.sparse_attn is None, "sparse attn is not supported with flash decoding"
            assert self.cache_layout == Layout.SBH, "flash decoding only supports the SBH layout"

    def _drop_kernels_that_do_not_apply(self):
        """In silence; and comparing a layout with what is none raises, whatever the kernels."""
        fits = self.attention_layout == Layout.BSH and self.group_query_attention is GQA.REPLICATED_HEADS
        self.fused_rmsnorm_mlp = self.fused_rmsnorm_mlp and fits
        self.fused_rmsnorm_qkv = self.fused_rmsnorm_qkv and fits and self.fuse_qkv and not self.sequence_parallel_norm

    @property
    def use_2d_cache_ids(self):
        return self.lhs_aligned

    @property
    def vectorize_last_token_id(self):
        return self.lhs_aligned

    @property
    def bsh_cache_layout(self):
        return self.cache_layout == Layout.BSH

    @property
    def use_1d_query(self):
        return self.bsh_cache_layout and self.padding_side == "right"

    def get_local_tp(self, tp):
        return tp if self.local_tp is None else self.local_tp

    def get_g_device_count(self, tp):
        return self.pp_stages * tp

    def get_g_start_device_id(self, tp):
        return self.rank_id * self.get_local_tp(tp)

    def to_json(self):
        return _plain(self.__dict__)


def _plain(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Layout, GQA)):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return _plain(vars(value))
