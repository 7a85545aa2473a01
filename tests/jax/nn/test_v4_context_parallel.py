"""V4's compressed entries dealt out over devices: outputs and caches are those of one device, step by step."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.jax.nn.drawn import draw_v4
from tsmla_jax.nn import Step, V4Attention, context_parallel, v4

TEXTS, SPARE = 3, 4
PAGE = 16  # rows of the window's pages
MOST = 544  # tokens of a text
WINDOW_TABLES = np.arange(TEXTS * MOST // PAGE, dtype=np.int32).reshape(TEXTS, -1)
STATES = np.asarray([2, 0, 1], np.int32)
# New tokens and lengths of each text, and the rows of each step: a text that is not there yet, chunks, one token each,
# drafts, and drafts that are partly taken back. Entries of ratio 128 are completed by a chunk, and by no decode step.
STEPS = [
    ([300, 3, 0], [300, 3, 0], 368),
    ([211, 0, 137], [511, 3, 137], 368),
    ([1, 1, 1], [512, 4, 138], 12),
    ([4, 4, 2], [516, 8, 140], 12),
    ([2, 3, 1], [515, 7, 140], 12),
]


def config_of(kind: v4.Kind, **sizes: Any) -> v4.V4Config:
    given = {"head_dim": 16, "rope_dim": 8, "index_head_dim": 12, **sizes}
    return v4.V4Config(
        kind=kind,
        ratio={"sliding": 0, "csa": 4, "hca": 128}[kind],
        hidden_size=24,
        num_attention_heads=4,
        q_lora_rank=12,
        sliding_window=10,  # no multiple of four devices
        o_groups=2,
        o_lora_rank=6,
        index_n_heads=4,
        index_topk=9,
        **given,
    )


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


class Layer:
    """A layer with random parameters, on one device or on several."""

    def __init__(self, config: v4.V4Config, dtype: Any = jnp.float32, indexer_dtype: Any = jnp.float32) -> None:
        self.config, self.dtypes = config, {"dtype": dtype, "indexer_dtype": indexer_dtype}
        self.params = draw_v4(jax.random.key(0), config, jnp.float32)
        self.params["sinks"] = jnp.asarray([0.5, -1.0, 2.0, -np.inf])
        self.entries = {"sliding": 1, "csa": 4, "hca": 1}[config.kind]  # a page's
        self.pages = -(-MOST // max(config.ratio, 1) // self.entries)  # of a text's entries

    def columns(self, devices: int) -> int:
        """Entries of a device's block table."""
        return -(-self.pages // devices)

    def empty(self, devices: int) -> v4.V4Cache:
        """The devices' caches, one after the other."""
        cache = v4.init_cache(
            self.config,
            window_pages=WINDOW_TABLES.size,
            compressed_pages=TEXTS * self.columns(devices),
            num_states=TEXTS,
            page_size=PAGE,
            compressed_page_size=self.entries,
            spare=SPARE,
            **self.dtypes,
        )
        return jax.tree.map(lambda leaf: jnp.concatenate([leaf] * devices), cache)

    def attend(self, columns: int, axis: str | None, cache: v4.V4Cache, x: jax.Array, lens: Any, cu: Any) -> Any:
        window = Step.ragged(jnp.asarray(WINDOW_TABLES), lens, cu, total_tokens=x.shape[0], page_size=PAGE)
        step = v4.make_step(
            self.config,
            window,
            state_slots=jnp.asarray(STATES),
            compressed_tables=jnp.arange(TEXTS * columns, dtype=jnp.int32).reshape(TEXTS, columns)[::-1],
            cos_sin=v4.rope_table(self.config, MOST),
            page_size=PAGE,
            compressed_page_size=self.entries,
            context_axis=axis,
        )
        return v4.attend(self.params, self.config, x, cache, step, context_axis=axis)

    def program(self, devices: int) -> Any:
        """(cache, x, lens, cu_seqlens_q) -> y and the cache."""
        run = partial(self.attend, self.columns(devices), "context" if devices > 1 else None)
        if devices > 1:
            specs, out = (P("context"), P(), P(), P()), (P(), P("context"))
            run = jax.shard_map(run, mesh=mesh_of(devices), in_specs=specs, out_specs=out, check_vma=False)
        return jax.jit(run)

    def run(self, devices: int) -> tuple[list[np.ndarray], v4.V4Cache]:
        """The output of each step, and the caches after all of them."""
        program, cache, outputs = self.program(devices), self.empty(devices), []
        rng = np.random.default_rng(0)
        for new, lens, rows in STEPS:
            x = rng.standard_normal((rows, self.config.hidden_size)).astype(np.float32)
            cu = np.cumsum([0, *new]).astype(np.int32)
            y, cache = program(cache, x, np.asarray(lens, np.int32), cu)
            outputs.append(np.asarray(y)[: cu[-1]])
        return outputs, cache


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("csa", 4),
        ("hca", 8),  # some devices have no entry
        ("sliding", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("csa", 2), ("csa", 8), ("hca", 2), ("hca", 4))),
    ],
)
@pytest.mark.sampled(3)
def test_steps_are_those_of_one_device(kind: v4.Kind, devices: int) -> None:
    layer = Layer(config_of(kind))
    (want, whole), (got, shared) = layer.run(1), layer.run(devices)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for name in ("window", "compressor", "indexer_compressor"):
        # Every device has them whole.
        for one, other in zip(*(jax.tree.leaves(getattr(cache, name)) for cache in (shared, whole)), strict=True):
            for of_device in np.split(np.asarray(one), devices):
                np.testing.assert_allclose(of_device, other, atol=1e-5)
    for name in ("compressed", "indexer"):
        one, other = getattr(shared, name), getattr(whole, name)
        if other is not None:
            np.testing.assert_allclose(one, dealt(layer, np.asarray(other), devices), atol=1e-5)


