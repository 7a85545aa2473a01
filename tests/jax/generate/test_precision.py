"""Products of f32 in whole steps of bf16 models: on a GPU one that doesn't say its precision is TF32's, of 11 bits.

Attention by XLA says the default where values of 16 bits are exact in TF32 (`ops/*/xla.py`)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import source_info_util

from examples import make_checkpoint
from tests.jax.generate.tiny import tiny_config
from tsmla_jax.generate import ModelConfig, load_model, model
from tsmla_jax.generate.caches import CacheLayout, default_page_size, init_cache, window_rows
from tsmla_jax.generate.model import Batch, Scales, StepOptions
from tsmla_jax.nn import Step


def products(jaxpr: Any) -> Iterator[Any]:
    """Every product of matrices of a jaxpr and of those in it, but in kernels of Pallas."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from products(inner)


def unsaid(jaxpr: Any) -> list[str]:
    """The products of f32 or wider that leave their precision to jax's default."""
    return [
        f"{[str(x.aval) for x in product.invars]} at {source_info_util.summarize(product.source_info)}"
        for product in products(jaxpr)
        if any(x.aval.dtype.itemsize >= 4 and jnp.issubdtype(x.aval.dtype, jnp.floating) for x in product.invars)
        and product.params["precision"] is None
    ]


@pytest.fixture(scope="module", params=["v2", "v3", "v3.2", "v4"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Any]:
    directory = tmp_path_factory.mktemp("bf16")
    fields = {**tiny_config(request.param), "torch_dtype": "bfloat16"}
    tensors = dict(make_checkpoint.weights(fields, list(range(fields["vocab_size"])), 0))
    make_checkpoint.write_safetensors(directory / "model.safetensors", tensors)
    make_checkpoint.write_json(directory / "config.json", fields)
    config = ModelConfig.from_hf(directory)
    return config, load_model(directory, config, dtype="bfloat16")


@pytest.mark.parametrize("phase", ["prefill", "fresh", "decode"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.sampled(3)
def test_products_of_f32_say_their_precision(tiny: tuple[ModelConfig, Any], phase: Any, fold: bool) -> None:
    config, params = tiny
    params = model.fold(params, config) if fold else params
    page_size, tokens = default_page_size(config), 6
    layout = CacheLayout(2, page_size, 1, window_rows(config, 8, 8), 0, "bfloat16")
    caches = [init_cache(config.layer(index).attention, layout) for index in range(config.num_layers)]
    options = StepOptions(phase, page_size=page_size, window_rows=layout.window_rows, implementation="xla")

    def run(params: Any, caches: Any, ids: jax.Array) -> Any:
        lens, tables = jnp.asarray([tokens], jnp.int32), jnp.arange(2, dtype=jnp.int32)[None]
        cu = jnp.asarray([0, tokens], jnp.int32)
        step = Step.ragged(tables, lens, cu, total_tokens=tokens, max_q_len=tokens, page_size=page_size)
        batch = Batch(ids, step, state_slots=jnp.zeros(1, jnp.int32))
        return model.forward(params, config, caches, batch, ids[:1], Scales(), options)

    traced = jax.make_jaxpr(run)(params, caches, jnp.zeros(tokens, jnp.int32))
    assert unsaid(traced.jaxpr) == []
    assert sum(1 for _ in products(traced.jaxpr)) > 10


def test_a_product_that_says_nothing_is_found() -> None:
    x = jnp.ones((2, 3))
    nested = jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x.T @ x), x))(x)
    assert len(unsaid(nested.jaxpr)) == 2
    said = partial(jnp.einsum, "ij,kj->ik", precision="highest")
    assert unsaid(jax.make_jaxpr(said)(x, x).jaxpr) == [] and np.isfinite(said(x, x)).all()
