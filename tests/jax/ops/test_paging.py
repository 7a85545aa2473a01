"""slots and init_cache, from jax and torch: the slots of `nn.Step`, and what is not legal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tsmla_jax.nn import Step

PAGE = 16


def _ints(rng: np.random.Generator, high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, shape).astype(np.int32)


def _expected(tables: np.ndarray, positions: np.ndarray, requests: np.ndarray) -> np.ndarray:
    """Slot by slot."""
    out = np.full(positions.shape, -1, np.int32)
    for place, position in np.ndenumerate(positions):
        if 0 <= position < tables.shape[1] * PAGE:
            out[place] = tables[requests[place[0]], position // PAGE] * PAGE + position % PAGE
    return out


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 0)])
def test_slots_of_requests(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    tables, positions = _ints(rng, 99, 3, 4), rng.integers(-3, 4 * PAGE + 9, shape).astype(np.int32)
    want = _expected(tables, positions, np.arange(3))
    by_jax = jax.jit(tsmla_jax.slots, static_argnums=2)(tables, positions, PAGE)
    by_torch = tsmla_bridge.slots(torch.from_numpy(tables), torch.from_numpy(positions).long(), PAGE)
    np.testing.assert_array_equal(by_jax, want)
    np.testing.assert_array_equal(by_torch, want)
    assert by_jax.dtype == jnp.int32 and by_torch.dtype == torch.int32


def test_slots_of_tokens() -> None:
    rng = np.random.default_rng(1)
    tables, positions, requests = _ints(rng, 99, 3, 4), _ints(rng, 70, 11), _ints(rng, 3, 11)
    want = _expected(tables, positions, requests)
    np.testing.assert_array_equal(tsmla_jax.slots(tables, positions, PAGE, requests=requests), want)
    given = [torch.from_numpy(each) for each in (tables, positions, requests)]
    np.testing.assert_array_equal(tsmla_bridge.slots(given[0], given[1], PAGE, requests=given[2]), want)


def test_a_request_that_does_not_exist_has_no_slot() -> None:
    """Padding has the request -1, which is not the last one."""
    tables, positions = np.array([[1, 2], [3, 4]], np.int32), np.array([0, 5, 17, 0], np.int32)
    for dtype, requests in ((np.int32, [-1, 0, 1, 2]), (np.int64, [-1, 0, 1, 2**32])):
        given = np.array(requests, dtype)
        assert tsmla_jax.slots(tables, positions, PAGE, requests=given).tolist() == [-1, PAGE + 5, 4 * PAGE + 1, -1]
        found = tsmla_bridge.slots(*map(torch.from_numpy, (tables, positions)), PAGE, requests=torch.from_numpy(given))
        assert found.tolist() == [-1, PAGE + 5, 4 * PAGE + 1, -1]


def test_tables_of_more_positions_than_int32_has() -> None:
    tables, positions = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    assert tsmla_bridge.slots(tables, positions, 1 << 30).tolist() == [5]


def test_slots_are_those_of_a_step() -> None:
    tables, lens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4), jnp.array([20, 64], jnp.int32)
    step = Step.dense(tables, lens, new_tokens=2, page_size=PAGE)
    positions = lens[:, None] - 2 + jnp.arange(2, dtype=jnp.int32)
    np.testing.assert_array_equal(tsmla_jax.slots(tables, positions, PAGE), step.slot_mapping)


@pytest.mark.parametrize("tables", [(0, 4), (2, 0)])
def test_no_request_or_no_page_has_no_slot(tables: tuple[int, int]) -> None:
    positions = np.zeros((tables[0],), np.int32)
    assert (np.asarray(tsmla_jax.slots(np.zeros(tables, np.int32), positions, PAGE)) == -1).all()
    found = tsmla_bridge.slots(torch.zeros(tables, dtype=torch.int32), torch.from_numpy(positions), PAGE)
    assert found.shape == positions.shape and (found == -1).all()


def test_a_page_or_position_of_no_slot_in_32_bits_has_none() -> None:
    """A number of 64 bits is not cut to another one: slot 2^32 would become slot 0."""
    tables = np.array([[-1, 2**26, 5, 2**31 // PAGE - 1]], np.int64)
    positions = np.array([[3, PAGE, 2 * PAGE + 1, 2**32 + 2 * PAGE, 4 * PAGE - 1]], np.int64)
    expected = [[-1, 2**26 * PAGE, 5 * PAGE + 1, -1, 2**31 - 1]]
    assert tsmla_jax.slots(tables, positions, PAGE).tolist() == expected
    assert tsmla_bridge.slots(torch.from_numpy(tables), torch.from_numpy(positions), PAGE).tolist() == expected
    tables[0, 1] = 2**28
    expected[0][1] = -1
    assert tsmla_jax.slots(tables, positions, PAGE).tolist() == expected
    assert tsmla_bridge.slots(torch.from_numpy(tables), torch.from_numpy(positions), PAGE).tolist() == expected
    step = Step.dense(jnp.array([[3, -1]], jnp.int32), jnp.array([20], jnp.int32), new_tokens=5, page_size=PAGE)
    assert step.slot_mapping.tolist() == [[3 * PAGE + 15, -1, -1, -1, -1]]


def test_slots_of_pages_of_one_token() -> None:
    """The first page without slots in int32 is then 2^31, which is no int32."""
    tables, positions = np.array([[4, 2**31 - 1, -1]], np.int32), np.array([[0, 1, 2, 3]], np.int32)
    expected = [[4, 2**31 - 1, -1, -1]]
    assert tsmla_jax.slots(tables, positions, 1).tolist() == expected
    for dtype in (torch.int32, torch.int64):
        given = torch.from_numpy(tables).to(dtype), torch.from_numpy(positions)
        assert tsmla_bridge.slots(*given, 1).tolist() == expected
    step = Step.dense(jnp.array([[3, 7]], jnp.int32), jnp.array([2], jnp.int32), new_tokens=2, page_size=1)
    assert step.slot_mapping.tolist() == [[3, 7]]


def test_a_new_cache_is_zeros() -> None:
    cache = tsmla_jax.init_cache(3, dtype="float8_e4m3fn")
    assert cache.shape == (3, 64, 576) and cache.dtype == jnp.float8_e4m3fn and not np.asarray(cache, np.float32).any()
    other = tsmla_bridge.init_cache(2, page_size=32, head_dim=320, dtype=torch.float16)
    assert other.shape == (2, 32, 320) and other.dtype == torch.float16 and not other.any()


def _as_torch(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


TABLES, LENS = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((TABLES, np.zeros(3, np.int32), 16), {}, r"positions: got shape \[3\]; axis 0 must be 2 \(B, block_tables's"),
        ((TABLES, np.zeros((2, 1, 1), np.int32), 16), {}, r"positions: got shape \[2, 1, 1\]; legal: \[B\], \[B, S\]"),
        ((TABLES[0], LENS, 16), {}, "block_tables: got shape"),
        ((TABLES.astype(np.float32), LENS, 16), {}, "block_tables: got dtype float32"),
        ((TABLES, LENS, 0), {}, "page_size: got 0; legal: an int >= 1"),
        ((TABLES, LENS, 16), {"requests": np.zeros(3, np.int32)}, r"requests: got shape \[3\]; axis 0 must be 2"),
        (([1], LENS, 16), {}, "block_tables: got list; legal: "),
    ],
)
@pytest.mark.parametrize("front", ["jax", "torch"])
def test_what_is_not_legal(front: str, arguments: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    slots: Callable[..., Any] = tsmla_jax.slots if front == "jax" else tsmla_bridge.slots
    if front == "torch":
        arguments, named = tuple(map(_as_torch, arguments)), {name: _as_torch(each) for name, each in named.items()}
    with pytest.raises((TypeError, ValueError), match=said):
        slots(*arguments, **named)


def test_tensors_of_two_devices() -> None:
    with pytest.raises(ValueError, match="positions: got a tensor on meta; it must be on block_tables's device, cpu"):
        tsmla_bridge.slots(torch.from_numpy(TABLES), torch.from_numpy(LENS).to("meta"), PAGE)


def test_what_a_cache_can_not_be() -> None:
    with pytest.raises(TypeError, match=r"dtype: got 'bfloat61'; legal: a dtype, as jax\.numpy\.bfloat16"):
        tsmla_jax.init_cache(1, dtype="bfloat61")
    for init in (tsmla_jax.init_cache, tsmla_bridge.init_cache):
        with pytest.raises(ValueError, match="num_pages: got -1; legal: an int >= 0"):
            init(-1)
    with pytest.raises(ValueError, match="dtype: got int32; legal: float16, bfloat16, float32, float64, float8_e4m3fn"):
        tsmla_jax.init_cache(1, dtype=jnp.int32)
    with pytest.raises(ValueError, match="dtype: got int32"):
        tsmla_bridge.init_cache(1, dtype=torch.int32)


def test_a_prompt_attends_to_itself_without_offsets_of_keys() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((10, 2, 192), np.float32)
    offsets = np.array([0, 6, 10], np.int32)
    usual = {"cu_seqlens_q": offsets, "max_q_len": 6, "softmax_scale": 0.1}
    given = {**usual, "cu_seqlens_kv": offsets, "max_kv_len": 6}
    v, kv, rope = x[..., :128], np.concatenate([x[..., :128], x[..., :128]], -1), x[:, 0, :64].copy()
    np.testing.assert_array_equal(tsmla_jax.mla_prefill(x, x, v, **usual), tsmla_jax.mla_prefill(x, x, v, **given))
    np.testing.assert_array_equal(
        tsmla_jax.mla_prefill_kv(x, kv, rope, **usual), tsmla_jax.mla_prefill_kv(x, kv, rope, **given)
    )
    q, k, values = torch.from_numpy(x), torch.from_numpy(kv), torch.from_numpy(v.copy())
    usual["cu_seqlens_q"] = given["cu_seqlens_q"] = given["cu_seqlens_kv"] = torch.from_numpy(offsets)
    torch.testing.assert_close(
        tsmla_bridge.mla_prefill(q, q, values, **usual), tsmla_bridge.mla_prefill(q, q, values, **given), rtol=0, atol=0
    )
    kv_rope = torch.from_numpy(rope)
    torch.testing.assert_close(
        tsmla_bridge.mla_prefill_kv(q, k, kv_rope, **usual), tsmla_bridge.mla_prefill_kv(q, k, kv_rope, **given),
        rtol=0, atol=0,
    )  # fmt: skip
    said = tsmla_jax.explain("mla_prefill", x, x, v, cu_seqlens_q=offsets, max_q_len=6, softmax_scale=0.1)
    assert said.chosen == "xla"
    with pytest.raises(TypeError, match="max_kv_len: got None; legal: a static int >= 0 where cu_seqlens_kv is given"):
        tsmla_jax.mla_prefill(x, x, v, **{**usual, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets})


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_program_for_a_gpu_runs_on_a_cpu() -> None:
    """Sizes of workspaces are 0, and calls take the workspace."""
    size = tsmla_bridge.decode_workspace_size(max_batch=4, num_heads=16)
    assert size == tsmla_bridge.sparse_workspace_size(max_tokens=4, num_heads=16) == 0
    workspace = tsmla_bridge.Workspace(size)
    q, cache = torch.ones(1, 1, 16, 576), torch.ones(1, 64, 576)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    out = torch.empty(1, 1, 16, 512)
    call = dict(softmax_scale=0.1, out=out)
    assert tsmla_bridge.mla_decode(q, cache, tables, lens, **call, workspace=workspace) is out
    with pytest.raises(TypeError, match=r"workspace: got int; legal: a tsmla_bridge.Workspace, or None"):
        tsmla_bridge.mla_decode(q, cache, tables, lens, **call, workspace=10)
