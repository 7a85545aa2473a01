"""The two kinds of step: one takes a chunk of prompts; the other makes the next token of every unfinished text, and
checks drafts.

The state of the unfinished texts stays on the device: a step reads it and returns the next state. Only for drafts must
the host see the tokens of one step to start another. `run_prefill` and `run_decode` are compositions of a few jitted
parts. Under `jax.jit` a step is one program, which is best on a GPU: one launch runs it, as CUDA graphs. Called without
`jax.jit`, they launch one program a layer; layers of one kind share a program, which compiles in a fraction of the
time. On a mesh each device runs these functions for its replica's texts (programs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.generate import model
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.expert_parallel import gather_tokens
from tsmla_jax.generate.model import Batch, Params, Scales, StepOptions
from tsmla_jax.generate.next_tokens import choose_tokens
from tsmla_jax.generate.sampling import Sampling
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.step import Step
from tsmla_jax.ops.ragged import row_owner

NO_TOKEN = -1
"""In the results of a step: no token here."""


class State(NamedTuple):
    """The unfinished texts, one a row, on the device. A text's row is also its slot of V4's compressor states.

    tokens        [R] i32, the last token of each text, which the next step brings into the cache
    cached        [R] i32, how many of its tokens are in the cache
    remaining     [R] i32, how many tokens it may still generate; 0 in a row without a text or with one that has ended
    requests      [R] i32, the id that its random bits depend on
    block_tables  [R, M] i32, its pages
    """

    tokens: jax.Array
    cached: jax.Array
    remaining: jax.Array
    requests: jax.Array
    block_tables: jax.Array


class Prompts(NamedTuple):
    """A chunk of prompts, packed: r of them, T tokens in all; i32.

    tokens        [T]; tokens from index cu_seqlens[r] on are padding
    cu_seqlens    [r + 1], where each prompt's tokens start in this chunk
    seq_lens      [r], how many tokens each prompt has up to the end of this chunk
    rows          [r], each prompt's row of the state; -1 for padding
    limits        [r], how many tokens to generate after this chunk; 0 if more of the prompt follows
    requests      [r], as in `State`
    block_tables  [r, M]
    """

    tokens: Any
    cu_seqlens: Any
    seq_lens: Any
    rows: Any
    limits: Any
    requests: Any
    block_tables: Any


class Drafts(NamedTuple):
    """Guesses at the tokens after each text's last one: tokens [B, K] i32, and how many there are, lens [B] i32."""

    tokens: Any
    lens: Any


class Constants(NamedTuple):
    """Values that all steps of a run share: ids that end a text [N] i32 (NOT_FINITE among them), the sampling, the
    attention's scales and V4's rope tables."""

    ends: jax.Array
    sampling: Sampling
    scales: Scales
    ropes: dict[str, jax.Array]


@dataclass(frozen=True)
class StepConfig:
    """The static part of a step.

    Attributes:
      model: the model, without its end tokens, which compiled programs do not depend on.
      options: the layers' options.
      rows: how many rows the step has: its texts, and padding.
      greedy: whether tokens are the most likely ones.
    """

    model: ModelConfig
    options: StepOptions
    rows: int
    greedy: bool


def init_state(rows: int, max_pages: int) -> State:
    """A state without texts: R = `rows`, M = `max_pages`."""
    # Each field needs its own array: a step is donated the state's buffers, and a buffer can be donated only once.
    return State(
        tokens=jnp.zeros(rows, jnp.int32),
        cached=jnp.zeros(rows, jnp.int32),
        remaining=jnp.zeros(rows, jnp.int32),
        requests=jnp.zeros(rows, jnp.int32),
        block_tables=jnp.zeros((rows, max_pages), jnp.int32),
    )


def drop_row(state: State, row: jax.Array) -> State:
    """The state without the text of that row."""
    return state._replace(remaining=state.remaining.at[row].set(0))


def no_drafts(rows: int, most: int = 0) -> Drafts:
    """Drafts on the host with no tokens yet: arrays with room for `most` tokens of each of `rows` texts, which are the
    texts of all replicas.
    """
    return Drafts(np.zeros((rows, most), np.int32), np.zeros(rows, np.int32))


def no_prompts(tokens: int, rows: int, max_pages: int, replicas: int = 1) -> Prompts:
    """Prompts on the host that are all padding, to be filled in. The arrays of several replicas follow one another."""

    def full(fill: int, count: int, *shape: int) -> Any:
        return np.full((replicas * count, *shape), fill, np.int32)

    return Prompts(
        tokens=full(0, tokens),
        cu_seqlens=full(0, rows + 1),
        seq_lens=full(0, rows),
        rows=full(-1, rows),
        limits=full(0, rows),
        requests=full(0, rows),
        block_tables=full(0, rows, max_pages),
    )


