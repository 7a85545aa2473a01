"""The merge kernel without a GPU: what it compiles to, and what is lowered around it."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import export

import tsmla_jax
from tests.jax.ops.programs import lower
from tsmla_jax.ops import device, kernel_call
from tsmla_jax.ops.merge_attention_states.api import OPERATION
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import MERGE_ATTENTION_STATES
from tsmla_kernels.cli import objects as kernel_commands
from tsmla_kernels.merge import config as merge_rules
from tsmla_kernels.merge.config import MergeConfig
from tsmla_kernels.resources import resource_report

pytestmark = pytest.mark.usefixtures("for_hopper")

ARCH = "sm_90a"
BF16, F16, F32 = "bfloat16", "float16", "float32"
Struct = jax.ShapeDtypeStruct


# ---- objects

CONFIGS = [MergeConfig(BF16, 128), MergeConfig(F32, 128), MergeConfig(F16, 512, 8, unroll=1), MergeConfig(F32, 4, 1)]


@pytest.mark.parametrize("config", CONFIGS)
def test_everything_stays_in_registers(config: MergeConfig) -> None:
    compiled = object_cache.load_or_compile(MERGE_ATTENTION_STATES, config, ARCH)
    (found,) = resource_report(compiled).kernels  # one launch
    assert found.stack_bytes == 0, f"{config}: {found.stack_bytes} bytes of local memory a thread"
    assert found.registers <= (64 if config.parts <= 2 else 128), (config, found.registers)
    assert len(compiled.module) < 64 << 10  # it travels in every program that calls it


def test_the_results_are_the_first_parts_memory() -> None:
    operands = MERGE_ATTENTION_STATES.operands(MergeConfig(BF16, 128, 3))
    assert [o.name for o in operands] == ["out_0", "out_1", "out_2", "lse_0", "lse_1", "lse_2", "out", "lse"]
    assert {o.name: o.alias for o in operands if o.output} == {"out": "out_0", "lse": "lse_0"}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ("deepseek-v3", MergeConfig(BF16, 128)),
        ("deepseek-v3,dtype=float8_e4m3fn", MergeConfig(BF16, 128)),
        ("dtype=float32,v_head_dim=64,parts=4", MergeConfig(F32, 64, 4, unroll=1)),
    ],
)
def test_options_name_the_configs_that_calls_get(options: str, config: MergeConfig) -> None:
    assert [found for _, found in kernel_commands.configs(options, [MERGE_ATTENTION_STATES])] == [config]
    arrays = structs(config.parts, (5, 2), config.head_dim, config.dtype)
    assert merge_rules.merge_config(OPERATION.spec_of(*arrays)) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pages=1", "got option 'pages'; legal: batch_invariant"),
        ("dtype=float64", "no kernel for it: outs' dtype is float64; the merge kernel takes bfloat16, float16, float3"),
        ("parts=9", "no kernel for it: there are 9 parts; the merge kernel takes at most 8"),
        ("v_head_dim=12", "no kernel for it: v_head_dim (L) is 12; in bfloat16 the merge kernel takes a multiple of 8"),
    ],
)
def test_options_are_checked(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--config: {re.escape(message)}"):
        kernel_commands.configs(options, [MERGE_ATTENTION_STATES])


# ---- lowering


def structs(parts: int, rows: tuple[Any, ...], width: Any = 128, dtype: str = BF16) -> tuple[list[Any], list[Any]]:
    return [Struct((*rows, width), dtype)] * parts, [Struct(rows, F32)] * parts


def merge(name: str | None = "cute") -> Callable[..., Any]:
    return functools.partial(tsmla_jax.merge_attention_states, implementation=name)


def test_the_call_is_all_that_runs_on_the_device_and_in_place() -> None:
    text = lower(merge(), *structs(3, (7, 16)))
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {"custom_call", "reshape", "output_operand_alias"}
    assert text.count(f"@{device.TARGET}(") == 1
    for result, operand in ((0, 0), (1, 3)):
        assert f"output_tuple_indices = [{result}], operand_index = {operand}" in text


def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(merge(), *structs(2, (7, 16)))
    monkeypatch.setattr(object_cache, "compile_kernel", None)
    kernel_call._module.cache_clear()
    lower(merge(), *structs(2, (70_000, 3, 5)))
    make = export.export(jax.jit(merge()), platforms=["cuda"], disabled_checks=tsmla_jax.export_disabled_checks())
    rows = export.symbolic_shape("t")
    again = export.deserialize(make(*structs(2, (*rows, 16))).serialize())
    assert device.TARGET in lower(again.call, *structs(2, (9, 16)))


def test_no_rows_need_no_kernel() -> None:
    assert device.TARGET not in lower(merge(), *structs(2, (0, 16)))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (structs(2, (3,), 128, "float64"), "outs' dtype is float64"),
        (structs(2, (3,), 6), "v_head_dim (L) is 6; in bfloat16 the merge kernel takes a multiple of 8 up to 8192"),
        (structs(9, (3,)), "there are 9 parts; the merge kernel takes at most 8"),
    ],
)
def test_reasons_are_said(arrays: Any, reason: str) -> None:
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=re.escape(reason)):
        lower(merge(), *arrays)


def test_nobody_chooses_a_kernel_for_a_gpu_that_is_not_there() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    explained = tsmla_jax.explain("merge_attention_states", *structs(2, (3,)))
    assert explained.chosen == "xla" and explained.reasons["cute"] == ("jax's default device is a cpu",)
