"""A step of DeepSeek-V4: positions, slots and index rows that all layers of one kind share, made once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from tsmla_jax.nn import context_parallel
from tsmla_jax.nn.inputs import check_config
from tsmla_jax.nn.step import Step, check_step
from tsmla_jax.nn.v4.config import Kind, V4Config
from tsmla_jax.nn.yarn import inverse_frequencies
from tsmla_jax.ops.exporting import exportable
from tsmla_jax.ops.inputs import check_mesh_axis, describe_as, describe_ints
from tsmla_jax.ops.selected import v4 as sparse_v4
from tsmla_jax.ops.selected.v4 import MixedIndices
from tsmla_kernels import contract
from tsmla_kernels.contract.rules import show


def rope_table(config: V4Config, num_positions: int) -> jax.Array:
    """cos and sin for positions 0 to num_positions - 1, f32 [N, R]; one table serves all layers with the same rope.

    Args:
        config: the config of any such layer.
        num_positions: N, at least 1.
    """
    check_config(config, V4Config)
    frequencies = inverse_frequencies(config.rope_dim, config.rope_theta, config.yarn)
    magnitude = 1.0 if config.yarn is None else config.yarn.magnitude
    return sparse_v4.rope_table(jnp.asarray(frequencies), num_positions, scale=magnitude)


def check_angles(config: V4Config, cos_sin: jax.Array, *, positions: int = 1) -> None:
    """Raises a TypeError or ValueError unless cos_sin has the config's width and at least `positions` rows."""
    shape = describe_as("cos_sin", cos_sin, "N R", ("float32",)).shape
    if shape[1] != config.rope_dim or shape[0] < positions:
        legal = f"[N, R] with N at least {positions} and R = {config.rope_dim}, the config's rope_dim"
        raise ValueError(f"cos_sin: got shape {show(shape)}; legal: {legal}")


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class V4Step:
    """One step, for all layers of one kind; made by `make_step`.

    Attributes:
        window: the step over the window caches: lengths of the requests, slots of the new tokens.
        positions: [T] i32, position of each new token; -1 for padding.
        state_slots: [B] i32, each request's compressor states; -1 for padding.
        window_slots: [T, window] i32, the window cache's slots that each token attends to on this device. If N devices
            of a context_axis share compressed entries, it has ceil(window / N) columns.
        compressed_tables: [B, Mc] i32, pages of the compressed caches for writing entries. With a context_axis they
            have a column for each page of a whole text, -1 where another device has the page (not in sliding layers,
            which write no entries).
        token_tables: [T, Mc] i32, this device's pages of the compressed caches, one row for each token.
        compressed_lens: [T] i32, how many entries each token sees on this device; None in sliding layers.
        rows: the index rows that tokens attend to; None in csa layers, which choose entries themselves.
        cos_sin: f32 [N, R], the result of `rope_table`.
        page_size: static, rows a page of the window cache.
        compressed_page_size: static, rows a page of the compressed caches.
        context_axis: static, the mesh axis whose devices share the compressed entries (`nn.context_parallel`).
    """

    window: Step
    positions: jax.Array
    state_slots: jax.Array
    window_slots: jax.Array
    compressed_tables: jax.Array
    token_tables: jax.Array
    compressed_lens: jax.Array | None
    rows: MixedIndices | None
    cos_sin: jax.Array
    page_size: int = field(metadata={"static": True})
    compressed_page_size: int = field(metadata={"static": True})
    context_axis: str | None = field(default=None, metadata={"static": True})

    @property
    def kind(self) -> Kind:
        """The kind of layers that the step was made for."""
        if self.compressed_lens is None:
            return "sliding"
        return "csa" if self.rows is None else "hca"


def make_step(
    config: V4Config,
    step: Step,
    *,
    state_slots: jax.Array,
    compressed_tables: jax.Array,
    cos_sin: jax.Array,
    page_size: int,
    compressed_page_size: int | None = None,
    context_axis: str | None = None,
) -> V4Step:
    """The V4Step of one step, for all layers with the config's kind, ratio, window and rope.

    Args:
        config: the config of any such layer.
        step: a step of ragged tokens over the window caches: block_tables [B, M] are the pages of these caches (columns
            for pages wholly before the window are not read), slot_mapping [T] the slots of the new tokens' latents.
        state_slots: [B] i32, each request's compressor states.
        compressed_tables: [B, Mc] i32, pages of the compressed caches (sliding layers do not use them).
        cos_sin: the result of `rope_table`.
        page_size: Z, rows a page of the window cache, static.
        compressed_page_size: rows a page of the compressed caches; None takes page_size.
        context_axis: a mesh axis whose devices share the compressed entries of every request (`nn.context_parallel`):
            page j of a text's entries is on device j mod N. compressed_tables are then the device's own; `step` is the
            step of whole texts, because every device has the whole window.

    Raises:
        TypeError, ValueError: an argument has an illegal type, shape or dtype; the errors of `window_slots` and
            `compressed_slots` (`tsmla_jax.sparse`); the step is dense, or was made with a context_axis or another
            page_size; under TSMLA_CHECK=1 also if the step's cu_seqlens_q doesn't fit its tokens.
    """
    check_config(config, V4Config)
    check_step(step, Step, "Step.ragged")
    num_requests = step.seq_lens.shape[0]
    describe_ints("state_slots", state_slots, "B", (num_requests, "B, the step's requests"))
    describe_ints("compressed_tables", compressed_tables, "B Mc", (num_requests, "B, the step's requests"))
    check_angles(config, cos_sin)
    check_mesh_axis("context_axis", context_axis)
    if step.context_axis is not None:
        raise ValueError(
            f"step: got one made with context_axis={step.context_axis!r}; legal: None, as every device has the whole"
            " window"
        )
    page_size = contract.static_int("page_size", page_size, minimum=1)
    if step.page_size not in (None, page_size):
        raise ValueError(f"page_size: got {page_size}; legal: {step.page_size}, with which the step was made")
    entries = page_size if compressed_page_size is None else compressed_page_size
    entries = contract.static_int("compressed_page_size", entries, minimum=int(config.kind != "sliding"))
    num_tokens = step.slot_mapping.shape[0]
    step = step.checked(num_tokens)
    requests, positions = step.ragged_tokens(num_tokens)
    window_tables = step.block_tables[requests]
    window = sparse_v4.window_slots(positions, window_tables, page_size=page_size, window=config.sliding_window)
    token_tables, lens, rows = compressed_tables[requests], None, None
    if config.kind == "sliding":
        rows = sparse_v4.build_mixed_sparse_indices(window)
    else:
        lens = jnp.maximum(positions + 1, 0) // config.ratio
        if context_axis is not None:
            lens = context_parallel.local_lens(lens, context_axis, entries)
            # Each device attends to its own part of the window, so that the merge counts every token of the window
            # once.
            window = context_parallel.own_slots(window, context_axis)
            compressed_tables = context_parallel.whole_tables(compressed_tables, context_axis)
        if config.kind == "hca":
            last = lens * config.ratio - 1  # the position at which a text sees as many entries as this device has
            chosen, lens = sparse_v4.compressed_slots(last, token_tables, ratio=config.ratio, page_size=entries)
            rows = sparse_v4.build_mixed_sparse_indices(window, chosen, lens)
    return V4Step(
        window=step,
        positions=positions,
        state_slots=state_slots,
        window_slots=window,
        compressed_tables=compressed_tables,
        token_tables=token_tables,
        compressed_lens=lens,
        rows=rows,
        cos_sin=cos_sin,
        page_size=page_size,
        compressed_page_size=entries,
        context_axis=context_axis,
    )