def of_replica(prompts: Prompts, replica: int, replicas: int) -> Prompts:
    """Views of one replica's part of a chunk on the host."""
    return Prompts(*(array.reshape(replicas, -1, *array.shape[1:])[replica] for array in prompts))


def run_prefill(
    params: Params, caches: list[Any], state: State, constants: Constants, prompts: Prompts, config: StepConfig
) -> tuple[State, list[Any], jax.Array]:
    """Brings a chunk of prompts into the caches, and prompts that end in it into the state.

    Args:
      config: static.

    Returns:
      the state, the caches, and [r] i32: the token chosen after each prompt, as `select_tokens` returns it, or NO_TOKEN
      if more of the prompt follows or the row is padding.
    """
    batch = _pack_prompts(prompts, config)
    x, caches = _run_layers(params, caches, batch, constants, config)
    state, tokens = _start_texts(_head(params), state, constants, prompts, x, config)
    return state, caches, tokens


def run_decode(
    params: Params, caches: list[Any], state: State, constants: Constants, drafts: Drafts, config: StepConfig
) -> tuple[State, list[Any], jax.Array]:
    """The new tokens of the texts in the first config.rows rows of the state: the accepted drafts, and one token more;
    none after a token that ends its text.

    A draft is accepted if it equals the token chosen in its place, and all earlier drafts of its text are accepted.

    Args:
      drafts: the drafts of the same rows; K may be 0. A text's drafts must be fewer than its remaining tokens.
      config: static.

    Returns:
      the state, the caches, and the new tokens of each row [B, K + 1] i32, NO_TOKEN after the last.
    """
    batch = _pack_texts(state, drafts, config)
    x, caches = _run_layers(params, caches, batch, constants, config)
    state, tokens = _continue_texts(_head(params), state, constants, drafts, x, config)
    return state, caches, tokens


_shared_steps = jax.jit(model.shared_steps, static_argnames=("config", "options"))
_embed = jax.jit(model.embed, static_argnames="config")


def _head(params: Params) -> Params:
    """The parameters without those of the layers. Programs that need no layer take these: flattening all parameters
    would cost more than the call.
    """
    return {name: value for name, value in params.items() if name != "layers"}


def _run_layers(
    params: Params, caches: list[Any], batch: Batch, constants: Constants, config: StepConfig
) -> tuple[Any, list[Any]]:
    shared = _shared_steps(config.model, batch, constants.ropes, config.options) if constants.ropes else {}
    x = _embed(_head(params), config.model, batch.tokens)
    return model.run_layers(params, config.model, x, caches, batch, constants.scales, config.options, shared)


def _ragged_step(
    tables: Any,
    seq_lens: Any,
    cu_seqlens: Any,
    config: StepConfig,
    *,
    tokens: int,
    max_q_len: int,
    max_seq_len: int | None = None,
) -> Step:
    return Step.ragged(
        tables,
        seq_lens,
        cu_seqlens,
        total_tokens=tokens,
        max_q_len=max_q_len,
        max_seq_len=max_seq_len,
        page_size=config.options.page_size,
        context_axis=config.options.context_axis,
    )


def _batch(tokens: jax.Array, step: Step, state_slots: jax.Array, config: StepConfig) -> Batch:
    mesh, split = config.options.mesh, None
    if config.model.moe is not None and mesh.expert_shards > 1:
        split = gather_tokens(tokens, step.owned_tokens(tokens.shape[0]), mesh)
    return Batch(tokens, step, state_slots, split)


@partial(jax.jit, static_argnames="config")
def _pack_prompts(prompts: Prompts, config: StepConfig) -> Batch:
    tokens = prompts.tokens.shape[0]
    cached = 0 if config.options.phase == "fresh" else config.options.most_cached
    step = _ragged_step(
        prompts.block_tables,
        prompts.seq_lens,
        prompts.cu_seqlens,
        config,
        tokens=tokens,
        max_q_len=tokens,
        max_seq_len=None if cached is None else cached + tokens,
    )
    return _batch(prompts.tokens, step, prompts.rows, config)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _start_texts(
    head: Params, state: State, constants: Constants, prompts: Prompts, x: Any, config: StepConfig
) -> tuple[State, jax.Array]:
    last = jnp.maximum(prompts.cu_seqlens[1:] - 1, 0)
    tokens = _choose(head, x, last, prompts.requests, prompts.seq_lens, constants.sampling, config)
    whole = prompts.limits > 0
    ended = jnp.isin(tokens, constants.ends)
    # A row past the last one is not written.
    rows = jnp.where(whole, prompts.rows, state.tokens.shape[0])

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[rows].set(new, mode="drop")

    state = State(
        tokens=put(state.tokens, tokens),
        cached=put(state.cached, prompts.seq_lens),
        remaining=put(state.remaining, jnp.where(ended, 0, prompts.limits - 1)),
        requests=put(state.requests, prompts.requests),
        block_tables=put(state.block_tables, prompts.block_tables),
    )
    return state, jnp.where(whole, tokens, NO_TOKEN)


