"""`tsmla compile` for Blackwell: the kernels of the architecture, in the configs that calls get."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tsmla_jax
from tsmla_jax.ops.mla_decode import blackwell as decode_operands
from tsmla_jax.ops.mla_prefill import blackwell as prefill_operands
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import KERNELS, MLA_DECODE_SM100, MLA_PREFILL_SM100
from tsmla_kernels.cli import objects as kernel_commands
from tsmla_kernels.sm100.config import ARCHS, DecodeConfig, PrefillConfig


def compiled_by(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[tuple[Any, Any, str]]:
    asked: list[tuple[Any, Any, str]] = []
    monkeypatch.setattr(object_cache, "is_stored", lambda *each: each in asked)
    monkeypatch.setattr(object_cache, "load_or_compile", lambda *each: asked.append(each))
    monkeypatch.setattr(kernel_commands, "_resources_of", lambda compiled: "")  # nothing is compiled
    parser = argparse.ArgumentParser()
    kernel_commands.add_compile_arguments(parser)
    assert kernel_commands.run_compile(parser.parse_args([*argv, "--jobs", "1"])) == 0
    return asked


@pytest.mark.parametrize("arch", ARCHS)
def test_a_preset_names_the_kernels_of_the_architecture(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "deepseek-v3,tensor_parallel=8,max_q_len=2,dtype=float8_e4m3fn"
    asked = compiled_by(monkeypatch, "--arch", arch, "--config", options)
    assert (MLA_DECODE_SM100, DecodeConfig("float8_e4m3fn", 16, 2), arch) in asked
    assert (MLA_PREFILL_SM100, PrefillConfig("float8_e4m3fn", True), arch) in asked
    assert all(arch in kernel.archs for kernel, _, _ in asked)
    assert KERNELS["mla_decode"] not in [kernel for kernel, _, _ in asked]


def test_what_is_compiled_ahead_is_what_a_call_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []

    def record(kernel: Any, config: Any, inputs: Any, shapes: Any, *, arch: str) -> list[Any]:
        wanted.append((kernel, config))
        outputs = [operand for operand in kernel.operands(config) if operand.output]
        return [jnp.zeros(shape, operand.dtype) for shape, operand in zip(shapes, outputs, strict=True)]

    for module in (decode_operands, prefill_operands):
        monkeypatch.setattr(module, "kernel_call", record)
    struct = jax.ShapeDtypeStruct
    arrays = struct((3, 2, 16, 576), jnp.bfloat16), struct((9, 64, 576), jnp.bfloat16)
    tables = struct((3, 4), jnp.int32), struct((3,), jnp.int32)

    def call(*arrays: Any, **scales: Any) -> Any:
        return tsmla_jax.mla_decode(*arrays, implementation="cute", **{"softmax_scale": 0.1, **scales})

    jax.eval_shape(call, *arrays, *tables)
    jax.eval_shape(call, *arrays, *tables, softmax_scale=struct((), jnp.float32))
    decode = ["--kernel", "mla_decode_sm100", "--config", "deepseek-v3,tensor_parallel=8,max_q_len=2"]
    asked = compiled_by(monkeypatch, *decode, "--config", "num_heads=16,max_q_len=2,traced_scales=true")
    assert [(kernel, config) for kernel, config, _ in asked] == wanted


def test_options_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ("deepseek-v3,page_size=1", "no kernel for it: page size is 1"),
        ("deepseek-v3,traced_scales=maybe", "got traced_scales=maybe; legal: true or false"),
    ):
        with pytest.raises(ValueError, match=f"^--config: {said}"):
            compiled_by(monkeypatch, "--kernel", "mla_decode_sm100", "--config", options)
