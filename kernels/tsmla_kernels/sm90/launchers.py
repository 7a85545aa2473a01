"""Which class of kernel a Hopper configuration is compiled from."""

from __future__ import annotations

from tsmla_kernels.sm90.choose import DecodeConfig
from tsmla_kernels.sm90.mla_decode import MlaDecode
from tsmla_kernels.sm90.mla_decode_fp8 import MlaDecodeFp8


def mla_decode(config: DecodeConfig) -> MlaDecode | MlaDecodeFp8:
    """Decode with the tensor cores of the queries' type: fp8 where queries and cache are, else 16 bits."""
    return MlaDecodeFp8(config) if config.fp8_scores else MlaDecode(config)