def _first_rows(state: State, rows: int) -> State:
    return State(*(array[:rows] for array in state))


class _Places(NamedTuple):
    """Where the new tokens of B texts lie among the T places of a decode step.

    new     [B] i32, how many new tokens each text has; 0 if it has ended
    starts  [B] i32, the place of each text's first new token
    offsets [B + 1] i32, starts and the end, if tokens are packed; None if each text has one place, with or without a
            token
    owner, local, owned  [T], the text of each place, the index of its token among that text's new tokens, and whether
            the place has a token
    """

    new: jax.Array
    starts: jax.Array
    offsets: jax.Array | None
    owner: jax.Array
    local: jax.Array
    owned: jax.Array


def _places(texts: State, drafts: Drafts, config: StepConfig) -> _Places:
    active = texts.remaining > 0
    new = jnp.where(active, 1 + drafts.lens, 0)
    if not drafts.tokens.size and isinstance(config.model.attention, MLAConfig):
        # Without drafts MLA's kernel writes every row; if tokens were packed, a second kernel would have to clear the
        # rest.
        rows = jnp.arange(config.rows, dtype=jnp.int32)
        return _Places(new, rows, None, rows, jnp.zeros_like(rows), active)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
    return _Places(new, offsets[:-1], offsets, *row_owner(offsets, config.rows * (drafts.tokens.shape[1] + 1)))


@partial(jax.jit, static_argnames="config")
def _pack_texts(state: State, drafts: Drafts, config: StepConfig) -> Batch:
    texts, most = _first_rows(state, config.rows), drafts.tokens.shape[1] + 1
    active, places = texts.remaining > 0, _places(texts, drafts, config)
    candidates = jnp.concatenate([texts.tokens[:, None], drafts.tokens], axis=1)
    tokens = jnp.where(places.owned, candidates[places.owner, jnp.minimum(places.local, most - 1)], 0)
    seq_lens = jnp.where(active, texts.cached + places.new, 0)
    if places.offsets is None:
        options = config.options
        sizes: dict[str, Any] = {"page_size": options.page_size, "context_axis": options.context_axis}
        step = Step.dense(texts.block_tables, seq_lens, **sizes)
    else:
        count = tokens.shape[0]
        step = _ragged_step(texts.block_tables, seq_lens, places.offsets, config, tokens=count, max_q_len=most)
    return _batch(tokens, step, jnp.where(active, jnp.arange(config.rows, dtype=jnp.int32), -1), config)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _continue_texts(
    head: Params, state: State, constants: Constants, drafts: Drafts, x: Any, config: StepConfig
) -> tuple[State, jax.Array]:
    texts, most = _first_rows(state, config.rows), drafts.tokens.shape[1] + 1
    active, places = texts.remaining > 0, _places(texts, drafts, config)
    owner, total = places.owner, config.rows * most
    positions, every = texts.cached[owner] + places.local + 1, jnp.arange(total, dtype=jnp.int32)
    packed = _choose(head, x, every, texts.requests[owner], positions, constants.sampling, config)

    numbers = jnp.arange(most, dtype=jnp.int32)
    chosen = packed[jnp.minimum(places.starts[:, None] + numbers, total - 1)]
    right = (drafts.tokens == chosen[:, :-1]) & (numbers[:-1] < drafts.lens[:, None])
    count = 1 + jnp.cumprod(right, axis=1).sum(axis=1, dtype=jnp.int32)
    ends = jnp.isin(chosen, constants.ends) & (numbers < count[:, None])
    ended = ends.any(axis=1)
    count = jnp.where(ended, jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(active, jnp.minimum(count, texts.remaining), 0)
    last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[: config.rows].set(new)

    state = state._replace(
        tokens=put(state.tokens, jnp.where(active, last, texts.tokens)),
        cached=put(state.cached, texts.cached + count),
        remaining=put(state.remaining, jnp.where(ended, 0, texts.remaining - count)),
    )
    return state, jnp.where(numbers < count[:, None], chosen, NO_TOKEN)


def _choose(
    head: Params,
    x: Any,
    rows: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    config: StepConfig,
) -> jax.Array:
    """The tokens chosen after x[rows]; the other arguments are those of `choose_tokens`."""
    last = model.last_norm(head, config.model, x, rows)
    given: dict[str, Any] = {"config": config.model, "mesh": config.options.mesh, "greedy": config.greedy}
    return choose_tokens(model.output_projection(head, config.model), last, requests, positions, sampling, **given)


def without_ends(config: ModelConfig) -> ModelConfig:
    """The model as programs see it: models that differ only in their end tokens share programs."""
    return replace(config, eos_token_ids=())
