"""The prefill kernel as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no GPU."""

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import MLA_PREFILL

CONFIGS = {
    "192 and 128": {},
    "192 and 128, not causal": {"causal": "false"},
    "128 and 128, f16": {"qk_head_dim": "128", "dtype": "float16"},
    "kv and k_rope": {"shared_rope": "true"},
    "64 and 64": {"qk_head_dim": "64", "v_head_dim": "64"},
    "256 and 256": {"qk_head_dim": "256", "v_head_dim": "256"},
    "256 and 256, f16, not causal": {"qk_head_dim": "256", "v_head_dim": "256", "dtype": "float16", "causal": "false"},
    "256 and 256, kv and k_rope": {"qk_head_dim": "256", "v_head_dim": "256", "shared_rope": "true"},
    "256 and 256, selected keys": {"qk_head_dim": "256", "v_head_dim": "256", "selection": "true"},
    "selected keys": {"selection": "true"},
    "selected keys, kv and k_rope, f16": {"selection": "true", "shared_rope": "true", "dtype": "float16"},
    "sinks and greatest logits": {"sinks": "true", "max_logits": "true"},
    "sinks and greatest logits, kv and k_rope": {"sinks": "true", "max_logits": "true", "shared_rope": "true"},
    "sinks, fp8": {"sinks": "true", "dtype": "float8_e4m3fn"},
    "selected keys, fp8": {"selection": "true", "dtype": "float8_e4m3fn"},
    "fp8": {"dtype": "float8_e4m3fn"},
    "fp8, 256 and 256": {"dtype": "float8_e4m3fn", "qk_head_dim": "256", "v_head_dim": "256"},
    "fp8, 256 and 256, selected keys": {
        "dtype": "float8_e4m3fn",
        "qk_head_dim": "256",
        "v_head_dim": "256",
        "selection": "true",
    },
    "fp8, not causal": {"dtype": "float8_e4m3fn", "causal": "false"},
}
WIDE_V = {"192 and 128, v in a wider tensor": {}, "fp8, v in a wider tensor": {"dtype": "float8_e4m3fn"}}

FAST = ("192 and 128", "256 and 256")
"""Compiled in every run of the tests, in five to ten seconds, as is fp8 in test_on_machine.py. The others are slow."""


@pytest.mark.parametrize("name", all_but_slow((*CONFIGS, *WIDE_V), FAST))
def test_everything_stays_in_registers(name: str) -> None:
    wide_v = name in WIDE_V
    config = MLA_PREFILL.from_options(WIDE_V[name] if wide_v else CONFIGS[name])
    check_compiled(MLA_PREFILL, dataclasses.replace(config, wide_v=wide_v), kernels=2)  # attention and its plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            "no kernel for it: q.dtype is float32; the sm_90 prefill kernel takes bfloat16, float16 or float8_e4m3fn",
        ),
        (
            {"dtype": "float8_e4m3fn", "qk_head_dim": "64", "v_head_dim": "64"},
            "are 64 and 64; the sm_90 prefill kernel takes 192 and 128, 256 and 256 in float8_e4m3fn",
        ),
        (
            {"dtype": "float8_e4m3fn", "shared_rope": "true"},
            "q.dtype is float8_e4m3fn; the sm_90 prefill kernel takes that only with k and v",
        ),
        (
            {"v_head_dim": "64"},
            "no kernel for it: the head dims of k and v are 192 and 64; the sm_90 prefill kernel takes",
        ),
        (
            {"selection": "true", "qk_head_dim": "128"},
            "the head dims of k and v are 128 and 128 with a selection; the sm_90 prefill kernel takes 192 and 128",
        ),
        ({"head_dim": "64"}, "got option 'head_dim'; legal: batch_invariant, causal, "),
        ({"causal": "maybe"}, "got causal=maybe; legal: true or false"),
    ],
)
def test_options_that_are_not_legal(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLA_PREFILL.from_options(options)
