"""examples/maxtext under a stand-in of MaxText's AttentionOp, which its installation can't bring here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.jax.nn.examples import load

IDS = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], jnp.int32)


class AttentionOp:
    """What the example reads of MaxText's class, and the signature of the method that it wraps."""

    attention_type, attention_kernel = SimpleNamespace(value="mla"), "tsmla"
    attn_logits_soft_cap, dropout_rate = None, 0.0
    flash_axis_names_q = ("activation_batch_attn", "activation_heads", "activation_length", "activation_kv")
    rules: dict[str, Any] = {  # noqa: RUF012
        "activation_batch_attn": ("data", "fsdp"),
        "activation_heads": "tensor",
        "activation_length": "context",
    }

    def __init__(self, **config: Any) -> None:
        fields = {"packing": True, "dataset_type": "hf", "max_segments_per_seq": 2, "qk_rope_head_dim": 4, **config}
        self.config = SimpleNamespace(**fields)
        self.mesh = jax.make_mesh((1, 2, 2, 1), ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)

    def _logical_to_mesh_axes(self, names: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(self.rules.get(name) for name in names))

    def apply_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        decoder_segment_ids: Any,
        segment_positions: Any,
        lengths: Any,
        model_mode: str,
        use_ragged_attention: bool = False,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: Any = None,
        indexer_mask: Any = None,
        compressed_mask: Any = None,
        record_max_logits: bool = False,
        decoder_segment_ids_kv: Any = None,
        *,
        qk_product_einsum: Any,
        wv_product_einsum: Any,
    ) -> Any:
        return "theirs"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, installed in the stand-in."""
    layers = ModuleType("maxtext.layers.attention_op")
    layers.AttentionOp = AttentionOp  # type: ignore[attr-defined]
    for name in ("maxtext", "maxtext.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "maxtext.layers.attention_op", layers)
    monkeypatch.setattr(AttentionOp, "apply_attention", AttentionOp.apply_attention)
    module = load("maxtext/tsmla_attention")
    module.install()
    return module


def call(op: AttentionOp, *arrays: Any, ids: Any = IDS, model_mode: str = "train", **others: Any) -> Any:
    """As AttentionOp.__call__ does."""
    query, key, value = arrays
    return op.apply_attention(
        query=query,
        key=key,
        value=value,
        decoder_segment_ids=ids,
        segment_positions=None,
        lengths=None,
        model_mode=model_mode,
        use_ragged_attention=False,
        qk_product_einsum=None,
        wv_product_einsum=None,
        **others,
    )


def operands() -> list[jax.Array]:
    """query, key and value as MLA makes them: all heads of a key have its rope columns."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 12, 2, d), np.float32) for d in (12, 12, 8))
    return [jnp.asarray(query), jax.jit(shared_columns)(key), jnp.asarray(value)]


def shared_columns(key: jax.Array) -> jax.Array:
    """The key with the last four columns of its first head in both heads."""
    nope, rope = jnp.split(key, [8], axis=-1)
    return jnp.concatenate([nope, jnp.broadcast_to(rope[:, :, :1], rope.shape)], axis=-1)


def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return with_maxima(query, key, value)[0]


