"""The arguments and results of every operation, in one place for both front ends: specs, rules and error texts.

One function for each operation (`decode_spec`, ...) takes its arguments as `Array(shape, dtype)` and returns a frozen
spec, so the error for a wrong argument reads the same from jax and from torch. Imports neither jax nor torch.
"""

# ruff: noqa: F401  (these imports are what the package offers)

from tsmla_kernels.contract.attention import (
    DecodeSpec,
    MergeSpec,
    PrefillSpec,
    check_self_attention,
    decode_spec,
    keys_or_queries,
    merge_spec,
    prefill_kv_spec,
    prefill_spec,
)
from tsmla_kernels.contract.cache import (
    CacheGatherSpec,
    CacheWriteSpec,
    RopeWriteSpec,
    cache_gather_spec,
    cache_write_spec,
    rope_write_spec,
)
from tsmla_kernels.contract.rules import (
    FLOATS,
    FP8,
    FP8_MAX,
    VALUES,
    Array,
    Dim,
    attention_out_dtype,
    is_scale,
    not_an_array,
    not_differentiable,
    not_runnable,
    static_bool,
    static_int,
    unknown_implementation,
)