def dealt(layer: Layer, pages: np.ndarray, devices: int) -> np.ndarray:
    """One device's pages of entries as those of several, one after the other: page j of a text on device j mod N."""
    columns = layer.columns(devices)
    texts = pages.reshape(TEXTS, layer.pages, *pages.shape[1:])
    texts = np.concatenate([texts, np.zeros((TEXTS, columns * devices - layer.pages, *pages.shape[1:]))], axis=1)
    return np.moveaxis(texts.reshape(TEXTS, columns, devices, *pages.shape[1:]), 2, 0).reshape(-1, *pages.shape[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_packed_caches(kind: v4.Kind) -> None:
    layer = Layer(config_of(kind, head_dim=512, rope_dim=64, index_head_dim=128), jnp.uint8, jnp.uint8)
    for one, other in zip(layer.run(2)[0], layer.run(1)[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_one_exchange_merges_and_one_chooses() -> None:
    """Of partial results, out and lse, and of the indexers' candidates, in a decode step; none of a window alone."""
    for kind, count in (("sliding", 0), ("hca", 2), ("csa", 3)):
        layer = Layer(config_of(kind))
        arguments = (layer.empty(2), jnp.zeros((3, 24)), jnp.ones(3, jnp.int32), jnp.arange(4, dtype=jnp.int32))
        text = layer.program(2).lower(*arguments).as_text()
        found = re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text)
        assert found == ["all_gather"] * count


def test_the_sinks_take_weight_once() -> None:
    """Of all devices' keys together: the logsumexp that the merge returns is without them."""
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 5, 6)).astype(np.float32)
    sinks = np.asarray([0.3, -np.inf, np.inf])
    lses = np.log(np.exp(logits).sum(-1))
    outs = np.einsum("dhk,dkv->dhv", np.exp(logits - lses[..., None]), values)
    logits[:, 0], lses[:, 0] = -np.inf, -np.inf  # a row without a key
    outs[:, 0] = 0

    def run(out: jax.Array, lse: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"sinks": jnp.asarray(sinks, jnp.float32)}
        return context_parallel.project_merged(out, lse, "context", lambda out: out.reshape(1, -1), **options)

    mapped = jax.shard_map(run, mesh=mesh_of(2), in_specs=P("context"), out_specs=P(), check_vma=False)
    got = mapped(outs.astype(np.float32), lses.astype(np.float32)).reshape(3, 6)
    keys = np.exp(logits[:, 1])
    want = np.einsum("dk,dkv->v", keys / keys.sum(), values)
    np.testing.assert_allclose(got, [np.zeros(6), want, np.zeros(6)], atol=1e-6)


def test_steps_of_another_axis_or_kind_are_refused() -> None:
    layer = Layer(config_of("csa"))
    cache, lens, cu = layer.empty(1), jnp.ones(3, jnp.int32), jnp.arange(4, dtype=jnp.int32)

    def run(kind: v4.Kind, made_with: str | None, called_with: str | None, window_axis: str | None = None) -> None:
        options: dict[str, Any] = {"total_tokens": 3, "page_size": PAGE, "context_axis": window_axis}
        step = v4.make_step(
            config_of(kind),
            Step.ragged(jnp.asarray(WINDOW_TABLES), lens, cu, **options),
            state_slots=jnp.asarray(STATES),
            compressed_tables=jnp.zeros((3, 9), jnp.int32),
            cos_sin=v4.rope_table(layer.config, MOST),
            page_size=PAGE,
            context_axis=made_with,
        )
        module = V4Attention(layer.config, params=layer.params)
        module(jnp.zeros((3, 24)), cache, step, context_axis=called_with)

    def refused(message: str, *arguments: Any) -> None:
        inside = jax.shard_map(partial(run, *arguments), mesh=mesh_of(2), in_specs=(), out_specs=None, check_vma=False)
        with pytest.raises(ValueError, match=f"^{message}"):
            jax.eval_shape(inside)

    refused("context_axis: got 'context'; legal: the step's, None", "csa", None, "context")
    refused("context_axis: got None; legal: the step's, 'context'", "csa", "context", None)
    for kind in ("sliding", "hca"):
        refused(f"step: got one made for a {kind!r} layer; legal: one made for a 'csa' layer", kind, None, None)
    refused("step: got one made with context_axis='context'; legal: None, as every", "csa", "context", None, "context")
