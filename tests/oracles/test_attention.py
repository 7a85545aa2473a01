"""The quick definition of decode says what the obvious one does."""

import numpy as np
import pytest

from tests.oracles import attention
from tests.oracles.inputs import paged


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [None, [2, 0, 3, 1]])
def test_the_definitions_of_decode_agree(q_lens: list[int] | None, causal: bool) -> None:
    case = paged([9, 3, 20, 0], s=3, q_lens=q_lens, padding_rows=2)
    arrays, options = (case.kv_cache, case.block_tables, case.seq_lens), {"latent_dim": 32, "causal": causal}
    outs, lses = attention.decode(case.per_request(), *arrays, scale=0.2, kv_scale=0.5, **options)
    offsets = case.cu_seqlens_q
    out, lse = attention.batched_decode(case.q, *arrays, scale=0.2, kv_scale=0.5, cu_seqlens_q=offsets, **options)
    if offsets is not None:
        assert not out[offsets[-1] :].any() and np.all(lse[offsets[-1] :] == -np.inf)
        out, lse, outs, lses = out[: offsets[-1]], lse[: offsets[-1]], [np.concatenate(outs)], [np.concatenate(lses)]
        out, lse = out[None], lse[None]
    for got, want in ((out, outs), (lse, lses)):
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-12, atol=1e-12)
