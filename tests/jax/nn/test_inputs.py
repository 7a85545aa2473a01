"""What the functions of layers refuse: the message names the argument, what it got and what is legal."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsmla_jax import nn
from tsmla_jax.nn import MLAConfig, Segments, Step, functional, v4, v32

CONFIG = MLAConfig(
    hidden_size=64,
    num_attention_heads=2,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    q_lora_rank=24,
)
V32 = v32.V32Config(CONFIG, index_n_heads=2, index_head_dim=32, index_topk=8)
TABLES: Any = np.array([[0, 1], [2, 3]], np.int32)
LENS: Any = np.array([18, 7], np.int32)
CU: Any = np.array([0, 3, 5], np.int32)
X, CACHE = np.zeros((5, 64), np.float32), np.zeros((4, 16, 48), np.float32)
DENSE: Any = functools.partial(Step.dense, new_tokens=2, page_size=16)
RAGGED: Any = functools.partial(Step.ragged, total_tokens=5, page_size=16)

AN_AXIS = "context_axis: got 'x'; legal: a mesh axis of a jax.shard_map around the call, or None"
STEP_CASES: list[tuple[dict[str, Any], str]] = [
    ({"block_tables": TABLES.astype(np.float32)}, "block_tables: got dtype float32; legal: int32"),
    ({"block_tables": TABLES.astype(np.int64)}, "block_tables: got dtype int64; legal: int32"),
    ({"block_tables": TABLES[0]}, r"block_tables: got shape \[2\] of rank 1; legal: \[B, M\]"),
    ({"block_tables": TABLES[:1]}, r"seq_lens: got shape \[2\]; axis 0 must be 1 \(B, block_tables's requests\)"),
    ({"block_tables": None}, "block_tables: got NoneType; legal: an array"),
    ({"seq_lens": LENS.astype(np.int64)}, "seq_lens: got dtype int64; legal: int32"),
    ({"seq_lens": [18, 7]}, "seq_lens: got list; legal: an array"),
    ({"context_axis": "x"}, AN_AXIS),
    ({"context_axis": 1}, "context_axis: got int; legal: the name of a mesh axis, or None"),
    ({"page_size": 0}, "page_size: got 0; legal: an int >= 1"),
]
DENSE_CASES: list[tuple[dict[str, Any], str]] = [
    ({"new_tokens": 2.0}, "new_tokens: got float; legal: a static int"),
    ({"new_tokens": -1}, "new_tokens: got -1; legal: an int >= 0"),
    ({"new_tokens": 2**31}, f"new_tokens: got {2**31}; legal: an int from 0 to {2**31 - 1}"),
]
RAGGED_CASES: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": CU[:2]}, r"cu_seqlens_q: got shape \[2\]; axis 0 must be 3 \(B \+ 1, of block_tables's requests"),
    ({"cu_seqlens_q": CU * 1.0}, "cu_seqlens_q: got dtype float32; legal: int32"),
    ({"total_tokens": "5"}, "total_tokens: got str; legal: a static int"),
    ({"max_q_len": -1}, "max_q_len: got -1; legal: an int >= 0"),
    ({"max_seq_len": 1.5}, "max_seq_len: got float; legal: a static int"),
]


@pytest.mark.parametrize(("changed", "message"), STEP_CASES + DENSE_CASES)
def test_a_dense_step(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        DENSE(**({"block_tables": TABLES, "seq_lens": LENS} | changed))


@pytest.mark.parametrize(("changed", "message"), STEP_CASES + RAGGED_CASES)
def test_a_ragged_step(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        RAGGED(**({"block_tables": TABLES, "seq_lens": LENS, "cu_seqlens_q": CU} | changed))


def test_a_step_without_pages_has_no_slot() -> None:
    step = DENSE(np.zeros((2, 0), np.int32), LENS)
    assert step.slot_mapping.tolist() == [[-1, -1], [-1, -1]]
    assert RAGGED(np.zeros((2, 0), np.int32), LENS, CU).slot_mapping.tolist() == [-1] * 5


def test_a_page_of_no_slot_in_32_bits_has_none() -> None:
    """2^28 pages of 16 tokens end at slot 2^32: the slots wrapped to 0 and the tokens after it."""
    step = DENSE(np.array([[0, 2**28], [2, 3]], np.int32), LENS)
    assert step.slot_mapping.tolist() == [[-1, -1], [2 * 16 + 5, 2 * 16 + 6]]


@functools.cache
def arguments(function: str) -> dict[str, Any]:
    """Legal arguments of a layer's function."""
    ragged, params = RAGGED(TABLES, LENS, CU, max_q_len=3), nn.init_params(jax.random.key(0), CONFIG)
    plain = {"params": params, "config": CONFIG, "x": X}
    sparse = plain | {"config": V32, "params": v32.init_params(jax.random.key(0), V32)}
    caches: Any = functools.partial(v32.init_cache, kv_dtype=jnp.float32, indexer_dtype=jnp.float32)
    prompts = {"cu_seqlens_q": CU, "max_q_len": 3}
    return {
        "prefill": plain | prompts,
        "decode": plain | {"kv_cache": CACHE, "step": ragged},
        "prefill_with_context": plain | {"kv_cache": CACHE, "step": ragged, "context_chunk": 16},
        "v32.prefill": sparse | prompts,
        "v32.attend": sparse | {"cache": caches(V32, 4, 16), "step": ragged},
    }[function]


