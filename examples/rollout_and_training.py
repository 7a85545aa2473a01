"""Do a rollout and its trainer agree? Count the bits in which log-probabilities of the same tokens differ, and where.

    python examples/rollout_and_training.py                              # a small model, on a CPU or a GPU
    python examples/rollout_and_training.py --model v2-lite --layers 27  # DeepSeek-V2-Lite's layers, random weights
    python examples/rollout_and_training.py --model v3.2 --layers 4      # a slice of DeepSeek-V3.2
    python examples/rollout_and_training.py --batch_invariant            # products in one order for any number of rows

A rollout decodes texts token by token over a paged latent cache, in the absorbed form, MLA's attention with
`batch_invariant=True`. A trainer computes the log-probabilities of these tokens again, from the texts as a whole. These
ways are compared:

  whole      all tokens at once in the expanded form, as trainers do; for V3.2 with an indexer in the weights' dtype
  replayed   only V3.2: the same, with the keys that the rollout chose
  repeated   by rows: the rollout's own steps again, each text in its row
  exact      by rows: the rollout's own step, on as many rows at a time as it had, in another order (text after text)
  at once    with --batch_invariant: the rollout's own step, on all rows at once

The rollout's own compiled programs compute "repeated" and "exact", and their attention reads the same cache in the same
order. "repeated" has the rollout's bits if the programs' results repeat. "exact" has them if a program also computes a
row in one way, wherever the row stands and whichever rows stand beside it: attention does with `batch_invariant=True`,
while a library's product may add up a row's terms in an order that depends on the row's place. With --batch_invariant
the rollout's products, norms and softmax are those of `tsmla_jax.nn.batch_invariant`, which add in one order for any
number of rows: then the trainer computes all rows at once and has the rollout's bits. The last table says which
operation differs: each is given the rollout's own inputs. Its last lines compare a step's results with those of the
same rows in the batches of "exact": where these differ, "exact" has other bits than the rollout. Weights are random and
MLPs dense, of the width of a token's experts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tsmla_jax
from tsmla_jax.nn import MLAConfig, Step, V32Config, batch_invariant, functional, init_params, v32
from tsmla_jax.nn.batch_invariant import BatchInvariant
from tsmla_jax.nn.mla.rope import rope_cos_sin

PAGE = 64


class Model(NamedTuple):
    """The shape of a model; static."""

    attention: MLAConfig | V32Config
    layers: int
    mlp: int
    vocabulary: int

    @property
    def mla(self) -> MLAConfig:
        return self.attention.mla if isinstance(self.attention, V32Config) else self.attention


def models(layers: int) -> dict[str, Model]:
    """The models of --model."""
    tiny = MLAConfig(
        hidden_size=128, num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    sparse = MLAConfig(
        hidden_size=64, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    lite = MLAConfig(
        hidden_size=2048, num_attention_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128,
    )  # fmt: skip
    v3 = MLAConfig(
        hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    return {
        "tiny": Model(tiny, layers, 256, 512),
        "tiny-v3.2": Model(V32Config(sparse, index_n_heads=2, index_head_dim=32, index_topk=6), layers, 128, 128),
        "v2-lite": Model(lite, layers, 8 * 1408, 102_400),
        "v3.2": Model(V32Config(v3), layers, 9 * 2048, 129_280),
    }


class Texts(NamedTuple):
    """The sizes of the texts: `count` of them, each with a prompt and new tokens of one length; static."""

    count: int
    prompt: int
    new: int

    @property
    def length(self) -> int:
        return self.prompt + self.new

    @property
    def tables(self) -> jax.Array:
        """[B, M]: each text's pages, in order."""
        pages = -(-self.length // PAGE)
        return jnp.arange(self.count * pages, dtype=jnp.int32).reshape(self.count, pages)

    @property
    def starts(self) -> jax.Array:
        return jnp.arange(self.count + 1, dtype=jnp.int32) * self.length


Params = dict[str, Any]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_product(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """A random weight of the variance 1 / (inputs)."""
    return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5


def draw(model: Model, dtype: Any) -> Params:
    """Random weights; those of products have the variance 1 / (inputs)."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * model.layers))
    init = v32.init_params if isinstance(model.attention, V32Config) else init_params
    width = model.mla.hidden_size

    def normal(*shape: int) -> jax.Array:
        return _draw_product(next(keys), shape, dtype)

    ones = jnp.ones(width, dtype)

    def layer() -> Params:
        attention: Any = init(next(keys), model.attention, dtype)  # type: ignore[arg-type]
        return {"attention": attention, "norm": ones, "up": normal(width, 2 * model.mlp),
                "down": normal(model.mlp, width)}  # fmt: skip

    layers = [layer() for _ in range(model.layers)]
    return {"embedding": normal(model.vocabulary, width) * width**0.5, "layers": layers, "norm": ones,
            "head": normal(width, model.vocabulary)}  # fmt: skip


def in_one_order(model: Model, params: Params) -> Params:
    """The parameters of an MLA model with products and norms that are those of `nn.batch_invariant`."""
    config = model.mla

    @jax.jit
    def layer(params: Params) -> Params:
        attention = batch_invariant.wrap(functional.fold(params["attention"], config))
        products = {name: BatchInvariant(params[name].T) for name in ("up", "down")}
        return {"attention": attention, "norm": BatchInvariant(params["norm"])} | products

    ends = {"norm": BatchInvariant(params["norm"]), "head": BatchInvariant(params["head"].T)}
    return ends | {"embedding": params["embedding"], "layers": [layer(each) for each in params["layers"]]}


# ---- the operations of a layer, on rows [R, E]


def norm(x: jax.Array, weight: jax.Array | BatchInvariant) -> jax.Array:
    if isinstance(weight, BatchInvariant):
        return batch_invariant.rms_norm(x, weight.values, 1e-6)
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def product(x: jax.Array, weight: jax.Array | BatchInvariant, dtype: Any = None) -> jax.Array:
    if isinstance(weight, BatchInvariant):
        return batch_invariant.linear(x, weight.values, out_dtype=dtype)
    return jnp.dot(x, weight, preferred_element_type=dtype)


def mlp(params: Params, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(product(x, params["up"]), 2, axis=-1)
    return product(jax.nn.silu(gate) * up, params["down"])


def log_probs(params: Params, x: jax.Array) -> jax.Array:
    """[R, vocabulary] in float32."""
    logits = product(norm(x, params["norm"]), params["head"], jnp.float32)
    if isinstance(params["head"], BatchInvariant):
        return batch_invariant.log_softmax(logits)
    return jax.nn.log_softmax(logits)


def end_of(params: Params) -> Params:
    """The parameters that `log_probs` needs."""
    return {name: params[name] for name in ("norm", "head")}


def attend(
    model: Model, params: Params, x: jax.Array, cache: Any, tables: jax.Array, lens: jax.Array
) -> tuple[jax.Array, Any, jax.Array | None]:
    """The rollout's attention of rows [R, E], each a request of one new token: y, the cache, and V3.2's choice."""
    if isinstance(model.attention, V32Config):
        each = jnp.arange(len(x) + 1, dtype=jnp.int32)
        step = Step.ragged(tables, lens, each, total_tokens=len(x), max_q_len=1, page_size=PAGE)
        return v32.attend(params, model.attention, x, cache, step, return_selected=True, form="direct")
    step = Step.dense(tables, lens, page_size=PAGE)
    y, cache = functional.decode(params, model.attention, x[:, None], cache, step, batch_invariant=True)
    return y[:, 0], cache, None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def new_caches(model: Model, texts: Texts, dtype: Any) -> list[Any]:
    """Each layer's cache, empty."""
    pages = texts.tables.size
    if isinstance(model.attention, V32Config):
        config = model.attention
        each = (
            v32.init_cache(config, pages, PAGE, kv_dtype=dtype, indexer_dtype=jnp.uint8) for _ in range(model.layers)
        )
        return list(each)
    return [jnp.zeros((pages, PAGE, model.attention.cache_dim), dtype) for _ in range(model.layers)]


# ---- the rollout


class Rollout(NamedTuple):
    """The results of a rollout.

    tokens: [B, P + N].
    log_probs: [B, N - 1], for each new token except the last the log-probability of the token that follows it.
    inputs: [layers, B, N - 1, E], the inputs of each layer at the same tokens.
    caches: the cache of each layer.
    selected: the keys that each layer of V3.2 chose, None for other models.
    """

    tokens: jax.Array
    log_probs: jax.Array
    inputs: jax.Array
    caches: Any
    selected: Any


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def prompt_layer(model: Model, texts: Texts, params: Params, x: jax.Array, cache: Any) -> tuple[jax.Array, Any, Any]:
    """A layer on the prompts [B * P, E], in the form that engines take for them; their choice of keys, if there is
    one."""
    starts = jnp.arange(texts.count + 1, dtype=jnp.int32) * texts.prompt
    lens = jnp.full(texts.count, texts.prompt, jnp.int32)
    step = Step.ragged(texts.tables, lens, starts, total_tokens=len(x), max_q_len=texts.prompt, page_size=PAGE)
    chosen, given, normed = None, params["attention"], norm(x, params["norm"])
    if isinstance(model.attention, V32Config):
        y, cache, chosen = v32.attend(given, model.attention, normed, cache, step, return_selected=True, form="direct")
    else:
        y, latent, k_rope = functional.prefill(
            given, model.attention, normed, cu_seqlens_q=starts, max_q_len=texts.prompt
        )
        cache = tsmla_jax.write_kv_cache(cache, latent, k_rope, step.slot_mapping)
    x = x + y
    return x + mlp(params, norm(x, params["norm"])), cache, chosen


def run_prompts(model: Model, texts: Texts, params: Params, tokens: jax.Array, dtype: Any) -> tuple[list[Any], list]:
    """The caches of all layers after the prompts [B, P], and the keys that V3.2 chose."""
    x, caches, chosen = params["embedding"][tokens.reshape(-1)], [], []
    for layer, empty in zip(params["layers"], new_caches(model, texts, dtype), strict=True):
        x, cache, selected = prompt_layer(model, texts, layer, x, empty)
        caches.append(cache)
        chosen.append(selected)
    return caches, chosen


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step_layer(
    model: Model, params: Params, x: jax.Array, cache: Any, tables: jax.Array, lens: jax.Array
) -> tuple[jax.Array, Any, jax.Array | None]:
    """A layer on the rows [R, E] of a step."""
    y, cache, selected = attend(model, params["attention"], norm(x, params["norm"]), cache, tables, lens)
    x = x + y
    return x + mlp(params, norm(x, params["norm"])), cache, selected


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step_parts(
    model: Model, params: Params, x: jax.Array, cache: Any, tables: jax.Array, lens: jax.Array
) -> tuple[dict[str, jax.Array], Any]:
    """The results of a layer's two parts [R, E] on the rows of a step, and the cache."""
    y, cache, _ = attend(model, params["attention"], norm(x, params["norm"]), cache, tables, lens)
    return {
        "a step's attention and its projections": y, "a step's MLP": mlp(params, norm(x + y, params["norm"]))
    }, cache  # fmt: skip


step_end = jax.jit(log_probs)


@jax.jit
def sample(found: jax.Array, i: jax.Array) -> jax.Array:
    """Step i's next tokens [B], from their log-probabilities."""
    return jax.random.categorical(jax.random.fold_in(jax.random.key(3), i), found)


@jax.jit
def of_tokens(found: jax.Array, tokens: jax.Array) -> jax.Array:
    """The log-probabilities of these tokens [R], from those of all [R, vocabulary]."""
    return jnp.take_along_axis(found, tokens[:, None], axis=1)[:, 0]


def roll_out(model: Model, texts: Texts, params: Params, dtype: Any) -> Rollout:
    """Sampled tokens of texts with random prompts, one step after the other."""
    prompts = jax.random.randint(jax.random.key(1), (texts.count, texts.prompt), 0, model.vocabulary)
    caches, of_prompts = run_prompts(model, texts, params, prompts, dtype)
    token = jax.random.randint(jax.random.key(2), (texts.count,), 0, model.vocabulary)
    end = end_of(params)
    tokens, each, inputs, chosen = [prompts, token[:, None]], [], [], []
    for i in range(texts.new - 1):
        x, lens = params["embedding"][token], jnp.full(texts.count, texts.prompt + 1 + i, jnp.int32)
        of_layers, choices = [], []
        for n, layer in enumerate(params["layers"]):
            of_layers.append(x)
            x, caches[n], selected = step_layer(model, layer, x, caches[n], texts.tables, lens)
            choices.append(selected)
        found = step_end(end, x)
        token = sample(found, jnp.int32(i))
        tokens.append(token[:, None])
        each.append(of_tokens(found, token))
        inputs.append(jnp.stack(of_layers))
        chosen.append(choices)

    def whole(of_prompt: Any, of_new: Any) -> Any:
        """The choice for each token of the packed texts [B * (P + N), K]; the last token's choice is not asked for."""
        if of_prompt is None:
            return None
        new = jnp.pad(jnp.stack(of_new, axis=1), ((0, 0), (0, 1), (0, 0)), constant_values=-1)
        old = of_prompt.reshape(texts.count, texts.prompt, -1)
        most = max(old.shape[2], new.shape[2])
        parts = (jnp.pad(p, ((0, 0), (0, 0), (0, most - p.shape[2])), constant_values=-1) for p in (old, new))
        return jnp.concatenate(list(parts), axis=1).reshape(-1, most)

    selected = [whole(*pair) for pair in zip(of_prompts, zip(*chosen, strict=True), strict=True)]
    each, inputs = jnp.stack(each, axis=1), jnp.stack(inputs, axis=2)
    return Rollout(jnp.concatenate(tokens, axis=1), each, inputs, caches, selected)


# ---- the trainer


@functools.partial(jax.jit, static_argnums=(0, 1))
def whole_layer(model: Model, texts: Texts, params: Params, x: jax.Array, chosen: jax.Array | None) -> jax.Array:
    """A layer on the packed texts [B * (P + N), E]."""
    where: Any = {"cu_seqlens_q": texts.starts, "max_q_len": texts.length}
    given, normed = params["attention"], norm(x, params["norm"])
    if isinstance(model.attention, V32Config):
        y = v32.prefill(given, model.attention, normed, **where, selected=chosen, index_loss=False).y
    else:
        y = functional.prefill(given, model.attention, normed, **where)[0]
    x = x + y
    return x + mlp(params, norm(x, params["norm"]))


@functools.partial(jax.jit, static_argnums=0)
def whole_end(texts: Texts, params: Params, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The log-probabilities [B, N - 1] of the tokens that follow the new ones."""
    new = x.reshape(texts.count, texts.length, -1)[:, texts.prompt : -1]
    following = tokens[:, texts.prompt + 1 :].reshape(-1)
    return of_tokens(log_probs(params, new.reshape(-1, new.shape[2])), following).reshape(texts.count, -1)


def recompute_whole(model: Model, texts: Texts, params: Params, tokens: jax.Array, selected: list[Any]) -> jax.Array:
    """The log-probabilities [B, N - 1] from whole texts in the expanded form. selected: the positions that each layer
    attends to, or None."""
    x = params["embedding"][tokens.reshape(-1)]
    for layer, chosen in zip(params["layers"], selected, strict=True):
        x = whole_layer(model, texts, layer, x, chosen)
    return whole_end(texts, end_of(params), x, tokens)


def in_place(texts: Texts) -> np.ndarray:
    """The rollout's own batches [N - 1, B]: row b of each is a token of text b. The numbers count the new tokens, text
    after text, without each text's last one."""
    return np.arange(texts.count * (texts.new - 1)).reshape(texts.count, -1).T


def text_after_text(texts: Texts) -> np.ndarray:
    """Other batches of the same rows [N - 1, B]: the rows of a text stand together."""
    return np.arange(texts.count * (texts.new - 1)).reshape(-1, texts.count)


def all_rows(texts: Texts) -> np.ndarray:
    """One batch of all rows [1, B * (N - 1)]."""
    return np.arange(texts.count * (texts.new - 1))[None]


@functools.partial(jax.jit, static_argnums=0)
def batch_of_rows(texts: Texts, params: Params, tokens: jax.Array, numbers: jax.Array) -> tuple[jax.Array, ...]:
    """A batch of rows by their numbers [B], as `in_place` counts them: the rows [B, E], their tables and lengths, and
    the tokens that follow them."""
    text, i = jnp.divmod(numbers, texts.new - 1)
    place = texts.prompt + i
    return params["embedding"][tokens[text, place]], texts.tables[text], place + 1, tokens[text, place + 1]


def recompute_exact(model: Model, texts: Texts, params: Params, tokens: jax.Array, batches: np.ndarray) -> jax.Array:
    """The log-probabilities [B, N - 1] by the rollout's programs. batches: of `in_place` or `text_after_text`, which
    have as many rows as there are texts, or of `all_rows`."""
    caches, _ = run_prompts(model, texts, params, tokens[:, : texts.prompt], params["head"].dtype)
    end, first, found = end_of(params), {"embedding": params["embedding"]}, []
    for numbers in batches:
        x, tables, lens, following = batch_of_rows(texts, first, tokens, jnp.asarray(numbers, jnp.int32))
        for n, layer in enumerate(params["layers"]):
            x, caches[n], _ = step_layer(model, layer, x, caches[n], tables, lens)
        found.append(of_tokens(step_end(end, x), following))
    return jnp.concatenate(found)[np.argsort(batches.reshape(-1))].reshape(texts.count, -1)


# ---- counting


class Difference(NamedTuple):
    """How two arrays of one dtype differ: the part of the numbers whose bits differ (0 and -0 count as equal), the mean
    number of bits by which these differ (log2 of 1 + the distance in units of the last place), and the greatest
    difference."""

    part: float
    bits: float
    greatest: float


def difference(a: jax.Array, b: jax.Array) -> Difference:
    """The Difference of two arrays of the same shape and floating dtype. ValueError if a number is NaN, or the same
    infinity in both: a model that makes NaN twice would pass for one whose bits agree."""
    assert a.shape == b.shape and a.dtype == b.dtype
    count, bits, greatest = map(float, _difference(a, b))
    if np.isnan(greatest):
        raise ValueError("got NaN or infinite numbers; legal: finite numbers, as other ones can't be compared")
    return Difference(count / a.size, bits / max(count, 1), greatest)


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many numbers differ, the sum of the bits by which they do, and the greatest difference."""
    width = a.dtype.itemsize * 8
    unsigned = {16: jnp.uint16, 32: jnp.uint32}[width]

    def ordered(x: jax.Array) -> jax.Array:
        """The numbers as integers that rise with them."""
        bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        sign = jnp.uint32(1 << (width - 1))
        return jnp.where(bits < sign, sign + bits, 2 * sign - bits)

    one, two = ordered(a), ordered(b)
    apart = jnp.maximum(one, two) - jnp.minimum(one, two)
    greatest = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()
    return (apart > 0).sum(dtype=jnp.float32), jnp.log2(1 + apart.astype(jnp.float32)).sum(), greatest


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _at_once_and_by_rows(
    function: Callable[..., jax.Array], config: MLAConfig, rows: int, params: Params, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The results of function(config, params, *arrays) on all rows at once, and on `rows` rows at a time."""
    split = tuple(x.reshape(-1, rows, *x.shape[1:]) for x in arrays)
    found = lax.map(lambda parts: function(config, params, *parts), split)
    return function(config, params, *arrays), found.reshape(-1, *found.shape[2:])


def _query(config: MLAConfig, params: Params, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return jnp.concatenate(functional.project_q(params, config, x, cos, sin), axis=-1)


def _latent(config: MLAConfig, params: Params, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return jnp.concatenate(functional.project_latent(params, config, x, cos, sin), axis=-1)


def _out(config: MLAConfig, params: Params, x: jax.Array) -> jax.Array:
    return functional.project_out(params, config, x)


def _mlp(_: MLAConfig, params: Params, x: jax.Array) -> jax.Array:
    return mlp(params, x)


def _head(_: MLAConfig, params: Params, x: jax.Array) -> jax.Array:
    return log_probs(params, x)[:, :128]


def operations(model: Model, texts: Texts, params: Params, rollout: Rollout) -> Iterator[tuple[str, Difference]]:
    """For each operation and layer, how its result on all rows at once differs from that on a step's rows, given the
    rollout's inputs: the products on as many rows as there are texts, against all; attention in the absorbed form over
    the cache, against the expanded one over the same latents. For V3.2 only the products."""
    config, each = model.mla, texts.new - 1
    positions = jnp.tile(jnp.arange(each, dtype=jnp.int32) + texts.prompt, texts.count)
    angles = rope_cos_sin(config, positions)

    def both(function: Callable[..., jax.Array], params: Params, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _at_once_and_by_rows(function, config, texts.count, params, *arrays)

    for layer, inputs, cache in zip(params["layers"], rollout.inputs, rollout.caches, strict=True):
        given = layer["attention"]
        x = inputs.reshape(-1, inputs.shape[-1])  # text after text
        normed = norm(x, layer["norm"])
        heads, by_rows = both(_query, given, normed, *angles)
        yield "projection of queries", difference(heads, by_rows)
        yield "projection to latents", difference(*both(_latent, given, normed, *angles))
        if isinstance(model.attention, V32Config):
            absorbed = heads[..., : config.v_head_dim]  # any input of the projection behind it
        else:
            absorbed, expanded = _both_forms(model, texts, given, heads, cache)
            yield "attention: absorbed, expanded", difference(absorbed, expanded)
        yield "projection of heads", difference(*both(_out, given, absorbed))
        yield "MLP", difference(*both(_mlp, {name: layer[name] for name in ("up", "down")}, normed))
    yield "head and log-softmax", difference(*both(_head, end_of(params), x))


def in_other_company(model: Model, texts: Texts, params: Params, rollout: Rollout) -> Iterator[tuple[str, Difference]]:
    """How each part of a layer, given the rollout's inputs, differs between the rollout's steps and the same rows in
    the batches of `recompute_exact`. Where the two differ, "exact" has other bits than the rollout."""
    caches, _ = run_prompts(model, texts, params, rollout.tokens[:, : texts.prompt], params["head"].dtype)
    for layer, inputs, prompts in zip(params["layers"], rollout.inputs, caches, strict=True):
        found = []
        for batches in (in_place(texts), text_after_text(texts)):
            cache, results = jax.tree.map(jnp.copy, prompts), []
            for numbers in batches:
                text, i = np.divmod(numbers, texts.new - 1)
                lens = jnp.asarray(texts.prompt + i + 1, jnp.int32)
                parts, cache = step_parts(model, layer, inputs[text, i], cache, texts.tables[text], lens)
                results.append(parts)
            places = np.argsort(batches.reshape(-1))
            found.append({name: jnp.concatenate([parts[name] for parts in results])[places] for name in results[0]})
        for name, one in found[0].items():
            yield name, difference(one, found[1][name])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _both_forms(
    model: Model, texts: Texts, given: Params, heads: jax.Array, cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The attention [B * (N - 1), H, V] of the same queries over the same latents: absorbed over the cache, a row a
    request, and expanded over packed texts."""
    config, each = model.mla, texts.new - 1
    lens = jnp.tile(texts.prompt + 1 + jnp.arange(each, dtype=jnp.int32), texts.count)
    tables = jnp.repeat(texts.tables, each, axis=0)
    nope, rope = jnp.split(heads, [config.qk_nope_head_dim], axis=-1)
    out = tsmla_jax.mla_decode(
        functional.absorb_q(given, nope, rope)[:, None], cache, tables, lens, softmax_scale=config.softmax_scale,
        latent_dim=config.kv_lora_rank, batch_invariant=True,
    )[:, 0]  # fmt: skip
    absorbed = functional.project_values(given, out.astype(heads.dtype))
    pages = cache[texts.tables].reshape(texts.count, -1, cache.shape[-1])[:, : texts.length - 1]
    latent, k_rope = jnp.split(pages.reshape(-1, cache.shape[-1]), [config.kv_lora_rank], axis=-1)
    expanded = tsmla_jax.mla_prefill_kv(
        heads, functional.expand_joint_kv(given, latent), k_rope,
        cu_seqlens_q=jnp.arange(texts.count + 1, dtype=jnp.int32) * each, max_q_len=each,
        cu_seqlens_kv=jnp.arange(texts.count + 1, dtype=jnp.int32) * (texts.length - 1), max_kv_len=texts.length - 1,
        softmax_scale=config.softmax_scale,
    )  # fmt: skip
    return absorbed, expanded


class Way(NamedTuple):
    """A way of computing the log-probabilities again: its name, how they differ from the rollout's, its seconds."""

    name: str
    found: Difference
    seconds: float


def compare(
    model: Model, texts: Texts, params: Params, steps: Params, rollout: Rollout, *, repeats: int = 3
) -> Iterator[Way]:
    """Compute a rollout's log-probabilities again in each way, and count the numbers that differ. params: the
    trainer's. steps: the same parameters as the rollout had them."""
    none = [None] * model.layers
    ways: dict[str, Callable[[], jax.Array]] = {
        "whole": lambda: recompute_whole(model, texts, params, rollout.tokens, none)
    }
    if isinstance(model.attention, V32Config):
        ways["replayed"] = lambda: recompute_whole(model, texts, params, rollout.tokens, rollout.selected)
    ways["repeated"] = lambda: recompute_exact(model, texts, steps, rollout.tokens, in_place(texts))
    ways["exact"] = lambda: recompute_exact(model, texts, steps, rollout.tokens, text_after_text(texts))
    if isinstance(steps["head"], BatchInvariant):
        ways["at once"] = lambda: recompute_exact(model, texts, steps, rollout.tokens, all_rows(texts))
    for name, run in ways.items():
        found = difference(rollout.log_probs, run())
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
        yield Way(name, found, float(np.median(times)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="count the bits in which a rollout and its trainer differ")
    parser.add_argument("--model", choices=sorted(models(1)), default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--texts", type=int, default=8, help="also the rows of a step")
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--new", type=int, default=17, help="tokens that a text gets")
    parser.add_argument(
        "--batch_invariant", action="store_true", help="the rollout's products add in one order for any number of rows"
    )
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args(arguments)
    for name, least in (("layers", 1), ("texts", 1), ("prompt", 0), ("new", 2)):
        if (found := getattr(options, name)) < least:
            parser.error(f"--{name}: got {found}; legal: at least {least}")
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.dtype("bfloat16") if on_gpu else jnp.dtype("float32")
    model, texts = models(options.layers)[options.model], Texts(options.texts, options.prompt, options.new)
    print(f"{jax.devices()[0].device_kind}, {dtype.name}, {options}", flush=True)
    if options.batch_invariant and isinstance(model.attention, V32Config):
        parser.error("--batch_invariant is for models without an indexer: tiny, v2-lite")
    params = draw(model, dtype)
    steps = in_one_order(model, params) if options.batch_invariant else params
    rollout = roll_out(model, texts, steps, dtype)
    print("log-probabilities of the rollout's tokens, against the rollout's own")
    of_whole, exact = 0.0, True
    ways: dict[str, Any] = {}
    for name, found, seconds in compare(model, texts, params, steps, rollout):
        ways[name] = found._asdict() | {"seconds": seconds}
        of_whole = of_whole or seconds
        exact = exact and (found.part == 0 or name not in ("exact", "at once"))
        print(f"  {name:32s} {found.part:7.1%} differ, by {found.bits:4.1f} bits, at most {found.greatest:.2e};"
              f" {seconds * 1e3:.1f} ms, {seconds / of_whole:.2f} of whole's", flush=True)  # fmt: skip
    print("operations on the rollout's inputs, all rows at once against a step's rows; the mean over layers")
    by_name: dict[str, list[Difference]] = {}
    counted = (count(model, texts, steps, rollout) for count in (operations, in_other_company))
    for name, found in itertools.chain.from_iterable(counted):
        by_name.setdefault(name, []).append(found)
    means = {name: Difference(*map(float, np.mean(layers, axis=0))) for name, layers in by_name.items()}
    for name, (part, bits, greatest) in means.items():
        print(f"  {name:38s} {part:7.1%} differ, by {bits:4.1f} bits, at most {greatest:.2e}")
    if options.json:
        of_operations = {name: found._asdict() for name, found in means.items()}
        run = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": dtype.name}
        with open(options.json, "w") as file:
            json.dump(run | {"options": vars(options), "ways": ways, "operations": of_operations}, file, indent=1)
    if not exact:
        raise SystemExit("a row's bits depend on its place in a step, or on the rows beside it")


if __name__ == "__main__":
    main()
