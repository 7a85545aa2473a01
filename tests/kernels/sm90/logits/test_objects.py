"""The indexer_logits kernel as it is compiled, and how it shares work out. Needs no GPU."""

import dataclasses
import itertools

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import INDEXER_LOGITS
from tsmla_kernels.contract.layouts import IndexerCacheSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec
from tsmla_kernels.sm90.constants import SMEM_BYTES
from tsmla_kernels.sm90.logits.config import BLOCK, LogitsConfig, logits_config, logits_reasons

ONE_TOKEN = IndexerLogitsSpec(
    64, 64, 64, 128, 512, IndexerCacheSpec(8, 64, 128, True), False, "float8_e4m3fn", "float32", "uint8"
)


def spec(tokens: int, requests: int, heads: int = 64, ragged: bool = True) -> IndexerLogitsSpec:
    return dataclasses.replace(ONE_TOKEN, num_tokens=tokens, num_requests=requests, num_heads=heads, ragged=ragged)


CONFIGS = {
    "decode": logits_config(ONE_TOKEN),
    "decode of 2 tokens": logits_config(spec(16, 8)),
    "decode of 4 tokens": logits_config(spec(32, 8)),
    "prefill": logits_config(spec(4096, 1)),
    "prefill, 32 heads": logits_config(spec(4096, 1, 32)),
    "prefill, 24 heads": logits_config(spec(4096, 1, 24)),
    "decode of 4 tokens, 32 heads": logits_config(spec(32, 8, 32)),
    "prefill, 8 heads, short pages": dataclasses.replace(logits_config(spec(4096, 1, 8)), page_size=16),
    "decode of 2 tokens, writes rows": dataclasses.replace(logits_config(spec(16, 8)), writes_rows=True),
    "prefill, writes rows": dataclasses.replace(logits_config(spec(4096, 1)), writes_rows=True),
    "prefill, 24 heads, writes rows": dataclasses.replace(logits_config(spec(4096, 1, 24)), writes_rows=True),
    "plain keys, 128 heads, long pages": dataclasses.replace(
        logits_config(spec(64, 64, 128, False)), page_size=128, packed=False
    ),
}
FAST = ("decode", "prefill, writes rows")
"""Compiled in every run of the tests. The others are slow tests."""


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    check_compiled(INDEXER_LOGITS, CONFIGS[name], kernels=1)


@pytest.mark.parametrize("heads", range(8, 129, 8))
@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (64, 64), (8, 4), (12, 4), (32, 8), (50, 8), (4096, 1)])
def test_a_configuration_fits(heads: int, tokens: int, requests: int) -> None:
    config = logits_config(spec(tokens, requests, heads))
    assert config.stages >= 4 and config.stages % (config.groups // config.q_groups) == 0
    words = config.stages * BLOCK + 2 * config.weight_words
    assert config.stages * BLOCK * 128 + 2 * config.q_bytes + 4 * words + 1024 <= SMEM_BYTES
    assert config.columns <= 128 and BLOCK % config.tile_tokens == 0


def test_reasons_name_what_is_not_taken() -> None:
    assert logits_reasons(ONE_TOKEN) == []
    for change, reason in (
        ({"num_heads": 12}, "num_heads (Hi) is 12"),
        ({"num_heads": 136}, "num_heads (Hi) is 136"),
        ({"head_dim": 64}, "head_dim (Di) is 64"),
        ({"q_dtype": "bfloat16"}, "q's dtype is bfloat16"),
        ({"weights_dtype": "float64"}, "weights' dtype is float64"),
        ({"cache": IndexerCacheSpec(8, 48, 128, True)}, "page_size (Z) is 48"),
        ({"cache": IndexerCacheSpec(8, 64, 128, False), "cache_dtype": "bfloat16"}, "k_cache's dtype is bfloat16"),
    ):
        assert logits_reasons(dataclasses.replace(ONE_TOKEN, **change))[0].startswith(reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("tile_tokens", [1, 2, 4, 8, 64])
def test_blocks_of_tiles(tile_tokens: int) -> None:
    share = pytest.importorskip("tsmla_kernels.sm90.logits.share")
    config = LogitsConfig(8, tokens=tile_tokens, ragged=True)
    line = share.Line(config)
    for keys, tokens in itertools.product((0, 1, 63, 64, 65, 640, 1000), (0, 1, 2, 3, 7, 8, 129, 1500)):
        request = share.Request(keys, tokens, 0)
        before, tile = 0, 0
        while tile * tile_tokens < min(tokens, keys):
            assert line.blocks_before(request, tile) == before
            assert line.blocks(request, tile) == -(-(keys - tile * tile_tokens) // BLOCK)
            before += line.blocks(request, tile)
            tile += 1
        assert line.tiles(request) == tile and line.cost(request) == before
