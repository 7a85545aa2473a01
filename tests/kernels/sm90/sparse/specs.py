"""Specs of caches and calls that the sparse kernels' tests share."""

from __future__ import annotations

import dataclasses

from tsmla_kernels.contract.layouts import CacheSpec
from tsmla_kernels.contract.sparse import SparseMLASpec
from tsmla_kernels.sm90.constants import FP8

V32 = CacheSpec("v32", 7, 64, 64, 576, "uint8")

V4 = CacheSpec("v4", 7, 64, 64, 512, "uint8")

PLAIN = CacheSpec("plain", 7, 64, 64, 512, FP8)

V32_CALL = SparseMLASpec(5, 16, 576, 512, 2048, 2048, V32, None, "bfloat16")

V4_CALL = SparseMLASpec(3, 64, 512, 512, 640, 128, V4, dataclasses.replace(V4, page_size=2, span=2), "bfloat16")
