"""The public surface of the package tokenspeed_mla 2.0 on this project's kernels, for engines that call that package.

The same functions with the same parameters, defaults, dtypes and results. Where that package reads out of bounds or
answers quietly wrong (requests without keys, query tokens that see none, values that are a slice of a wider tensor),
this one is right or raises. On Blackwell GPUs the real package runs the calls of attention; NotImplementedError if it
can't be called.

`tsmla_bridge.install_as_tokenspeed_mla()` makes `import tokenspeed_mla` find this one. The submodules are there because
engines import from them.
"""

from tsmla_bridge.engines.tokenspeed_mla import mla_decode as mla_decode
from tsmla_bridge.engines.tokenspeed_mla import mla_prefill as mla_prefill
from tsmla_bridge.engines.tokenspeed_mla import utils as utils
from tsmla_bridge.engines.tokenspeed_mla.mla_decode import tokenspeed_mla_decode
from tsmla_bridge.engines.tokenspeed_mla.mla_kv_pack_quantize_fp8 import mla_kv_pack_quantize_fp8
from tsmla_bridge.engines.tokenspeed_mla.mla_prefill import tokenspeed_mla_prefill, warmup_compile_prefill
from tsmla_bridge.engines.tokenspeed_mla.utils import get_num_sm

__all__ = [
    "get_num_sm",
    "mla_kv_pack_quantize_fp8",
    "tokenspeed_mla_decode",
    "tokenspeed_mla_prefill",
    "warmup_compile_prefill",
]
