"""Every argument that is not legal gets an error that names it, what it got and what is legal."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import tsmla_jax
from tests.oracles.bad_input import (
    BASES,
    CASES,
    DECODE,
    GATHER,
    PREFILL,
    RAGGED,
    WRITE,
    Case,
)
from tsmla_kernels import contract


def call(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(tsmla_jax, op)(**arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.message[:30]}")
def test_the_error_names_the_argument(case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        call(case.op, case.arguments)
    if "implementation" not in case.arguments:
        with pytest.raises(case.error, match=case.message):  # explain refuses what the operation refuses
            tsmla_jax.explain(case.op, **case.arguments)


def test_the_bases_are_legal() -> None:
    for op, arguments in [*BASES.items(), ("mla_decode", RAGGED)]:
        jax.eval_shape(functools.partial(call, op, arguments))


@pytest.mark.parametrize(
    ("op", "argument", "base"),
    [
        ("mla_decode", "max_q_len", RAGGED),
        ("mla_decode", "latent_dim", DECODE),
        ("mla_prefill", "max_q_len", PREFILL),
        ("mla_prefill", "max_kv_len", PREFILL),
        ("gather_kv_cache", "total_len", GATHER),
    ],
)
def test_a_traced_size_is_refused_under_jit(op: str, argument: str, base: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"{argument}: got .*Tracer; legal: a static int.*static_argnames"):
        jax.jit(lambda size: call(op, base | {argument: size}))(2)


@pytest.mark.parametrize("size", [[4], (4,), b"4", 4j, object()], ids=lambda size: type(size).__name__)
def test_a_size_of_another_type_is_refused(size: object) -> None:
    with pytest.raises(TypeError, match=f"^total_len: got {type(size).__name__}; legal: a static int"):
        call("gather_kv_cache", GATHER | {"total_len": size})


def test_a_traced_flag_is_refused_under_jit() -> None:
    with pytest.raises(TypeError, match=r"causal: got .*Tracer; legal: True or False"):
        jax.jit(lambda causal: call("mla_decode", DECODE | {"causal": causal}))(True)


@pytest.mark.parametrize("op", ["write_kv_cache", "gather_kv_cache", "merge_attention_states"])
def test_a_named_implementation_that_cannot_run_gives_every_reason(op: str) -> None:
    reasons = tsmla_jax.explain(op, **BASES[op], implementation="cute").reasons["cute"]
    assert reasons
    with pytest.raises(NotImplementedError, match=f"{op}: implementation='cute' can't run this call") as caught:
        call(op, BASES[op] | {"implementation": "cute"})
    assert all(reason in str(caught.value) for reason in reasons)


def test_a_refused_decode_carries_every_reason() -> None:
    reasons = tsmla_jax.explain("mla_decode", **DECODE).reasons["cute"]
    with pytest.raises(NotImplementedError) as caught:
        call("mla_decode", DECODE | {"implementation": "cute"})
    named = tsmla_jax.explain("mla_decode", **DECODE, implementation="cute")
    assert named.chosen is None
    assert all(reason in str(caught.value) for reason in named.reasons["cute"])
    assert set(named.reasons["cute"]) <= set(reasons)


def test_explain_says_what_none_picks() -> None:
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a for name, a in DECODE.items()}
    explanation = tsmla_jax.explain("mla_decode", **shapes)
    assert explanation.chosen == "xla"
    assert explanation.reasons["xla"] == explanation.reasons["reference"] == ()
    assert explanation.spec == tsmla_jax.explain(tsmla_jax.mla_decode, **DECODE).spec
    assert "xla: can run" in str(explanation)
    with pytest.raises(ValueError, match=r"op: got 'attention'; legal: .*mla_decode"):
        tsmla_jax.explain("attention")
    with pytest.raises(TypeError, match=r"mla_decode: missing a required argument: 'q'; explain takes .*q, kv_cache"):
        tsmla_jax.explain("mla_decode")


def test_arrays_of_no_numbers_are_named() -> None:
    class Tensor:
        shape, dtype = (2, 1, 4, 48), "torch.float32"

    for value in (Tensor(), jax.random.split(jax.random.key(0), 2)):
        with pytest.raises(TypeError, match=r"q: got \w+; legal: an array of numbers of numpy or jax"):
            call("mla_decode", DECODE | {"q": value})


def test_a_scale_that_numpy_knows_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"kv_scale: got -1\.0; legal: a positive number, 1.2e-38 to 8.5e37"):
        call("mla_decode", DECODE | {"kv_scale": np.float32(-1)})
    with pytest.raises(ValueError, match=r"kv_scale: got 1e-50; legal: a positive number"):
        call("mla_decode", DECODE | {"kv_scale": np.array(1e-50)})
    call("mla_decode", DECODE | {"kv_scale": np.float32(2)})


def test_dtype_pairs_of_query_and_cache() -> None:
    wide = ("float32", "float64")
    for q, kv in itertools.product(contract.VALUES, contract.VALUES):
        legal = kv == contract.FP8 if q == contract.FP8 else kv in (q, contract.FP8) or q in wide
        arrays = {
            "q": contract.Array((2, 1, 4, 48), q),
            "kv_cache": contract.Array((6, 16, 48), kv),
            "block_tables": contract.Array((2, 3), "int32"),
            "seq_lens": contract.Array((2,), "int32"),
        }
        if legal:
            spec = contract.decode_spec(**arrays, softmax_scale=1.0, latent_dim=32)
            assert spec.out_dtype == ("bfloat16" if q == contract.FP8 else q)
        else:
            with pytest.raises(ValueError, match="kv_cache: got dtype"):
                contract.decode_spec(**arrays, softmax_scale=1.0, latent_dim=32)


@pytest.mark.parametrize(("op", "argument"), [("gather_kv_cache", "out_dtype"), ("rope_write_kv_cache", "q_dtype")])
def test_what_is_no_dtype_is_refused_by_name(op: str, argument: str) -> None:
    x, angle = np.zeros((3, 4, 32), np.float32), np.zeros((3, 8), np.float32)
    rope = {"q_nope": x, "q_rope": x[..., :16], **{name: WRITE[name] for name in WRITE}, "cos": angle, "sin": angle}
    arguments = GATHER if op == "gather_kv_cache" else rope
    for wrong in ("bfloat61", 3, 1.5):
        with pytest.raises(TypeError, match=rf"^{argument}: got {wrong!r}; legal: a dtype, as jax\.numpy\.bfloat16"):
            call(op, arguments | {argument: wrong})
    for narrowed in ("float64", np.float64):  # by jax, to float32
        with pytest.raises(ValueError, match=rf"^{argument}: got float64; legal: float64 with jax_enable_x64, or"):
            call(op, arguments | {argument: narrowed})