EVERY = ("prefill", "decode", "prefill_with_context", "v32.prefill", "v32.attend")
CALLS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (EVERY, {"params": None}, r"params: got NoneType; legal: a dict of the weights of param_shapes\(config\)"),
    (EVERY, {"config": None}, "config: got NoneType; legal: (MLAConfig|V32Config)"),
    (EVERY, {"config": {"hidden_size": 64}}, "config: got dict; legal: (MLAConfig|V32Config)"),
    (EVERY, {"x": None}, "x: got NoneType; legal: an array"),
    (EVERY, {"x": X.astype(np.int32)}, "x: got dtype int32; legal: float16, bfloat16, float32"),
    (EVERY, {"x": X.astype(jnp.float8_e4m3fn)}, "x: got dtype float8_e4m3fn; legal: float16"),
    (EVERY, {"x": X[:, :63]}, r"x: got shape \[5, 63\]; legal: \[T, E\].* with E = 64, the config's"),
    (EVERY, {"params": {}}, "params: got no 'q_a_proj'; legal: the weights of param_shapes"),
    (EVERY[:3], {"context_axis": "x"}, "context_axis: got 'x'; legal: "),
    (EVERY[:1] + EVERY[3:4], {"cu_seqlens_q": CU.astype(np.int64)}, "cu_seqlens_q: got dtype int64; legal: int32"),
    (EVERY[:1] + EVERY[3:4], {"cu_seqlens_q": CU * 1.0}, "cu_seqlens_q: got dtype float32; legal: int32"),
    (EVERY[:1] + EVERY[3:4], {"cu_seqlens_q": None}, "cu_seqlens_q: got NoneType; legal: an array"),
    (EVERY[:1] + EVERY[3:4], {"cu_seqlens_q": CU[:0]}, r"cu_seqlens_q: got shape \[0\]; B \+ 1 must be at least 1"),
    (EVERY[:1] + EVERY[3:4], {"max_q_len": None}, "max_q_len: got NoneType; legal: a static int"),
    (EVERY[1:3], {"kv_cache": None}, "kv_cache: got NoneType; legal: an array"),
    (EVERY[1:3], {"kv_cache": CACHE[..., :47]}, r"kv_cache: got shape \[4, 16, 47\]; legal: .* D = 48, the config's"),
    (EVERY[1:2], {"q_scale": "x"}, "q_scale: got str; legal: a float or a float32 scalar array"),
    (EVERY[1:2], {"q_scale": -1.0}, "q_scale: got -1.0; legal: a positive number"),
    (EVERY[1:2], {"q_scale": np.ones((3, 3), np.float32)}, r"q_scale: got an array of shape \[3, 3\]; legal: a float"),
    (EVERY[2:3], {"context_chunk": 4.0}, "context_chunk: got float; legal: a static int"),
    (EVERY[2:3], {"context_passes": -1}, "context_passes: got -1; legal: an int >= 0"),
    (EVERY[2:3], {"context_passes": True}, "context_passes: got True; legal: an int"),
    (EVERY[4:], {"cache": None}, "cache: got NoneType; legal: V32Cache, which v32.init_cache makes"),
]


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [(function, changed, message) for functions, changed, message in CALLS for function in functions],
)
def test_a_layers_function(function: str, changed: dict[str, Any], message: str) -> None:
    module, _, name = function.rpartition(".")
    call = getattr(v32 if module else functional, name)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(**(arguments(function) | changed))


V4: Any = v4.V4Config(
    kind="csa",
    ratio=4,
    hidden_size=24,
    num_attention_heads=4,
    q_lora_rank=8,
    head_dim=16,
    rope_dim=8,
    sliding_window=8,
    o_groups=2,
    o_lora_rank=8,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=4,
)