def with_maxima(
    query: jax.Array, key: jax.Array, value: jax.Array, chosen: Any = True, sinks: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The attention of `chosen` pairs within segments, and the greatest logits [B, H]."""
    visible = (IDS[:, :, None] == IDS[:, None]) & (IDS != 0)[:, :, None] & np.tri(12, dtype=bool) & chosen
    scores = jnp.where(visible[:, None], jnp.einsum("bqhd,bkhd->bhqk", query, key), -1e30)
    sink = jnp.full((1, scores.shape[1], 1, 1), -1e30) if sinks is None else sinks[:, None, None]
    columns = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:3], 1))], axis=-1)
    weights = jnp.where(visible[:, None], jax.nn.softmax(columns, axis=-1)[..., :-1], 0)
    return jnp.einsum("bhqk,bkhv->bqhv", weights, value), scores.max((2, 3))


def test_it_trains_over_a_mesh(example: Any) -> None:
    def installed(*arrays: jax.Array) -> jax.Array:
        out, maximum, total = call(AttentionOp(), *arrays)
        assert maximum is None and total is None
        return out

    def run(attend: Any) -> Any:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return (attend(query, shared_columns(key), value) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands())

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(installed), run(dense))
    assert Path(example.__file__).name == "tsmla_attention.py"


@pytest.mark.usefixtures("example")
def test_other_choices_stay_maxtexts() -> None:
    op = AttentionOp()
    op.attention_kernel = "cudnn_flash_te"
    assert call(op, *operands()) == "theirs"


@pytest.mark.usefixtures("example")
def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = operands()
    with pytest.raises(ValueError, match="model_mode: got autoregressive, which attention=tsmla doesn't run"):
        call(AttentionOp(), *arrays, model_mode="autoregressive")
    with pytest.raises(
        ValueError, match="previous_chunk, compressed_mask: got a value; legal with attention=tsmla: None"
    ):
        call(AttentionOp(), *arrays, previous_chunk=arrays[0], compressed_mask=arrays[0])
    with pytest.raises(ValueError, match="max_segments_per_seq: got -1; legal with packing=true: at least 1"):
        call(AttentionOp(max_segments_per_seq=-1), *arrays)
    op = AttentionOp()
    op.attention_type = SimpleNamespace(value="chunk")
    with pytest.raises(ValueError, match="attention_type: got chunk; legal with attention=tsmla: global, mla"):
        call(op, *arrays)
    op = AttentionOp()
    op.dropout_rate = 0.1
    with pytest.raises(ValueError, match=r"^dropout_rate: got 0\.1; legal with attention=tsmla: None or 0"):
        call(op, *arrays)
    monkeypatch.setitem(AttentionOp.rules, "activation_length", "tensor")
    monkeypatch.setitem(AttentionOp.rules, "activation_heads", None)
    with pytest.raises(ValueError, match="splits the length over 'tensor'; legal: rows and heads only"):
        call(AttentionOp(), *arrays)


@pytest.mark.usefixtures("example")
def test_rows_that_are_not_packed() -> None:
    """One segment a row, and None for the ids of rows without padding."""
    op = AttentionOp(packing=False, max_segments_per_seq=-1)
    out = jax.jit(lambda *arrays: call(op, *arrays, ids=None)[0])(*operands())
    want = jax.jit(dense)(*operands())
    np.testing.assert_allclose(np.asarray(out)[1], np.asarray(want)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("chosen", [False, True], ids=["all", "chosen"])
@pytest.mark.sampled(2)
def test_qk_clip_sinks_and_the_indexers_mask(chosen: bool) -> None:
    """Of V3.2's indexer as MaxText hands it over: 0 for the keys that a token selects, a large negative for others."""
    pytest.importorskip("flax", reason="max_logits is a flax.nnx.Intermediate")
    op, arrays = AttentionOp(), operands()
    mask = (np.random.default_rng(1).random((2, 12, 12)) < 0.5) | np.eye(12, dtype=bool)
    sinks = jnp.asarray([0.5, 2.0])
    given = {"indexer_mask": jnp.asarray(np.where(mask, np.float32(0), np.float32(-1e9)))} if chosen else {}
    with jax.set_mesh(op.mesh):
        out = call(op, *arrays, sinks=sinks, record_max_logits=True, **given)[0]
    want, maxima = jax.jit(with_maxima)(*arrays, chosen=mask if chosen else True, sinks=sinks)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(op.max_logits.get_value(), maxima, rtol=1e-5)  # type: ignore[attr-defined]


def test_the_benchmarks_segments_and_stand_ins() -> None:
    """A stand-in's names serve as base class, decorator and function; modules that are there keep their own."""
    benchmark = load("maxtext/benchmark")
    ids, positions = benchmark.segments_of(2, 8, 3)
    assert ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3]] * 2
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]] * 2
    finder = benchmark.Finder()
    assert finder.find_spec("jax") is None and finder.find_spec("googleapis") is None
    package = finder.create_module(finder.find_spec("google.cloud.storage"))

    class Derived(package.Client):  # type: ignore[misc]
        pass

    assert package.traced(test_it_trains_over_a_mesh) is test_it_trains_over_a_mesh
    assert isinstance(Derived(1, name="bucket"), package.Other) and Derived().anything("a", "b") is not None
