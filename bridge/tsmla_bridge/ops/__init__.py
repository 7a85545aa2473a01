"""The operations: each module has the public function and the torch operator that torch.compile sees in its place.

All are imported together: an exported program may call any of the operators."""

from tsmla_bridge.ops import cache_ops, merge, mla_decode, mla_prefill, mla_prefill_kv, sparse_mla

__all__ = ["cache_ops", "merge", "mla_decode", "mla_prefill", "mla_prefill_kv", "sparse_mla"]
