"""`attention: tsmla` for MaxText: multi-head latent attention of DeepSeek's models by tsmla_jax, with its gradient.

    python examples/maxtext/tsmla_attention.py src/maxtext/configs/base.yml model_name=deepseek2-16b \
        attention=tsmla packing=true max_segments_per_seq=32 ...

trains as `python -m maxtext.trainers.pre_train.train` does. `attend` is the function for a branch of MaxText's own
`AttentionOp.apply_attention`; `install` puts that branch there from outside. Written against MaxText of 2026-08-22
(e591f30).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tsmla_jax.nn import Segments, dot_product_attention, segment_attention, segment_attention_kv

ATTENTION_TYPES = ("global", "mla")
# Arguments of apply_attention that ask for another attention.
OTHERS = ("previous_chunk", "bidirectional_mask", "compressed_mask", "decoder_segment_ids_kv")


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None,
    *,
    max_segments: int,
    mesh: Mesh,
    spec: PartitionSpec,
    rope_dim: int = 0,
    sinks: jax.Array | None = None,
    indexer_mask: jax.Array | None = None,
    return_max_logits: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention within segments, on each device's rows and heads.

    Args:
        query: [batch, length, heads, 192], with MaxText's softmax scale in it.
        key: [batch, length, heads, 192].
        value: [batch, length, heads, 128].
        decoder_segment_ids: [batch, length] i32, 0 for padding; None is one segment a row.
        max_segments: static, the most segments of a row (max_segments_per_seq); a row with more becomes NaN. With
            indexer_mask it isn't used.
        mesh, spec: how [batch, length, heads, columns] is split over devices: rows and heads may be.
        rope_dim: static, how many of key's last columns all heads share, as MaxText's MLA makes them. These are then
            read once, and key's other columns beside value, as MLA's wkv_b writes them: XLA sees that MLA's split and
            concatenation and those of this function cancel, and leaves out both.
        sinks: [heads], of `tsmla_jax.mla_prefill`.
        indexer_mask: [batch, length, length], 0 for the keys that V3.2's indexer chose for a token, negative for the
            others. It becomes bits, and takes the place of the ragged offsets.
        return_max_logits: static, whether the greatest logits are computed, too.
        implementation: of `tsmla_jax.mla_prefill`.

    Returns:
        [batch, length, heads, 128] in query's dtype, 0 for padding; and the greatest logit of each row and head,
        [batch, heads] in float32, for QK-clip, or None if they are not asked for.

    Raises:
        ValueError: spec splits the length (context parallelism) or the columns, or the arrays do not fit together.
    """
    rows, length, heads, columns = (*spec, *(None,) * (4 - len(spec)))
    for name, axes in (("length", length), ("columns", columns)):
        if _devices(mesh, axes) > 1:
            raise ValueError(f"spec: got {spec}, which splits the {name} over {axes!r}; legal: rows and heads only")
    if decoder_segment_ids is None:
        decoder_segment_ids = jnp.ones(query.shape[:2], jnp.int32)

    def on_one_device(
        query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, given: dict[str, jax.Array]
    ) -> list[jax.Array]:
        """The results that are asked for."""
        options: Any = {"sinks": given.get("sinks"), "implementation": implementation}
        options["return_max_logits"] = return_max_logits
        if "indexer_mask" in given:
            visible = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, :, None] & (given["indexer_mask"] == 0)
            found = dot_product_attention(
                query, key, value, mask=visible[:, None], scale=1.0, is_causal=True, **options
            )
        else:
            segments = Segments.from_ids(ids, max_segments=max_segments)
            options["softmax_scale"] = 1.0
            if rope_dim:
                nope, rope = jnp.split(key, [key.shape[-1] - rope_dim], axis=-1)
                kv = jnp.concatenate([nope, value], axis=-1)
                found = segment_attention_kv(query, kv, rope[:, :, 0], segments, **options)
            else:
                found = segment_attention(query, key, value, segments, **options)
        return [found[0], found[1].max(axis=1)] if return_max_logits else [found]

    split, of_rows = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    given = {"sinks": (sinks, PartitionSpec(heads)), "indexer_mask": (indexer_mask, of_rows)}
    given = {name: (x, spec) for name, (x, spec) in given.items() if x is not None}
    run = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(split, split, split, of_rows, {name: spec for name, (_, spec) in given.items()}),
        out_specs=[split, PartitionSpec(rows, heads)][: 1 + return_max_logits],
    )
    out, *max_logits = run(query, key, value, decoder_segment_ids, {name: x for name, (x, _) in given.items()})
    return out, max_logits[0] if max_logits else None


