"""Routing against the papers' formulas written token by token, and the experts' blocks against a plain sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax.generate import ModelConfig, explaining, model, moe
from tsmla_jax.generate.config import MoEConfig
from tsmla_jax.generate.explaining import Choice, explain_experts
from tsmla_jax.generate.model_types import Routing
from tsmla_jax.nn.products import row_blocks, triton
from tsmla_jax.nn.products.block_scaled import BlockScaled, with_products
from tsmla_jax.nn.products.tiles import PLAIN_PAIRS
from tsmla_jax.ops import device

WIDTH, EXPERTS = 12, 8


def config(routing: Routing, **overrides: object) -> MoEConfig:
    values = {
        "num_experts": EXPERTS, "top_k": 3, "intermediate_size": 5, "num_shared": 0, "routing": routing, "n_group": 4,
        "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    return MoEConfig(**{**values, **overrides})  # type: ignore[arg-type]


def plain_route(x: np.ndarray, router: np.ndarray, bias: np.ndarray, c: MoEConfig) -> dict[int, float]:
    """One token's experts and weights, in float64 Python."""
    logits = router.astype(np.float64) @ x.astype(np.float64)
    if c.routing == "noaux_tc":
        scores = np.log1p(np.exp(logits)) ** 0.5 if c.scoring == "sqrtsoftplus" else 1 / (1 + np.exp(-logits))
        choice = scores + bias
    else:
        scores = choice = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    allowed = range(c.num_experts)
    if c.routing != "greedy":
        size = c.num_experts // c.n_group
        groups = [range(g * size, (g + 1) * size) for g in range(c.n_group)]
        best = {"noaux_tc": 2, "group_limited_greedy": 1}[c.routing]
        rank = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:best]))
        allowed = [e for g in rank[: c.topk_group] for e in g]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: c.top_k]
    total = sum(scores[e] for e in chosen) if c.norm_topk_prob else 1.0
    return {e: scores[e] / total * c.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize(
    ("routing", "overrides"),
    [
        ("greedy", {}),
        ("greedy", {"norm_topk_prob": True, "routed_scaling_factor": 16.0}),
        ("group_limited_greedy", {"routed_scaling_factor": 16.0}),
        ("group_limited_greedy", {"topk_group": 3, "n_group": 8}),
        ("noaux_tc", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
        ("noaux_tc", {"n_group": 2, "topk_group": 1}),
        ("noaux_tc", {"n_group": 1, "topk_group": 1}),
        ("noaux_tc", {"n_group": 1, "topk_group": 1, "scoring": "sqrtsoftplus", "norm_topk_prob": True}),
    ],
)
def test_route(routing: Routing, overrides: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, WIDTH), np.float32)
    router = rng.standard_normal((EXPERTS, WIDTH), np.float32)
    bias = rng.standard_normal(EXPERTS).astype(np.float32)
    c = config(routing, **overrides)
    experts, weights = jax.jit(moe.route, static_argnums=3)(x, router, bias if routing == "noaux_tc" else None, c)
    for token in range(len(x)):
        expected = plain_route(x[token], router, bias, c)
        got = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("routing", ["group_limited_greedy", "noaux_tc"])
def test_groups_are_chosen_without_sorting(routing: Routing) -> None:
    """Each top_k is kernels of its own; only the experts' is left. Of groups that are alike the first ones count."""
    c, x, router, bias = config(routing), jnp.ones((2, WIDTH)), jnp.zeros((EXPERTS, WIDTH)), jnp.zeros(EXPERTS)
    traced = jax.make_jaxpr(moe.route, static_argnums=3)(x, router, bias, c)
    assert str(traced).count(" top_k[") == 1
    assert moe.route(x, router, bias, c)[0].tolist() == [[0, 1, 2]] * 2


def test_noaux_tc_needs_its_bias() -> None:
    with pytest.raises(ValueError, match="correction_bias"):
        moe.route(jnp.zeros((1, WIDTH)), jnp.zeros((EXPERTS, WIDTH)), None, config("noaux_tc"))


@pytest.mark.parametrize(
    ("routing", "overrides", "named"),
    [
        ("softmax", {}, "topk_method"),
        ("greedy", {"top_k": 9}, "num_experts_per_tok"),
        ("noaux_tc", {"n_group": 3}, "n_group"),
        ("noaux_tc", {"topk_group": 5}, "topk_group"),
        ("noaux_tc", {"topk_group": 1}, "num_experts_per_tok"),
        ("noaux_tc", {"n_group": 8, "topk_group": 3}, "n_group"),
        ("noaux_tc", {"scoring": "tanh"}, "scoring_func"),
        ("noaux_tc", {"swiglu_limit": 0.0}, "swiglu_limit"),
    ],
)
def test_impossible_routings_are_named(routing: Routing, overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} = .*legal"):
        config(routing, **overrides)


def test_a_table_chooses_by_token_id_and_the_router_weighs() -> None:
    rng = np.random.default_rng(0)
    c = config("noaux_tc", n_group=1, topk_group=1, scoring="sqrtsoftplus", norm_topk_prob=True, swiglu_limit=0.7)
    table = rng.integers(0, EXPERTS, (20, c.top_k)).astype(np.int32)  # an expert may be named twice
    tokens, x = rng.integers(0, 20, 30), rng.standard_normal((30, WIDTH), np.float32)
    shapes = {"router": (EXPERTS, WIDTH), "gate_up": (EXPERTS, 10, WIDTH), "down": (EXPERTS, WIDTH, 5)}
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    mixed = jax.jit(moe.mixture_of_experts, static_argnames="config")
    out = mixed({**params, "expert_table": table}, x, np.ones(30, bool), c, tokens)

    expected = np.zeros((30, WIDTH))
    for row, token in enumerate(tokens):
        scores = np.log1p(np.exp(params["router"].astype(np.float64) @ x[row])) ** 0.5
        total = scores[table[token]].sum()
        for expert in table[token]:
            gate, up = np.split(params["gate_up"][expert].astype(np.float64) @ x[row], 2)
            gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
            expected[row] += scores[expert] / total * (params["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(out, expected, atol=2e-5, rtol=2e-5)


def test_padded_mlps_mean_the_same(tiny_model: tuple[ModelConfig, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_LONG_SUM", 8)
    model_config, params = tiny_model
    plain, padded = (some["layers"][0]["mlp"] for some in (params, model.fold(params, model_config)))
    assert plain["down"].shape == (32, 48) and padded["down"].shape == (32, 256) and len(padded["gate_up"]) == 512
    x = np.random.default_rng(0).standard_normal((3, 32), np.float32)
    np.testing.assert_allclose(moe.gated_mlp(x, **padded), moe.gated_mlp(x, **plain), atol=1e-6)


@pytest.mark.parametrize("form", ["one by one", "ragged"])
@pytest.mark.parametrize("tokens", [1, 7, 200])
@pytest.mark.parametrize("spread", ["even", "one expert", "random"])
def test_experts_equal_the_plain_sum(tokens: int, spread: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "ragged":
        # Of the forms that a CPU can run, what another device falls back to.
        monkeypatch.setattr(moe, "_experts_in_turn", moe._ragged_experts)
    rng = np.random.default_rng(tokens)
    top_k = 2
    experts = {
        "even": np.arange(tokens * top_k).reshape(tokens, top_k) % EXPERTS,
        "one expert": np.full((tokens, top_k), 5),
        "random": rng.integers(0, EXPERTS, (tokens, top_k)),
    }[spread]
    weights = rng.random((tokens, top_k)).astype(np.float32)
    valid = rng.random(tokens) < 0.8
    x = rng.standard_normal((tokens, WIDTH), np.float32)
    x[~valid] = np.nan
    gate_up = rng.standard_normal((EXPERTS, 10, WIDTH), np.float32)
    down = rng.standard_normal((EXPERTS, WIDTH, 5), np.float32)
    there = np.where(valid[:, None], experts, len(gate_up)).astype(np.int32)
    out = jax.jit(moe.mix_experts)(x, there, weights, gate_up, down).astype(x.dtype)

    expected = np.zeros((tokens, WIDTH))
    for token in np.flatnonzero(valid):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ x[token], 2)
            expected[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(out, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("dtype", "width", "why"),
    [
        ("bfloat16", 256, {"fp8": "", "wide": ""}),
        ("float16", 256, {"fp8": "dtype is float16; legal: bfloat16", "wide": ""}),
        ("bfloat16", 192, {"fp8": "the weights are 128 x 192; legal: multiples of 64 and of 128", "wide": ""}),
        ("float32", 256, {"fp8": "legal: bfloat16", "wide": "legal: bfloat16, float16"}),
    ],
)
def test_the_choice_of_the_experts_is_that_of_their_weights(
    dtype: str, width: int, why: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    wide = {"router": jnp.zeros((4, 128)), "down": jnp.zeros((4, 128, width), dtype)}
    narrow = {**wide, "down": BlockScaled(jnp.zeros((4, 128, width), jnp.float8_e4m3fn), jnp.ones((4, 1, 2)))}
    layers = {"dense": {"down": jnp.zeros((128, 64))}, "fp8": narrow, "wide": wide}

    def choices(*names: str) -> list[Choice]:
        return explain_experts({"layers": [{"mlp": layers[name]} for name in names]}, jnp.dtype(dtype))

    for kind, reason in why.items():
        (choice,) = choices("dense", kind, kind)
        assert choice.implementation == ("lax.ragged_dot" if reason else "grouped") and reason in choice.why
    assert choices("dense") == []
    both = ["experts (fp8 weights)", f"experts ({dtype} weights)"]
    assert [choice.op for choice in choices("fp8", "wide")] == both
    assert choices("fp8")[0].why.startswith("not grouped_block_scaled_matmul: ")
    with device.planned_for("sm_90a"):
        (choice,) = choices("fp8")
    if dtype != "float32":
        assert choice.implementation == "grouped_block_scaled_matmul"
        assert choice.why == "exact products of fp8 weights, the best there is"
    else:
        assert "x's dtype is float32; the sm_90 kernel of block-scaled products takes" in choice.why
    layers["fp8"] = with_products(narrow, "exact")
    (choice,) = choices("fp8")
    assert choice.implementation == "grouped_block_scaled_matmul" and choice.why.startswith("exact products")


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 40, 120, 200])
@pytest.mark.sampled(3)
def test_grouped_experts_by_every_form_of_their_tiles(
    tokens: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grouped products, by the kernels' interpreter, equal the experts in turn, with blocks made by XLA and by a
    kernel; the last tokens' tiles are those of a prompt."""
    monkeypatch.setattr(row_blocks, "BLOCKS_BY_KERNEL", 1000 if chosen else 0)
    monkeypatch.setattr(triton, "why_no_triton", list)
    rng = np.random.default_rng(0)
    top_k, count, width = 2, 8, 128

    def weight(*shape: int) -> BlockScaled:
        scales = rng.uniform(0.5, 2, (shape[0], *(size // 128 for size in shape[1:])))
        values = jnp.asarray(rng.standard_normal(shape) / 8, jnp.float8_e4m3fn)
        return BlockScaled(values, jnp.asarray(scales, jnp.float32))

    gate_up, down = weight(count, 2 * width, width), weight(count, width, width)
    experts = np.stack([rng.permutation(count + 1)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)

    def mix() -> np.ndarray:
        """By a program of its own: the choice of the way is made when it is traced."""
        program = jax.jit(lambda *arrays: moe.mix_experts(*arrays))
        return np.asarray(program(x, experts, weights, gate_up, down))

    expected = mix()
    monkeypatch.setattr(moe, "why_not_grouped", lambda *_: [])
    np.testing.assert_allclose(mix(), expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.parametrize("products", ["exact", "quantized"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_copied_before_products_change_nothing(
    dtype: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With experts without rows and tokens without experts; experts of 16 bits do not copy."""
    rng, count = np.random.default_rng(0), 5

    def weight(*shape: int) -> BlockScaled:
        values = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
        scales = rng.uniform(0.02, 0.04, (shape[0], shape[1] // 128, shape[2] // 128))
        return BlockScaled(values, jnp.asarray(scales, jnp.float32), products)

    gate_up, down = weight(count, 256, 256), weight(count, 256, 128)
    experts = np.stack([rng.permutation([0, 1, 3, 4, count])[:3] for _ in range(30)]).astype(np.int32)
    x, weights = jnp.asarray(rng.standard_normal((30, 256)), dtype), rng.random((30, 3)).astype(np.float32)

    def mix() -> np.ndarray:
        program = jax.jit(lambda *arrays: moe.mix_experts(*arrays, limit=1.0))
        return np.asarray(program(x, experts, weights, gate_up, down))

    expected = mix()
    monkeypatch.setattr(moe, "COPIED_PAIRS", {products: ((2, 3), (18, 18))})
    assert moe._copies_rows(x, gate_up, 90, count) and not moe._copies_rows(x, gate_up, 91, count)
    assert moe._copies_rows(x, gate_up, 15, count) and not moe._copies_rows(x, gate_up, 16, count)
    assert not moe._copies_rows(x, gate_up.widened(x.dtype), 90, count)
    assert not moe._copies_rows(x.astype(jnp.float32), gate_up, 90, count)
    np.testing.assert_array_equal(mix(), expected)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_of_16_bits_by_products_of_groups(dtype: str, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal the experts in turn, with experts without rows, tokens without experts and an unused weight."""
    rng, count, width, hidden = np.random.default_rng(0), 5, 128, 64
    stacks = [rng.standard_normal(size) / 8 for size in ((count + 1, 2 * width, hidden), (count, hidden, width))]
    gate_up, down = (jnp.asarray(stack, dtype) for stack in stacks)
    experts = np.stack([rng.permutation([0, 1, 3, 4, count])[:3] for _ in range(70)]).astype(np.int32)
    x, weights = jnp.asarray(rng.standard_normal((70, hidden)), dtype), rng.random((70, 3)).astype(np.float32)

    def mix() -> np.ndarray:
        program = jax.jit(lambda *arrays: moe.mix_experts(*arrays, limit=1.0))
        return np.asarray(program(x, experts, weights, gate_up, down))

    expected = mix()
    monkeypatch.setattr(moe, "why_not_plain", lambda *_: [])
    monkeypatch.setattr(moe, "PLAIN_PAIRS", 0 if copied else 1000)
    np.testing.assert_allclose(mix(), expected, atol=2**-7 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("tokens", "way"), [(4 * PLAIN_PAIRS - 1, "_grouped_experts"), (4 * PLAIN_PAIRS, "_sorted_experts")]
)
def test_experts_of_16_bits_with_many_rows_take_products_of_groups(
    tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    taken = []
    for name in ("_grouped_experts", "_sorted_experts"):

        def run(x: jax.Array, experts: jax.Array, *_: object, name: str = name) -> jax.Array:
            taken.append(name)
            return jnp.zeros((*experts.shape, 16), x.dtype)

        monkeypatch.setattr(moe, name, run)
    for name in ("why_not_grouped", "why_not_plain"):
        monkeypatch.setattr(moe, name, lambda *_: [])
    arrays = [((tokens, 16), "bfloat16"), ((tokens, 1), "int32"), ((tokens, 1), "float32"), ((4, 64, 16), "bfloat16")]
    given = [jax.ShapeDtypeStruct(*array) for array in (*arrays, ((4, 16, 32), "bfloat16"))]
    jax.eval_shape(moe.mix_experts, *given)
    assert taken == [way]


def test_experts_of_16_bits_need_no_pallas_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def stack(dtype: str, width: int = 1408) -> jax.Array:
        return jax.ShapeDtypeStruct((64, 2048, width), dtype)  # type: ignore[return-value]

    down = stack("bfloat16")
    assert moe.why_not_plain("bfloat16", down, down)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(explaining, "why_not_grouped", lambda *_: ["jax has no Triton backend"])
    with device.planned_for("sm_90a"):
        assert not moe.why_not_plain("bfloat16", down, down)
        assert "bfloat16 or float16" in moe.why_not_plain("float16", down, down)[0]
        assert (
            "N is 192; the sm_90 kernel"
            in moe.why_not_plain("bfloat16", stack("bfloat16", 96), stack("bfloat16", 96))[0]
        )
        assert moe.why_not_mxfp4("bfloat16", 2048, 96) == [
            "N is 192; the sm_90 kernel of block-scaled products takes a multiple of 256 if gated",
            "K is 96; the sm_90 kernel of block-scaled products takes a multiple of 128 with packed weights",
        ]
        params = {"layers": [{"mlp": {"router": None, "down": down}}]}
        (choice,) = explain_experts(params, jnp.dtype("bfloat16"))
        monkeypatch.setattr(explaining, "why_not_grouped", lambda *_: [])
        (both,) = explain_experts(params, jnp.dtype("bfloat16"))
    assert choice == Choice("experts", "grouped_block_scaled_matmul", "not grouped: jax has no Triton backend")
    assert both.implementation == "grouped" and f"grouped_block_scaled_matmul from {PLAIN_PAIRS} rows" in both.why


@pytest.mark.parametrize(("tokens", "width", "first"), [(511, 128, False), (512, 128, True), (512, 2**22, False)])
def test_experts_with_many_rows_are_widened_first(
    tokens: int, width: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products then read bf16, unless a stack would have more than WIDENED_BYTES."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def weight(*shape: int) -> Any:
        scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.float32)
        return BlockScaled(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)  # type: ignore[arg-type]

    x = jax.ShapeDtypeStruct((tokens, 128), jnp.bfloat16)
    experts, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    stacks = weight(4, 2 * width, 128), weight(4, 128, width)
    traced = str(jax.make_jaxpr(moe.mix_experts)(x, experts, weights, *stacks))
    assert (f"bf16[4,{2 * width},128]" in traced) == first
