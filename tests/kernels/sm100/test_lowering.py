"""mla_decode and mla_prefill lowered and exported for CUDA with CUTE_DSL_ARCH naming Blackwell, without such a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import tsmla_jax
from tsmla_jax.ops import device
from tsmla_jax.ops.operation import BY_PLATFORM
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import MLA_DECODE_SM100
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100.packages import TOKENSPEED

FP8 = jnp.float8_e4m3fn
Struct = jax.ShapeDtypeStruct
attend: Callable[..., Any] = partial(tsmla_jax.mla_decode, softmax_scale=0.135, implementation="cute", return_lse=True)
prefill: Callable[..., Any] = partial(
    tsmla_jax.mla_prefill,
    softmax_scale=0.135,
    max_q_len=300,
    max_kv_len=400,
    implementation="cute",
    return_lse=True,
)
needs_package = pytest.mark.skipif(
    not all(map(device.importlib.util.find_spec, ("tokenspeed_mla", "torch"))),
    reason="needs tokenspeed-mla and torch",
)


def specs(
    batch: Any = 4,
    pages: Any = 32,
    max_pages: Any = 8,
    *,
    page: int = 64,
    heads: int = 16,
    tokens: int = 4,
    dtype: Any = FP8,
) -> tuple[Struct, ...]:
    return (
        Struct((batch, tokens, heads, 576), dtype),
        Struct((pages, page, 576), dtype),
        Struct((batch, max_pages), jnp.int32),
        Struct((batch,), jnp.int32),
    )


def packed(tokens: Any, keys: Any, batch: Any, heads: int = 16) -> tuple[tuple[Struct, ...], dict[str, Struct]]:
    arrays = tuple(Struct((n, heads, d), jnp.bfloat16) for n, d in ((tokens, 192), (keys, 192), (keys, 128)))
    offsets = Struct((batch + 1,), jnp.int32)
    return arrays, {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}


def lower(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    # A new function each time, because jax caches the lowering of a function.
    jitted = jax.jit(lambda *args, **kwargs: function(*args, **kwargs))
    return jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


def results_of_call(text: str) -> str:
    """The types of the custom call's results, without the megabytes of the object."""
    (line,) = (line for line in text.splitlines() if device.TARGET in line)
    return line[line.rindex(" -> ") + 4 :]


def exported(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    checks = tsmla_jax.export_disabled_checks()
    made = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args, **kwargs)
    return export.deserialize(made.serialize())


@needs_package
def test_decode_lowers_and_other_sizes_compile_nothing() -> None:
    text = lower(attend, *specs())
    assert text.count(f"@{device.TARGET}(") == 1
    # 64 rows a request, so 37 CTAs each on 148 multiprocessors; but there are only 4 tiles of 128 keys.
    rows = 4 * 64 * 513 * 4
    assert f"tensor<4x4x16x512xbf16>, tensor<4x4x16xf32>, tensor<4x{rows}xi8>, " in results_of_call(text)
    stored = len(object_cache.entries())
    for batch, pages, max_pages in ((5, 32, 8), (4, 70_000, 8), (300, 32, 100)):
        text = lower(attend, *specs(batch, pages, max_pages))
        assert len(object_cache.entries()) == stored
        split = "1x16" if batch == 300 else r"\d+x\d+"
        assert re.search(rf"tensor<{batch}x4x16xf32>, tensor<{split}xi8>", results_of_call(text))


@needs_package
def test_scales_by_value_are_sizes_and_compile_nothing() -> None:
    lower(attend, *specs())
    stored = len(object_cache.entries())
    for scale in (0.1, 0.2):
        text = lower(partial(attend, softmax_scale=scale), *specs())
        sizes = "".join(rf", tensor<{size}xi8>" for size in sm100.scale_sizes(scale, 1.0))
        assert re.search(rf"{sizes}\)$", results_of_call(text).rstrip()), results_of_call(text)
    assert len(object_cache.entries()) == stored


@needs_package
def test_decode_exports_for_all_sizes() -> None:
    b, p, m = export.symbolic_shape("b, p, m", constraints=["b <= 4096"])
    again = exported(attend, *specs(b, p, m))
    assert again.platforms == ("cuda",)
    stored = len(object_cache.entries())
    text = lower(again.call, *specs(7, 99, 3))
    assert len(object_cache.entries()) == stored and device.TARGET in text


@needs_package
def test_prefill_lowers_differentiates_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_107a")
    arrays, offsets = packed(600, 700, 3)
    text = lower(prefill, *arrays, **offsets)
    assert "tensor<600x16x128xbf16>, tensor<600x16xf32>, tensor<300xi8>, " in results_of_call(text)

    stored = len(object_cache.entries())
    arrays, offsets = packed(900, 1000, 7, heads=32)
    lower(prefill, *arrays, **offsets)
    assert len(object_cache.entries()) == stored

    def loss(*arrays: Any, **offsets: Any) -> jax.Array:
        return prefill(*arrays, **offsets)[0].astype(jnp.float32).sum()

    assert lower(jax.grad(loss, argnums=(0, 1, 2)), *arrays, **offsets).count(f"@{device.TARGET}(") == 1

    t, k, b = export.symbolic_shape("t, k, b", constraints=["t <= 65536"])
    arrays, offsets = packed(t, k, b)
    again = exported(prefill, *arrays, **offsets)
    arrays, offsets = packed(70, 99, 3)
    assert device.TARGET in lower(again.call, *arrays, **offsets)


