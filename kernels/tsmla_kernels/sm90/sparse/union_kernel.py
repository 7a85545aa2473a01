"""sparse_mla for Hopper whose tokens may share gathers, in three launches:

  union.py      makes the unions of groups of tokens, and says which groups share
  kernel.py     computes the groups that share; a row tile has the query rows of a group
  kernel.py     computes the other tokens; a row tile has query rows of one token

Two further kernels merge the pieces of the second and of the third launch. The second launch can leave a group to the
third: see SparseValues.look_at. The group's pieces are then not merged.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import const_expr

from tsmla_kernels.sm90.sparse.kernel import SparseMla
from tsmla_kernels.sm90.sparse.memory import Arrays
from tsmla_kernels.sm90.sparse.record import sparse_mla_operands
from tsmla_kernels.sm90.sparse.union import UnionArrays, UnionMaker
from tsmla_kernels.sm90.sparse.union_config import UnionConfig


class SparseMlaUnion:
    """One compiled sparse_mla whose tokens may share gathers. The launcher takes a stream and the operands of
    record.py."""

    def __init__(self, config: UnionConfig) -> None:
        self.config = config
        self.unions, self.shared, self.alone = UnionMaker(config), SparseMla(config.shared), SparseMla(config.alone)

    @cute.jit
    def __call__(self, stream: cuda.CUstream, q: cute.Tensor, *others: cute.Tensor):
        config = self.config
        names = [operand.name for operand in sparse_mla_operands(config)][1:]
        given = dict(zip(names, others, strict=True))
        caches = (given["kv_cache"], *([given["compressed_kv_cache"]] if const_expr(config.two_caches) else []))
        indices, token_lengths, union_lengths = (given[n] for n in ("indices", "token_lengths", "union_lengths"))
        slots, bits, sinks = given["union_slots"], given["union_bits"], given.get("sinks")
        results = {"sinks": sinks, **{name: given.get(name) for name in ("scales", "out", "lse", "max_logits")}}
        unions = UnionArrays(
            indices=indices,
            lengths=given.get("lengths"),
            slots=slots,
            bits=bits,
            union_lengths=union_lengths,
            token_lengths=token_lengths,
        )
        self.unions.launch(stream, unions)
        parts = ("partial_out", "partial_lse", "split_info")
        of_shared = {name: given[f"union_{name}"] for name in parts}
        shared = Arrays(
            indices=slots, lengths=union_lengths, bits=bits, token_lengths=token_lengths, **results, **of_shared
        )
        of_alone = {name: given[name] for name in parts}
        alone = Arrays(indices=indices, lengths=token_lengths, **results, **of_alone)
        self.shared.launch_attend(stream, q, caches, shared)
        self.alone.launch_attend(stream, q, caches, alone)
        self.shared.launch_merge(stream, shared)
        self.alone.launch_merge(stream, alone)
