"""Calls that are legal but for one argument, and what their errors say."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

F32, I32 = jnp.float32, jnp.int32


def zeros(*shape: int, dtype: Any = F32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))  # jnp.zeros and jnp.asarray compile a program for each shape


DECODE: dict[str, Any] = {
    "q": zeros(2, 1, 4, 48),
    "kv_cache": zeros(6, 16, 48),
    "block_tables": zeros(2, 3, dtype=I32),
    "seq_lens": zeros(2, dtype=I32),
    "softmax_scale": 0.1,
    "latent_dim": 32,
}

RAGGED = DECODE | {"q": zeros(5, 4, 48), "cu_seqlens_q": zeros(3, dtype=I32), "max_q_len": 2}

PREFILL: dict[str, Any] = {
    "q": zeros(5, 4, 24),
    "k": zeros(7, 4, 24),
    "v": zeros(7, 4, 16),
    "cu_seqlens_q": zeros(3, dtype=I32),
    "cu_seqlens_kv": zeros(3, dtype=I32),
    "max_q_len": 5,
    "max_kv_len": 7,
    "softmax_scale": 0.1,
}

SELF = {name: value for name, value in PREFILL.items() if not name.endswith(("seqlens_kv", "kv_len"))}
SELF |= {"k": zeros(5, 4, 24), "v": zeros(5, 4, 16)}

WRITE: dict[str, Any] = {
    "kv_cache": zeros(6, 16, 48),
    "latent": zeros(3, 32),
    "k_rope": zeros(3, 16),
    "slot_mapping": zeros(3, dtype=I32),
}

SWAPPED = WRITE | {"latent": WRITE["k_rope"], "k_rope": WRITE["latent"]}

FP8_CACHE = {"kv_cache": zeros(6, 16, 48, dtype=jnp.float8_e4m3fn)}

GATHER: dict[str, Any] = {
    "kv_cache": zeros(6, 16, 48),
    "block_tables": zeros(2, 3, dtype=I32),
    "starts": zeros(2, dtype=I32),
    "lens": zeros(2, dtype=I32),
    "total_len": 9,
}

MERGE: dict[str, Any] = {"outs": [zeros(3, 4, 8)] * 2, "lses": [zeros(3, 4)] * 2}

BASES = {
    "mla_decode": DECODE,
    "mla_prefill": PREFILL,
    "write_kv_cache": WRITE,
    "gather_kv_cache": GATHER,
    "merge_attention_states": MERGE,
}


class Case:
    """One call that is legal but for one argument."""

    def __init__(self, op: str, argument: str, value: Any, message: str, *, error: Any = ValueError, base: Any = None):
        self.op, self.error = op, error
        self.arguments = (base or BASES[op]) | {argument: value}
        self.message = rf"{argument}.*{message}"


CASES = [
    Case("mla_decode", "q", zeros(2, 4, 48), r"\[2, 4, 48\] of rank 3; legal: \[B, S, H, D\]"),
    Case("mla_decode", "q", zeros(2, 1, 4, 40), r"last axis must equal kv_cache's D = 48"),
    Case("mla_decode", "q", zeros(3, 1, 4, 48), r"B = 3 must equal block_tables' B = 2"),
    Case("mla_decode", "q", zeros(2, 1, 0, 48), r"H must be at least 1"),
    Case("mla_decode", "q", zeros(2, 1, 4, 48, dtype=I32), r"got dtype int32; legal: float16, bfloat16"),
    Case("mla_decode", "q", [[1.0]], r"got list; legal: an array", error=TypeError),
    Case("mla_decode", "q", zeros(2, 1, 4, 48), r"of rank 4; legal: \[T, H, D\]", base=RAGGED),
    Case("mla_decode", "kv_cache", zeros(6, 1, 16, 48), r"of rank 4; legal: \[P, Z, D\]"),
    Case("mla_decode", "kv_cache", zeros(6, 0, 48), r"Z must be at least 1"),
    Case("mla_decode", "kv_cache", zeros(6, 16, 48, dtype=jnp.int8), r"got dtype int8"),
    Case(
        "mla_decode",
        "kv_cache",
        zeros(6, 16, 48, dtype=jnp.float16),
        r"with q of bfloat16 legal: bfloat16, float8_e4m3fn",
        base=DECODE | {"q": zeros(2, 1, 4, 48, dtype=jnp.bfloat16)},
    ),
    Case("mla_decode", "block_tables", np.zeros((2, 3), np.int64), r"got dtype int64; legal: int32"),
    Case("mla_decode", "block_tables", zeros(6, dtype=I32), r"rank 1; legal: \[B, M\]"),
    Case("mla_decode", "seq_lens", np.zeros(2, np.int64), r"got dtype int64; legal: int32"),
    Case("mla_decode", "seq_lens", zeros(3, dtype=I32), r"\[3\]; axis 0 must be 2 \(B from block_tables\)"),
    Case("mla_decode", "seq_lens", [3, 4], r"got list; legal: an array", error=TypeError),
    Case("mla_decode", "latent_dim", 49, r"at most kv_cache's last axis D = 48"),
    Case("mla_decode", "latent_dim", 16, r"got 16; legal: 24 to 48"),
    Case("mla_decode", "latent_dim", 0, r"an int >= 1"),
    Case("mla_decode", "latent_dim", 32.0, r"got float; legal: a static int", error=TypeError),
    Case("mla_decode", "max_q_len", 3, r"None or S = 1"),
    Case("mla_decode", "max_q_len", None, r"got None; ragged queries", base=RAGGED),
    Case("mla_decode", "max_q_len", 0, r"an int >= 1", base=RAGGED),
    Case("mla_decode", "max_q_len", 2**31, r"got 2147483648; legal: an int from 1 to 2147483647", base=RAGGED),
    Case("mla_decode", "cu_seqlens_q", zeros(2, dtype=I32), r"axis 0 must be 3 \(B \+ 1", base=RAGGED),
    Case("mla_decode", "cu_seqlens_q", np.zeros(3, np.int64), r"got dtype int64; legal: int32", base=RAGGED),
    Case("mla_decode", "causal", 1, r"got int; legal: True or False", error=TypeError),
    Case("mla_decode", "return_lse", None, r"got NoneType; legal: True or False", error=TypeError),
    Case("mla_decode", "batch_invariant", "yes", r"got str; legal: True or False", error=TypeError),
    Case("mla_decode", "fp8_probabilities", 1, r"got int; legal: True or False", error=TypeError),
    Case("mla_decode", "fp8_probabilities", True, r"got True with q of \w+; legal: True with q of float8_e4m3fn"),
    Case("mla_decode", "softmax_scale", None, r"got NoneType; legal: a float", error=TypeError),
    Case("mla_decode", "softmax_scale", zeros(1), r"shape \[1\]; legal: a float or a float32 scalar"),
    Case("mla_decode", "q_scale", "1", r"got str; legal: a float", error=TypeError),
    Case("mla_decode", "q_scale", zeros(dtype=jnp.bfloat16), r"dtype bfloat16; legal: a float or a float32 scalar"),
    Case("mla_decode", "kv_scale", zeros(4), r"shape \[4\]"),
    Case("mla_decode", "causal", np.True_, r"got numpy\.bool; legal: True or False", error=TypeError),
    *(
        Case(op, name, value, rf"got {re.escape(str(value))}; legal: a positive number, 1.2e-38 to 8.5e37")
        for op, name in (
            ("mla_decode", "softmax_scale"),
            ("mla_decode", "q_scale"),
            ("mla_decode", "kv_scale"),
            ("mla_prefill", "softmax_scale"),
            ("mla_prefill", "v_scale"),
            ("write_kv_cache", "kv_scale"),
            ("gather_kv_cache", "kv_scale"),
        )
        for value in (0, -0.5, float("nan"), float("inf"), 1e-50, 1e39)
    ),
    Case("mla_decode", "implementation", "cuda", r"got 'cuda'; legal: None, 'cute', 'xla', 'reference'"),
    Case("mla_prefill", "q", zeros(5, 96), r"rank 2; legal: \[Tq, H, head_dim\]"),
    Case("mla_prefill", "q", zeros(5, 0, 24), r"H must be at least 1", base=PREFILL | {"k": zeros(7, 0, 24)}),
    Case("mla_prefill", "k", zeros(7, 4, 16), r"heads and head_dim must equal q's, \[Tk, 4, 24\]"),
    Case("mla_prefill", "k", zeros(7, 2, 24), r"heads and head_dim must equal q's"),
    Case("mla_prefill", "k", zeros(7, 4, 24, dtype=jnp.bfloat16), r"one dtype, and q has float32"),
    Case("mla_prefill", "v", zeros(6, 4, 16), r"tokens and heads must equal k's, \[7, 4, head_dim\]"),
    Case("mla_prefill", "v", zeros(7, 4, 0), r"last axis must be a static int >= 1"),
    Case("mla_prefill", "v", zeros(7, 4, 16, dtype=I32), r"got dtype int32"),
    Case("mla_prefill", "cu_seqlens_q", zeros(0, dtype=I32), r"B \+ 1 must be at least 1"),
    Case("mla_prefill", "cu_seqlens_q", zeros(3), r"got dtype float32; legal: int32"),
    Case("mla_prefill", "cu_seqlens_kv", zeros(4, dtype=I32), r"axis 0 must be 3 \(B \+ 1"),
    Case("mla_prefill", "cu_seqlens_kv", np.zeros(3, np.int64), r"got dtype int64; legal: int32"),
    Case("mla_prefill", "max_q_len", -1, r"an int >= 0"),
    Case("mla_prefill", "max_q_len", 2**40, r"got 1099511627776; legal: an int from 0 to 2147483647"),
    Case("mla_prefill", "max_kv_len", 2.5, r"got float; legal: a static int", error=TypeError),
    Case("mla_prefill", "max_kv_len", 7, r"got 7 without cu_seqlens_kv; legal: None", base=SELF),
    Case(
        "mla_prefill", "k", zeros(7, 4, 24), r"\[7, 4, 24\]; without cu_seqlens_kv its Tk must be q's Tq = 5", base=SELF
    ),
    Case("mla_prefill", "softmax_scale", True, r"got bool; legal: a float", error=TypeError),
    Case("mla_prefill", "k_scale", zeros(2), r"shape \[2\]"),
    Case("mla_prefill", "v_scale", zeros(dtype=I32), r"dtype int32"),
    Case("mla_prefill", "causal", zeros(), r"True or False", error=TypeError),
    Case("mla_prefill", "deterministic", 1, r"got int; legal: True or False", error=TypeError),
    Case("mla_prefill", "implementation", "flash", r"legal: None, 'cute', 'xla', 'reference'"),
    Case("write_kv_cache", "kv_cache", zeros(96, 48), r"rank 2; legal: \[P, Z, D\]"),
    Case("write_kv_cache", "latent", zeros(3, 1, 32), r"rank 3; legal: \[T, L\]"),
    Case("write_kv_cache", "latent", zeros(3, 64), r"between 1 and kv_cache's D = 48"),
    Case("write_kv_cache", "latent", zeros(3, 32, dtype=jnp.float8_e4m3fn), r"got dtype float8_e4m3fn; legal: float16"),
    Case("write_kv_cache", "latent", zeros(3, 16), r"\[3, 16\]; legal: \[T, L\] with L from 24 to 48", base=SWAPPED),
    Case("write_kv_cache", "latent", zeros(3, 16), r"got shape \[3, 16\]; legal", base=SWAPPED | FP8_CACHE),
    Case("write_kv_cache", "k_rope", zeros(3, 8), r"legal: \[T, R\] = \[3, 16\]"),
    Case("write_kv_cache", "k_rope", zeros(2, 16), r"legal: \[T, R\] = \[3, 16\]"),
    Case("write_kv_cache", "k_rope", None, r"leaves 16 columns after latent's L = 32"),
    Case("write_kv_cache", "k_rope", zeros(3, 16, dtype=jnp.bfloat16), r"must be latent's, float32"),
    Case("write_kv_cache", "slot_mapping", zeros(4, dtype=I32), r"axis 0 must be 3 \(T from latent\)"),
    Case("write_kv_cache", "slot_mapping", np.zeros(3, np.int64), r"got dtype int64; legal: int32"),
    Case("write_kv_cache", "kv_scale", zeros(1), r"shape \[1\]"),
    Case("gather_kv_cache", "kv_cache", zeros(6, 16, 48, dtype=I32), r"got dtype int32"),
    Case("gather_kv_cache", "block_tables", zeros(2, 3), r"got dtype float32; legal: int32"),
    Case("gather_kv_cache", "starts", zeros(3, dtype=I32), r"axis 0 must be 2 \(B from block_tables\)"),
    Case("gather_kv_cache", "lens", np.zeros(2, np.int64), r"got dtype int64; legal: int32"),
    Case("gather_kv_cache", "total_len", -1, r"an int >= 0"),
    Case("gather_kv_cache", "total_len", 3.0, r"got float; legal: a static int", error=TypeError),
    Case("gather_kv_cache", "total_len", None, r"got NoneType; legal: a static int", error=TypeError),
    Case("gather_kv_cache", "out_dtype", jnp.int8, r"got int8; legal: float16, bfloat16"),
    Case("merge_attention_states", "outs", [], r"got no partial result"),
    Case("merge_attention_states", "outs", [zeros(3, 4, 8), zeros(3, 4, 9)], r"must be as outs\[0\]"),
    Case("merge_attention_states", "outs", [zeros(3, 4, 8, dtype=I32)] * 2, r"got dtype int32"),
    Case("merge_attention_states", "outs", [[1.0]] * 2, r"got list; legal: an array", error=TypeError),
    Case("merge_attention_states", "lses", [zeros(3, 4)], r"got 1 partial results; outs has 2"),
    Case("merge_attention_states", "lses", [zeros(3, 4), zeros(4, 3)], r"without the last axis, \[3, 4\]"),
    Case("merge_attention_states", "lses", [zeros(3, 4, dtype=jnp.bfloat16)] * 2, r"got dtype bfloat16"),
]
