"""The kernel of the router's choice against XLA's, by its interpreter on a CPU and by itself on a GPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import moe
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.nn.products import expert_choice

ROUTINGS: dict[str, dict[str, Any]] = {
    "V2-Lite": {"num_experts": 64, "top_k": 6, "num_shared": 2},
    "V2": {
        "num_experts": 160, "top_k": 6, "routing": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
    "V3": {
        "num_experts": 256, "top_k": 8, "routing": "noaux_tc", "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_shared": 1,
    },
    "V4": {
        "num_experts": 384, "top_k": 6, "routing": "noaux_tc", "scoring": "sqrtsoftplus", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "groups that are no power of two": {
        "num_experts": 18, "top_k": 3, "routing": "noaux_tc", "n_group": 6, "topk_group": 2,
    },
    "one expert": {"num_experts": 1, "top_k": 1},
    "all experts": {"num_experts": 5, "top_k": 5, "norm_topk_prob": True},
}  # fmt: skip


def config_of(name: str) -> MoEConfig:
    fixed: dict[str, Any] = {
        "intermediate_size": 8, "num_shared": 0, "routing": "greedy", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    return MoEConfig(**(fixed | ROUTINGS[name]))


@partial(jax.jit, static_argnames="config")
def by_xla(
    logits: jax.Array, bias: jax.Array | None, valid: jax.Array | None, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """`moe.choose_experts` of these logits by XLA."""
    params = {"router": jnp.eye(config.num_experts), "correction_bias": bias}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_choice, "why_not", lambda num_experts: ["it is compared with XLA"])
        return moe.choose_experts(params, logits, config, jnp.zeros(len(logits), jnp.int32), valid, logits[None])


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "far apart"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_kernel_chooses_as_xla_does(name: str, kind: str, backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    config, rng = config_of(name), np.random.default_rng(7)
    tokens = 33 if backend == "cpu" else 4097
    logits = rng.standard_normal((tokens, config.num_experts)).astype(np.float32)
    bias = rng.standard_normal(config.num_experts).astype(np.float32) / 8
    if kind == "ties":
        logits, bias = np.round(2 * logits) / 2, np.round(bias)
    elif kind == "equal":
        logits[:], bias[:] = 0.25, 0
    elif kind == "far apart":
        logits *= 40
    given = jnp.asarray(bias) if config.routing == "noaux_tc" else None
    valid = jnp.asarray(rng.random(tokens) < 0.7) if kind == "random" else None
    arrays = jnp.asarray(logits), given, valid
    experts, weights = jax.jit(expert_choice.choose, static_argnums=3)(*arrays, moe.choice_of(config))
    wanted, wanted_weights = by_xla(*arrays, config)
    # Scores that differ by less than their rounding may change places; their weights are alike then.
    same = np.asarray(experts == wanted).mean()
    assert same == 1 if kind in ("ties", "equal") and name != "V4" else same > 0.99
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-5, atol=1e-7)
    rows = np.asarray(experts)[slice(None) if valid is None else np.asarray(valid)]
    assert all(len(set(row)) == config.top_k + config.num_shared for row in rows.tolist())


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_what_is_no_number_is_chosen_and_shows(backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    config = config_of("V3")
    logits = jnp.zeros((2, 256)).at[1, 100].set(jnp.nan)
    bias = jnp.zeros(256).at[9].set(1.0)
    experts, weights = expert_choice.choose(logits, bias, None, moe.choice_of(config))
    assert np.isfinite(weights[0]).all() and experts[0, 0] == 9
    assert experts[1, 0] == 100 and np.isnan(weights[1, :8]).all()
    logits = jnp.zeros((1, 64)).at[0, 3].set(jnp.nan)
    _, weights = expert_choice.choose(logits, None, None, moe.choice_of(config_of("V2-Lite")))
    assert np.isnan(weights[0, :6]).all() and (weights[0, 6:] == 1).all()
    with pytest.raises(ValueError, match="correction_bias = None; legal with routing 'noaux_tc'"):
        moe.choose_experts({"router": jnp.eye(256)}, jnp.zeros((1, 256)), config, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("name", ["V2-Lite", "V2", "V3", "V4", "groups that are no power of two", "all experts"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_experts_differ_however_few_choices_are_finite(name: str, backend: str) -> None:
    """A bias of -inf masks experts, and logits may be infinite or no numbers: both forms choose the same experts, each
    once, and weigh them alike."""
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    config, rng = config_of(name), np.random.default_rng(11)
    num_experts = config.num_experts
    logits = rng.standard_normal((14, num_experts)).astype(np.float32)
    few = rng.permutation(num_experts)[: max(1, config.top_k - 2)]
    logits[0] = -np.inf
    logits[1] = np.nan
    logits[2] = -np.nan
    logits[3, 0], logits[4, -1], logits[5, num_experts // 2] = np.nan, -np.nan, np.inf
    logits[6, np.setdiff1d(np.arange(num_experts), few)] = -np.inf
    logits[7, few] = np.inf
    logits[8, few] = np.nan
    logits[9, few] = -np.nan
    logits[10, ::3] = np.nan
    logits[11, ::2] = -np.inf
    masked = np.full(num_experts, -np.inf, np.float32)
    masked[few] = 0
    biases = [masked, np.full(num_experts, -np.inf, np.float32), np.full(num_experts, np.nan, np.float32)]
    mixed = np.zeros(num_experts, np.float32)
    mixed[few[0]], mixed[few[-1]] = np.inf, -np.inf
    for bias in [*biases, mixed] if config.routing == "noaux_tc" else [None]:
        arrays = jnp.asarray(logits), None if bias is None else jnp.asarray(bias), None
        experts, weights = jax.jit(expert_choice.choose, static_argnums=3)(*arrays, moe.choice_of(config))
        wanted, wanted_weights = by_xla(*arrays, config)
        np.testing.assert_array_equal(experts, wanted)
        np.testing.assert_allclose(weights, wanted_weights, rtol=2e-5, atol=1e-7)
        routed = np.asarray(experts)[:, : config.top_k]
        assert all(len(set(row)) == config.top_k for row in routed.tolist())
        assert (routed >= 0).all() and (routed < num_experts).all()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_logits_may_come_as_parts_of_their_sums(backend: str) -> None:
    if jax.default_backend() != backend:
        pytest.skip(f"jax's default device is no {backend}")
    config, rng = config_of("V3"), np.random.default_rng(12)
    parts = jnp.asarray(np.round(8 * rng.standard_normal((3, 5, 256))) / 8, jnp.float32)
    bias = jnp.zeros(256)
    for got, wanted in zip(
        expert_choice.choose(parts, bias, None, moe.choice_of(config)),
        expert_choice.choose(parts.sum(axis=0), bias, None, moe.choice_of(config)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)


def test_a_router_uses_the_kernel_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("V2-Lite")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 16), (64, 16))]

    def traced() -> str:
        ids = jnp.zeros(3, jnp.int32)
        return str(jax.make_jaxpr(lambda x, w: moe.choose_experts({"router": w}, x, config, ids))(*shapes))

    assert "choose_experts" not in traced()
    assert expert_choice.why_not(config.num_experts) and "a cpu" in expert_choice.why_not(config.num_experts)[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert expert_choice.why_not(config.num_experts) == []
    assert "choose_experts" in traced() and " top_k[" not in traced()
    assert "there are 1025 experts; the kernel holds at most 1024" in expert_choice.why_not(1025)[0]
