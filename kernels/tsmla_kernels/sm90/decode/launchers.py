"""Which class of kernel a Hopper configuration is compiled from."""

from __future__ import annotations

from tsmla_kernels.sm90.decode.config import DecodeConfig
from tsmla_kernels.sm90.decode.mla_decode import MlaDecode
from tsmla_kernels.sm90.decode.mla_decode_fp8 import MlaDecodeFp8
from tsmla_kernels.sm90.decode.mla_decode_mixed import MlaDecodeMixed


def mla_decode(config: DecodeConfig) -> MlaDecode | MlaDecodeFp8:
    """Decode by the types of queries and cache: both fp8, 16 bits over fp8, or both 16 bits."""
    if config.fp8_scores:
        return MlaDecodeFp8(config)
    return MlaDecodeMixed(config) if config.mixed else MlaDecode(config)