def test_sizes_without_a_bound_are_refused_with_what_to_say() -> None:
    b, p, m = export.symbolic_shape("b, p, m")
    with pytest.raises(NotImplementedError, match=r'B is b, which may be too large.*symbolic_shape\("b", constraints='):
        jax.eval_shape(attend, *specs(b, p, m))
    arrays, offsets = packed(1 << 20, 100, 3)
    with pytest.raises(
        NotImplementedError, match=r"Tq is 1048576; TokenSpeed's kernels index 2\^31 elements, Tq <= 10"
    ):
        jax.eval_shape(prefill, *arrays, **offsets)


def test_what_vmap_makes_too_large_is_refused() -> None:
    q, kv, tables, lens = specs(4096, heads=128)
    folded = jax.vmap(lambda q: tsmla_jax.mla_decode(q, kv0, tables0, lens0, softmax_scale=0.1, implementation="cute"))
    kv0, tables0, lens0 = (jnp.zeros(x.shape, x.dtype) for x in (kv, tables, lens))
    with pytest.raises(NotImplementedError, match=r"B is 65536; TokenSpeed's kernels index 2\^31 elements, B <= 8191"):
        jax.eval_shape(folded, Struct((16, *q.shape), q.dtype))


# ---- explanations and errors


def test_explain_says_that_nothing_was_run_on_one() -> None:
    q, kv, tables, lens = specs(dtype=jnp.bfloat16)
    explained = tsmla_jax.explain("mla_decode", q, kv, tables, lens, softmax_scale=1.0, implementation="cute")
    assert explained.chosen == "cute" and explained.notes == {"cute": (sm100.NOTICE, sm100.FINITE)}
    assert sm100.NOTICE in str(explained) and "not run on one by us" in sm100.NOTICE
    arrays, offsets = packed(5, 6, 1)
    options = {"softmax_scale": 1.0, "max_q_len": 5, "max_kv_len": 6, "implementation": "cute"}
    explained = tsmla_jax.explain("mla_prefill", *arrays, **offsets, **options)
    notice, derivative = explained.notes["cute"]
    assert explained.chosen == "cute" and notice == sm100.NOTICE
    reason = "the architecture is sm_100a; mla_prefill_backward is written for sm_90a"
    assert derivative == f"its derivative is that of xla: {reason}"


def test_nothing_is_said_of_blackwell_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    notes = tsmla_jax.explain("mla_decode", *specs(dtype=jnp.bfloat16), softmax_scale=1.0).notes
    assert notes == {"cute": (BY_PLATFORM,)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page": 1}, "page size is 1 (rows of single-token pages are no legal TMA box)"),
        ({"dtype": jnp.float32}, "q.dtype is float32"),
        ({"kv": FP8}, "kv_cache.dtype is float8_e4m3fn"),
        ({"latent_dim": 448}, "latent_dim is 448"),
        ({"heads": 130}, "num_heads (H) is 130"),
    ],
)
def test_limits_of_the_package_are_errors(change: dict[str, Any], reason: str) -> None:
    dtype = change.get("dtype", jnp.bfloat16)
    q, _, tables, lens = specs(heads=change.get("heads", 16), dtype=dtype)
    kv = Struct((32, change.get("page", 64), 576), change.get("kv", dtype))
    with pytest.raises(NotImplementedError, match=f"^mla_decode: implementation='cute' can't run.*{re.escape(reason)}"):
        jax.eval_shape(partial(attend, latent_dim=change.get("latent_dim", 512)), q, kv, tables, lens)


def test_without_the_package_only_stored_objects_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = device.importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name.startswith("tokenspeed_mla") else find(name, *rest)

    monkeypatch.setattr(device.importlib.util, "find_spec", without)
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path))
    explained = tsmla_jax.explain("mla_decode", *specs(), softmax_scale=1.0, implementation="cute")
    (reason,) = explained.reasons["cute"]
    assert reason == (
        'mla_decode_sm100 is made of tokenspeed-mla, which is not installed: pip install "tokenspeed-mla>=2.0,<3"'
    )
    monkeypatch.setattr(object_cache, "is_stored", lambda kernel, config, arch: kernel is MLA_DECODE_SM100)
    explained = tsmla_jax.explain("mla_decode", *specs(), softmax_scale=1.0, implementation="cute")
    assert explained.chosen == "cute"


def test_an_object_is_told_from_that_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sm100.DecodeConfig("bfloat16", 16, 1)
    installed = {"tokenspeed-mla": "2.0.9"}
    monkeypatch.setattr(object_cache.importlib.metadata, "version", lambda name: installed.get(name, "1"))
    newer = object_cache._identity(MLA_DECODE_SM100, config, "sm_100a")
    monkeypatch.undo()
    assert newer["made_of"] == "tokenspeed-mla 2.0.9"
    assert object_cache._identity(MLA_DECODE_SM100, config, "sm_100a")["made_of"].startswith("tokenspeed-mla 2.0.")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tsmla_kernels.sm100 import config as sm100, mla_decode
print(type(mla_decode.attention(sm100.DecodeConfig("float8_e4m3fn", 16, 1), "sm_100a")).__name__)
try:
    mla_decode.attention(sm100.DecodeConfig("bfloat16", 16, 1), "sm_100a")
except ModuleNotFoundError as error:
    print(error.name, error)
"""


@needs_package
def test_without_torch_fp8_compiles_and_the_rest_says_what_is_missing() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    made, missing = run.stdout.splitlines()
    assert made == "BlackwellMultiHeadLatentAttentionForwardFP8"
    assert missing.startswith("torch the Blackwell kernels need tokenspeed-mla: ") and TOKENSPEED.install in missing
