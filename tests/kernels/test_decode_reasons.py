"""Why no decode kernel takes a call: a reason that follows from another one is not given beside it."""

from collections.abc import Callable

import pytest

from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm90.decode import config as sm90
from tsmla_kernels.sm100 import config as sm100_config


@pytest.mark.parametrize("reasons", [sm90.decode_reasons, sm100_config.decode_reasons])
def test_queries_that_no_kernel_takes_are_the_only_reason(reasons: Callable[[DecodeSpec], list[str]]) -> None:
    sizes = {"batch": 2, "max_q_len": 1, "total_q_len": 2, "num_heads": 16, "latent_dim": 512, "rope_dim": 64}
    cache = {"num_pages": 4, "page_size": 64, "max_pages": 2}
    options = {"ragged": False, "causal": True, "batch_invariant": False}
    (said,) = reasons(DecodeSpec(**sizes, **cache, **options, q_dtype="float32", kv_dtype="bfloat16"))
    assert said.startswith("q.dtype is float32; ")