def attend_in(
    op: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None,
    *,
    model_mode: str,
    sinks: jax.Array | None = None,
    indexer_mask: jax.Array | None = None,
    record_max_logits: bool = False,
    **others: Any,
) -> jax.Array:
    """`attend` with what MaxText's AttentionOp `op` knows: its mesh, its rules of sharding and its config.

    sinks, indexer_mask: as in `attend`. record_max_logits: whether to keep the greatest logits in op.max_logits, where
    QK-clip reads them. others: the further arguments of `AttentionOp.apply_attention`.

    Raises:
        ValueError: the config or an argument asks for something else than causal attention of whole sequences.
    """
    config = op.config
    attention_type = getattr(op.attention_type, "value", op.attention_type)
    if attention_type not in ATTENTION_TYPES:
        raise ValueError(
            f"attention_type: got {attention_type}; legal with attention=tsmla: {', '.join(ATTENTION_TYPES)}"
        )
    if model_mode == "autoregressive":
        raise ValueError(
            f"model_mode: got {model_mode}, which attention=tsmla doesn't run; decode with attention=dot_product, or in"
            " an engine"
        )
    for name in ("attn_logits_soft_cap", "dropout_rate"):
        if getattr(op, name):
            raise ValueError(f"{name}: got {getattr(op, name)}; legal with attention=tsmla: None or 0")
    if asked := [name for name in OTHERS if others.get(name) is not None and others[name] is not False]:
        raise ValueError(f"{', '.join(asked)}: got a value; legal with attention=tsmla: None or False")
    packed = config.packing and config.dataset_type != "synthetic"
    if packed and config.max_segments_per_seq < 1:
        raise ValueError(
            f"max_segments_per_seq: got {config.max_segments_per_seq}; legal with packing=true: at least 1"
        )
    rows, heads, length, columns = op._logical_to_mesh_axes(op.flash_axis_names_q)
    out, max_logits = attend(
        query,
        key,
        value,
        decoder_segment_ids,
        max_segments=config.max_segments_per_seq if packed else 1,
        mesh=op.mesh,
        spec=PartitionSpec(rows, length, heads, columns),
        rope_dim=config.qk_rope_head_dim if attention_type == "mla" else 0,
        sinks=sinks,
        indexer_mask=indexer_mask,
        return_max_logits=record_max_logits,
    )
    if record_max_logits:
        from flax import nnx

        op.max_logits = nnx.Intermediate(max_logits)
    return out


def install() -> None:
    """Give MaxText's AttentionOp the choice `attention=tsmla`; every other choice stays as it is."""
    from maxtext.layers.attention_op import AttentionOp

    theirs = AttentionOp.apply_attention

    @functools.wraps(theirs)
    def apply_attention(
        self: Any,
        query: jax.Array,
        key: Any,
        value: Any,
        decoder_segment_ids: jax.Array | None,
        segment_positions: jax.Array | None,
        lengths: jax.Array | None,
        model_mode: str,
        **others: Any,
    ) -> Any:
        if self.attention_kernel != "tsmla":
            return theirs(
                self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode, **others
            )
        out = attend_in(self, query, key, value, decoder_segment_ids, model_mode=model_mode, **others)
        return out, None, None  # normalised already: no maximum and no sum

    AttentionOp.apply_attention = apply_attention


def _devices(mesh: Mesh, axes: str | tuple[str, ...] | None) -> int:
    """Over how many devices a dimension is split that lies over these axes."""
    count = 1
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        count *= mesh.shape[axis]
    return count


if __name__ == "__main__":
    from absl import app

    try:
        from maxtext.trainers.pre_train import train
    except ModuleNotFoundError as error:
        error.add_note("This program runs MaxText's trainer, in an environment with MaxText (docs/guides/trainers.md).")
        raise

    install()
    app.run(train.main)
