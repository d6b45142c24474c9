"""What the device side may use: Python 3.10, torch 2.5 and numpy 1.22 have all of it.

Whoever adds a name has looked up the release that brought it. The newest so far is torch 2.5's `enable_gqa` of
`scaled_dot_product_attention`.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMPY = _words(
    """
    __version__ abs append arange argsort array asarray ascontiguousarray bitwise_or bitwise_or.reduce clip
    concatenate cos ctypeslib
    ctypeslib.as_array cumsum divmod dtype empty
    exp flatnonzero float16 float32 float64 frombuffer full generic int32 int64 int8 log multiply multiply.outer
    errstate ndarray ones pi repeat rint searchsorted sin stack typing.NDArray uint16 uint32 uint64 uint8 void
    where zeros
    """
)

TORCH = _words(
    """
    Tensor __version__ arange bfloat16 cat compile empty float16 float32 from_numpy inference_mode int64 int8 load
    minimum nn
    nn.Module nn.Parameter nn.ParameterList nn.functional nn.functional.gelu nn.functional.layer_norm
    nn.functional.linear nn.functional.scaled_dot_product_attention nn.functional.silu no_grad rsqrt
    set_num_threads split stack where zeros zeros_like
    """
)

TENSOR_METHODS = _words(
    """
    amax amin any argmax chunk clamp clone copy_ cpu cumsum double element_size exp flatten flip float gather
    index_copy index_copy_ logsumexp long max mean min numel numpy pow repeat reshape scatter sort sum to tolist
    topk transpose view
    """
)
"""By name, wherever one is called in the files that hold tensors."""

OTHER_METHODS = _words(
    """
    __init__ add norm ravel split trace values
    """
)
"""Names that tensors have too, but called there on other things: sets, strings, NumPy arrays, our own classes."""

NEWER_PYTHON = _words(
    """
    asyncio.Runner asyncio.TaskGroup asyncio.timeout contextlib.chdir datetime.UTC enum.ReprEnum enum.StrEnum
    enum.verify hashlib.file_digest http.HTTPMethod itertools.batched math.cbrt math.exp2 math.sumprod
    operator.call pathlib.UnsupportedOperation sys.exception tomllib typing.LiteralString typing.Never
    typing.NotRequired typing.ReadOnly typing.Required typing.Self typing.TypeAliasType typing.TypeIs
    typing.TypeVarTuple typing.Unpack typing.assert_never typing.assert_type typing.dataclass_transform
    typing.override typing.reveal_type warnings.deprecated wsgiref.types
    """
)
"""Of the standard library, later than 3.10."""
