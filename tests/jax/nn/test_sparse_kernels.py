"""V3.2's and V4's layers call the sparse kernel where it can run: their programs, at the widths of the models."""

import argparse
import dataclasses
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.jax.ops.programs import calls, kernels
from tsmla_jax.nn import Step, v4, v32
from tsmla_jax.ops import device
from tsmla_jax.ops.sparse_mla import api
from tsmla_kernels.catalog import SPARSE_MLA
from tsmla_kernels.cli import objects as commands

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "compiled-objects.md"
PAGE, PAGES, REQUESTS = 128, 4, 2
V32 = v32.V32Config.from_hf(
    {
        "model_type": "deepseek_v32", "hidden_size": 64, "num_attention_heads": 3, "kv_lora_rank": 512,
        "q_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 4,
        "index_head_dim": 128, "index_topk": 96, "max_position_embeddings": 512, "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    }
)  # fmt: skip

# Of a cache, and how many attention kernels a layer calls over it.
DTYPES = [(jnp.uint8, 1), (jnp.float8_e4m3fn, 1), (jnp.bfloat16, 1), (jnp.float32, 0)]


@pytest.fixture(autouse=True)
def on_hopper(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands against kernels by default, except what the kernels themselves say."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    table = {name: dataclasses.replace(each, why_not_by_default=list) for name, each in api.OPERATION.table.items()}
    monkeypatch.setitem(vars(api.OPERATION), "table", table)
    monkeypatch.setattr(device, "num_sms", lambda arch: 132)


def step() -> Step:
    tables = jnp.arange(REQUESTS * PAGES // 2, dtype=jnp.int32).reshape(REQUESTS, -1)
    lens = jnp.asarray([PAGE + 3, 9], jnp.int32)
    return Step.ragged(tables, lens, jnp.asarray([0, 1, 2]), total_tokens=2, page_size=PAGE)


def program(family: Any, config: Any, cache: Any, step: Any, **options: Any) -> Any:
    params = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in family.param_shapes(config).items()}
    x = jnp.zeros((2, 64), jnp.bfloat16)
    attend = functools.partial(family.attend, **options)
    return jax.make_jaxpr(lambda *arrays: attend(*arrays[:1], config, *arrays[1:]))(params, x, cache, step)


def attentions(jaxpr: Any) -> int:
    """How many times a program calls the sparse attention's kernel. The other operations' kernels are in it, too, for a
    lowering for GPUs."""
    return sum(kernel is SPARSE_MLA for kernel, _ in kernels(jaxpr))


@pytest.mark.parametrize(("dtype", "count"), DTYPES)
def test_v32(dtype: Any, count: int) -> None:
    cache = v32.init_cache(V32, PAGES, PAGE, kv_dtype=dtype, indexer_dtype=jnp.bfloat16)
    assert attentions(program(v32, V32, cache, step())) == count
    takes_fp8_queries = dtype in (jnp.uint8, jnp.float8_e4m3fn)
    assert attentions(program(v32, V32, cache, step(), q_scale=0.5)) == takes_fp8_queries


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float8_e4m3fn])
def test_v32_with_fp8_queries_calls_the_kernel_that_is_named(dtype: Any) -> None:
    cache = v32.init_cache(V32, PAGES, PAGE, kv_dtype=dtype)
    named = [calls(program(v32, V32, cache, step(), q_scale=q_scale, implementation="cute")) for q_scale in (None, 0.5)]
    assert named[0] == named[1] > 0
    with pytest.raises(NotImplementedError, match=r"q\.dtype is float8_e4m3fn and kv_cache has plain rows of bfloat16"):
        wide = v32.init_cache(V32, PAGES, PAGE, kv_dtype=jnp.bfloat16)
        program(v32, V32, wide, step(), q_scale=0.5, implementation="cute")


@pytest.mark.parametrize("kind", ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"])
@pytest.mark.parametrize(("dtype", "count"), DTYPES)
@pytest.mark.sampled(3)
def test_v4(kind: str, dtype: Any, count: int) -> None:
    config = v4.V4Config.from_hf({
        "model_type": "deepseek_v4", "hidden_size": 64, "num_attention_heads": 6, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 32, "sliding_window": 128, "o_groups": 3, "o_lora_rank": 10,
        "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64, "num_hidden_layers": 1, "layer_types": [kind],
        "max_position_embeddings": 512, "rope_theta": 1e4, "compress_rope_theta": 4e4, "rms_norm_eps": 1e-6,
    }, 0)  # fmt: skip
    cache = v4.init_cache(config, window_pages=PAGES, compressed_pages=PAGES, num_states=2, page_size=PAGE, dtype=dtype)
    made = v4.make_step(
        config,
        step(),
        state_slots=jnp.arange(2, dtype=jnp.int32),
        compressed_tables=step().block_tables,
        cos_sin=v4.rope_table(config, 512),
        page_size=PAGE,
    )
    assert attentions(program(v4, config, cache, made)) == count
    takes_fp8_queries = dtype == jnp.float8_e4m3fn
    assert attentions(program(v4, config, cache, made, q_scale=0.5)) == takes_fp8_queries


def test_the_guides_command_compiles_what_the_steps_of_v32_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the model's widths: 128 heads on 8 devices, decode of 64 requests and prefill of 4,096 tokens of one."""
    monkeypatch.setattr(device, "why_not_by_default", list)
    mla = dataclasses.replace(V32.mla, hidden_size=7168, num_attention_heads=128 // 8, q_lora_rank=1536)
    config, array = v32.V32Config(mla), jax.ShapeDtypeStruct

    def attend(params: Any, x: Any, cache: Any, tables: Any, lens: Any, offsets: Any) -> Any:
        made = Step.ragged(tables, lens, offsets, total_tokens=len(x), page_size=64)
        return v32.attend(v32.functional.fold(params, config), config, x, cache, made)

    loaded = set()
    for tokens, requests in ((64, 64), (4096, 1)):
        program = jax.make_jaxpr(attend)(
            {name: array(shape, jnp.bfloat16) for name, shape in v32.param_shapes(config).items()},
            array((tokens, 7168), jnp.bfloat16),
            jax.eval_shape(lambda: v32.init_cache(config, PAGES, 64, kv_dtype=jnp.uint8)),
            array((requests, 131072 // 64), jnp.int32),
            array((requests,), jnp.int32),
            array((requests + 1,), jnp.int32),
        )
        loaded.update(kernels(program))
    parser = argparse.ArgumentParser()
    commands.add_compile_arguments(parser)
    joined = GUIDE.read_text().replace("\\\n", " ")
    commands_of_guide = re.findall(r"^    tsmla compile (.*)$", joined, re.MULTILINE)
    (line,) = (each for each in commands_of_guide if "deepseek-v3.2" in each)
    compiled = commands._of_configs(parser.parse_args(shlex.split(line)))
    of_other_steps = ("selection_bits", "sparse_mla_backward")  # prompts in the expanded form, and training
    wanted = {(each.kernel, each.config) for each in compiled if each.kernel.name not in of_other_steps}
    assert wanted == loaded and len(loaded) == 10