def test_deepseek_v4_refuses_other_arguments() -> None:
    attend: Any = v4.attend
    with pytest.raises(TypeError, match=r"^config: got MLAConfig; legal: V4Config"):
        attend({}, CONFIG, X, None, None)
    step = RAGGED(TABLES, LENS, CU)
    rest: Any = {"state_slots": LENS, "compressed_tables": TABLES, "page_size": 16}
    with pytest.raises(TypeError, match=r"^config: got MLAConfig; legal: V4Config"):
        v4.make_step(CONFIG, step, cos_sin=X, **rest)
    with pytest.raises(TypeError, match=r"^config: got NoneType; legal: V4Config"):
        v4.rope_table(None, 4)  # type: ignore[arg-type]
    table = v4.rope_table(V4, 4)
    with pytest.raises(ValueError, match=AN_AXIS):
        v4.make_step(V4, step, cos_sin=table, context_axis="x", **rest)
    with pytest.raises(ValueError, match=r"^params: got no 'q_a_proj'; legal: the weights of param_shapes"):
        v4.prefill(
            {}, V4, jnp.zeros((9, 24)), cu_seqlens_q=jnp.array([0, 9]), max_q_len=9, cos_sin=v4.rope_table(V4, 9)
        )
    with pytest.raises(ValueError, match=r"^cos_sin: got shape \[4, 6\]; legal: \[N, R\] with .* R = 8"):
        v4.make_step(V4, step, cos_sin=table[:, :6], **rest)
    prefill: Any = functools.partial(v4.prefill, v4.init_params(jax.random.key(0), V4), V4, jnp.zeros((9, 24)))
    cu = jnp.array([0, 9], jnp.int32)
    with pytest.raises(ValueError, match=r"^cos_sin: got shape \[4, 8\]; legal: \[N, R\] with N at least 9"):
        prefill(cu_seqlens_q=cu, max_q_len=9, cos_sin=table)
    with pytest.raises(TypeError, match=r"^index_loss: got str; legal: True or False"):
        prefill(cu_seqlens_q=cu, max_q_len=9, cos_sin=v4.rope_table(V4, 9), index_loss="no")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_pages": -1}, "num_pages: got -1; legal: an int >= 0"),
        ({"page_size": 0}, "page_size: got 0; legal: an int >= 1"),
        ({"page_size": True}, "page_size: got True; legal: an int"),
        ({"kv_dtype": jnp.int32}, "kv_dtype: got int32; legal: uint8, float16"),
        ({"indexer_dtype": "bfloat61"}, "indexer_dtype: got 'bfloat61'; legal: a dtype"),
        ({"config": CONFIG}, "config: got MLAConfig; legal: V32Config"),
    ],
)
def test_new_caches(changed: dict[str, Any], message: str) -> None:
    sizes: Any = {"config": V32, "num_pages": 4, "page_size": 16, "kv_dtype": jnp.bfloat16} | changed
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        v32.init_cache(**sizes)
    if "page_size" in changed:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            v4.init_cache(V4, window_pages=2, compressed_pages=2, num_states=1, page_size=changed["page_size"])


def test_shapes_of_another_config() -> None:
    for model, given, kind in ((nn, V32, "MLAConfig"), (v32, CONFIG, "V32Config"), (v4, {}, "V4Config")):
        with pytest.raises(TypeError, match=f"config: got {type(given).__name__}; legal: {kind}"):
            model.param_shapes(given)
    with pytest.raises(TypeError, match="config: got dict; legal: MLAConfig"):
        nn.MLAttention({}, params={})


def test_flags_are_booleans() -> None:
    attend: Any = functools.partial(v32.attend, **arguments("v32.attend"))
    with pytest.raises(TypeError, match=r"^return_selected: got str; legal: True or False"):
        attend(return_selected="no")
    with pytest.raises(TypeError, match=r"^dense: got str; legal: True or False"):
        v32.prefill(**arguments("v32.prefill"), dense="no")
    q: Any = jnp.zeros((1, 3, 2, 16))
    with pytest.raises(TypeError, match=r"^return_residual: got int; legal: True or False"):
        nn.dot_product_attention(q, q, q, return_residual=2)  # type: ignore[call-overload]


def test_segments() -> None:
    from_ids: Any = Segments.from_ids
    with pytest.raises(TypeError, match=r"^max_segments: got float; legal: a static int"):
        from_ids(jnp.ones((1, 3), jnp.int32), max_segments=2.0)
    with pytest.raises(TypeError, match=r"^ids: got NoneType; legal: an array"):
        from_ids(None, max_segments=2)
    segments, q = from_ids(jnp.ones((1, 3), jnp.int32), max_segments=1), jnp.zeros((1, 3, 2, 16))
    attend: Any = functools.partial(nn.segment_attention, softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"^segments: got NoneType; legal: Segments, which Segments.from_ids makes"):
        attend(q, q, q, None)
    with pytest.raises(TypeError, match=r"^k: got NoneType; legal: an array"):
        attend(q, None, q, segments)
    with pytest.raises(ValueError, match=r"^q: got dtype int32; legal: float16"):
        attend(q.astype(jnp.int32), q, q, segments)
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 3, 0, 16\); .* with at least one head"):
        attend(q[:, :, :0], q, q, segments)
