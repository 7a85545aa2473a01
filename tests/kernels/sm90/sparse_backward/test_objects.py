"""The gradient of sparse_mla as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no
GPU."""

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import SPARSE_MLA_BACKWARD
from tsmla_kernels.sm90.sparse_backward.config import backward_workspaces

PLAIN = {"num_heads": "64", "layout": "plain"}
CONFIGS = {
    "D 576": PLAIN,
    "D 576, f16, lengths, gaps between pages": PLAIN | {"dtype": "float16", "lengths": "true", "page_span": "72"},
    "D 512, two caches, sinks": PLAIN | {"head_dim": "512", "window": "128", "sinks": "true"},
    "D 576, two caches, lengths, sinks": PLAIN | {"window": "4", "lengths": "true", "sinks": "true"},
}
CONFIGS |= {f"{name}, deterministic": options | {"deterministic": "true"} for name, options in CONFIGS.items()}
FAST = ("D 576", "D 576, deterministic")


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = SPARSE_MLA_BACKWARD.from_options(CONFIGS[name])
    check_compiled(SPARSE_MLA_BACKWARD, config, kernels=4 if config.deterministic else 3)


def test_one_object_serves_every_number_of_heads() -> None:
    configs = {SPARSE_MLA_BACKWARD.from_options(PLAIN | {"num_heads": heads}) for heads in ("1", "16", "128")}
    assert len(configs) == 1


def test_workspaces_are_linear_in_tokens_and_slots() -> None:
    """Neither the columns of the indices nor products of tokens and slots make any memory."""
    config = SPARSE_MLA_BACKWARD.from_options(PLAIN)
    shapes = backward_workspaces(config, 4096, 128, 2048, 131072)
    assert shapes == {"kv_sum": ((131072, 576), "float32"), "row_terms": ((3, 4096 * 128), "float32")}
    config = SPARSE_MLA_BACKWARD.from_options(PLAIN | {"deterministic": "true"})
    shapes = backward_workspaces(config, 4096, 128, 2048, 131072)
    assert shapes["kv_sum"] == ((131072, 576), "int32") and shapes["row_weights"] == ((2, 4096 * 128), "float32")
    assert all(shapes[name][0] == (131072,) for name in ("key_norms", "key_bounds", "key_counts"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout": "v32"}, "kv_cache has v32 rows of uint8; the sm_90 sparse gradient takes plain rows of q's dtype"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_cache has plain rows of float8_e4m3fn"),
        ({"dtype": "float32"}, "q.dtype is float32; the sm_90 sparse gradient takes bfloat16 or float16"),
        ({"head_dim": "640"}, "q's D is 640; the sm_90 sparse gradient takes 512 or 576"),
        ({"latent_dim": "256"}, "latent_dim is 256; the sm_90 sparse gradient takes 512"),
    ],
)
def test_what_is_not_served(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SPARSE_MLA_BACKWARD.from_options(PLAIN | options)
