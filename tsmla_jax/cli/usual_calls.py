"""The usual calls at DeepSeek's sizes, and which implementation runs each, for `tsmla doctor` and `tsmla explain`."""

from __future__ import annotations

import dataclasses
from typing import Any

from tsmla_kernels.kernel import is_untested


@dataclasses.dataclass(frozen=True)
class UsualCall:
    """A usual call and its explanation: the implementation that runs, None if none can; and for every implementation
    the reasons why it can't run or isn't chosen by default, an empty tuple if it may be chosen."""

    op: str
    call: str
    chosen: str | None
    reasons: dict[str, tuple[str, ...]]


def usual_calls() -> tuple[UsualCall, ...]:
    """The usual calls at DeepSeek's sizes, and which implementation runs each. Nothing is allocated."""
    import jax
    import jax.numpy as jnp

    from tsmla_jax.ops.explain import explain
    from tsmla_jax.sparse import CompressorState

    def of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def usual(op: str, call: str, *args: Any, **kwargs: Any) -> UsualCall:
        explanation = explain(op, *args, **kwargs)
        return UsualCall(op, call, explanation.chosen, dict(explanation.reasons))

    bf16, fp8, i32, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.float32
    tables, lens, starts, slots = of((8, 64), i32), of((8,), i32), of((9,), i32), of((128,), i32)
    cache, fp8_cache = of((512, 64, 576), bf16), of((512, 64, 576), fp8)
    decode = {"block_tables": tables, "seq_lens": lens, "softmax_scale": 0.135}
    prefill = {
        "cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_q_len": 1024, "max_kv_len": 1024, "softmax_scale": 0.135,
    }  # fmt: skip
    row, row_rope = of((128, 512), bf16), of((128, 64), bf16)
    angles = [of((128, 32), f32)] * 2
    rope_write = (of((128, 128, 512), bf16), of((128, 128, 64), bf16), row, row_rope, slots, *angles)
    wide, values = of((4096, 128, 192), bf16), of((4096, 128, 128), bf16)
    kv = of((4096, 128, 256), bf16), of((4096, 64), bf16)
    parts = [of((64, 128, 512), bf16)] * 2, [of((64, 128), f32)] * 2
    state = CompressorState(of((8, 8, 2, 1024), f32), of((8, 8), i32))
    tokens, packed = of((64,), i32), of((512, 64, 656), jnp.uint8)
    index = of((64, 64, 128), fp8), of((64, 64), f32), of((512, 64, 132), jnp.uint8), of((64, 64), i32), tokens
    plain_index = of((64, 64, 128), bf16), of((64, 64), f32), of((512, 64, 128), bf16)
    chosen = of((64, 2048), i32)
    product = of((64, 7168), fp8), of((2112, 7168), fp8), of((64, 56), f32), of((17, 56), f32)
    stack = of((256, 4096, 7168), fp8), of((512, 56), f32), of((256, 32, 56), f32)
    experts = of((512, 7168), fp8), *stack, of((257,), i32)
    return (
        usual("mla_decode", "bf16", of((8, 1, 128, 576), bf16), cache, **decode),
        usual("mla_decode", "bf16 queries, fp8 cache", of((8, 1, 128, 576), bf16), fp8_cache, **decode),
        usual("mla_decode", "fp8", of((8, 1, 128, 576), fp8), fp8_cache, **decode),
        usual("mla_prefill", "bf16", wide, wide, values, **prefill),
        usual("mla_prefill_kv", "bf16", wide, *kv, **prefill),
        usual("write_kv_cache", "bf16", cache, row, row_rope, slots),
        usual("write_kv_cache", "fp8 cache", fp8_cache, row, row_rope, slots),
        usual("rope_write_kv_cache", "bf16", cache, *rope_write),
        usual("rope_write_kv_cache", "fp8 cache", fp8_cache, *rope_write),
        usual("gather_kv_cache", "bf16", cache, tables, lens, lens, total_len=4096),
        usual("merge_attention_states", "bf16", *parts),
        usual("sparse_mla", "packed V3.2 cache", of((64, 128, 576), bf16), packed, of((64, 2048), i32), tokens,
              softmax_scale=0.135),
        usual("indexer_logits", "V3.2", *index),
        usual("indexer_selected_logits", "bf16", *plain_index, chosen),
        usual("indexer_loss", "bf16, 2,048 selected keys", *plain_index, of((64, 128, 576), bf16), cache,
              of((64, 128), f32), indices=chosen, softmax_scale=0.135),
        usual("select_topk", "V3.2", of((64, 4096), f32), tokens, 2048),
        usual("selection_bits", "V3.2", of((4096, 2048), i32), num_keys=4096),
        usual("indexer_topk", "V3.2", *index, 2048),
        usual("compress_kv", "V4, ratio 4", of((512, 2, 1024), f32), of((4, 1024), f32), state, state_slots=lens,
              seq_lens=lens, cu_seqlens_q=starts, ratio=4, overlap=True),
        usual("compress_write_kv_cache", "V4, ratio 4", of((512, 37440), jnp.uint8), of((512, 2, 1024), f32),
              of((4, 1024), f32), state, of((512,), bf16), of((4096, 64), f32), tables, state_slots=lens, seq_lens=lens,
              cu_seqlens_q=starts, ratio=4, overlap=True, eps=1e-6),
        usual("write_packed_kv_cache", "V3.2", packed, row, row_rope, slots, *angles),
        usual("write_indexer_cache", "V3.2", index[2], of((128, 128), bf16), slots, *angles),
        usual("indexer_quantize", "V3.2", of((128, 64, 128), bf16), of((128, 64), bf16), *angles),
        usual("block_scaled_matmul", "V3", *product),
        usual("grouped_block_scaled_matmul", "V3", *experts),
        usual("quantize_blocks", "bf16", of((64, 7168), bf16)),
    )  # fmt: skip


def lines_of(call: UsualCall) -> list[str]:
    """Lines of text: first the usual call and the implementation that runs it, then a line with the reasons for each
    implementation that can't run it or isn't chosen by default.
    """
    refused = [f"  not {name}: {'; '.join(reasons)}" for name, reasons in call.reasons.items() if reasons]
    # Kernels whose only reason is that no such GPU was tested: they run if they are named.
    unproven = [name for name, reasons in call.reasons.items() if reasons and all(map(is_untested, reasons))]
    named = f"; {' or '.join(unproven)} if it is named (untested on such a GPU)" if unproven else ""
    return [f"{call.op}, {call.call}: {call.chosen or 'nothing can run it'}{named}", *refused]
