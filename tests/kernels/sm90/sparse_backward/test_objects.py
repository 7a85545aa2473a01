"""The gradient of sparse_mla as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no
GPU."""

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import SPARSE_MLA_BACKWARD
from tsmla_kernels.sm90.sparse_backward.config import backward_workspaces, sparse_backward_config

PLAIN = {"num_heads": "64", "layout": "plain"}
CONFIGS = {
    "D 576": PLAIN,
    "D 576, f16, lengths, gaps between pages": PLAIN | {"dtype": "float16", "lengths": "true", "page_span": "72"},
    "D 512, two caches, sinks": PLAIN | {"head_dim": "512", "window": "128", "sinks": "true"},
    "D 576, two caches, lengths, sinks": PLAIN | {"window": "4", "lengths": "true", "sinks": "true"},
    "D 576, 16 heads, lengths": PLAIN | {"num_heads": "16", "lengths": "true"},
    "D 512, 8 heads, two caches": PLAIN | {"num_heads": "8", "head_dim": "512", "window": "128"},
}
CONFIGS |= {f"{name}, deterministic": options | {"deterministic": "true"} for name, options in CONFIGS.items()}
FAST = ("D 576",)


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = SPARSE_MLA_BACKWARD.from_options(CONFIGS[name])
    of_groups = config.tokens > 1  # then there are two launches over tiles, behind one that makes unions
    kernels = 3 + config.deterministic + of_groups * 2
    check_compiled(SPARSE_MLA_BACKWARD, config, kernels)


def test_one_object_serves_every_number_of_heads_but_few() -> None:
    configs = {SPARSE_MLA_BACKWARD.from_options(PLAIN | {"num_heads": heads}) for heads in ("1", "24", "128")}
    assert len(configs) == 1


def test_tokens_with_few_heads_are_groups() -> None:
    def tokens(**options: str) -> int:
        return SPARSE_MLA_BACKWARD.from_options(PLAIN | options).tokens

    assert [tokens(num_heads=heads) for heads in ("8", "16", "32", "64")] == [8, 4, 2, 1]
    assert tokens(num_heads="16", form="direct") == tokens(num_heads="16", num_tokens="1") == 1
    assert tokens(num_heads="16", batch_invariant="true") == 1
    spec = SPARSE_MLA_BACKWARD.spec_from_options(PLAIN | {"num_heads": "16"})
    assert sparse_backward_config(dataclasses.replace(spec, num_selected=2052)).tokens == 1


def test_workspaces_are_linear_in_tokens_and_slots() -> None:
    """No products of tokens and slots make any memory, and the columns of the indices do only for groups of tokens."""
    config = SPARSE_MLA_BACKWARD.from_options(PLAIN)
    shapes = backward_workspaces(config, 4096, 128, 2048, 131072)
    assert shapes == {"kv_sum": ((131072, 576), "float32"), "row_terms": ((3, 4096 * 128), "float32")}
    config = SPARSE_MLA_BACKWARD.from_options(PLAIN | {"deterministic": "true"})
    shapes = backward_workspaces(config, 4096, 128, 2048, 131072)
    assert shapes["kv_sum"] == shapes["kv_carry"] == ((131072, 576), "int32")
    assert shapes["row_weights"] == ((2, 4096 * 128), "float32")
    assert all(shapes[name][0] == (131072,) for name in ("key_lengths", "key_bounds", "key_counts"))
    shapes = backward_workspaces(SPARSE_MLA_BACKWARD.from_options(PLAIN | {"num_heads": "16"}), 4096, 16, 2048, 131072)
    assert shapes["union_slots"] == ((1024, 7680), "int32") and shapes["union_bits"] == ((1024, 7680), "uint8")


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
