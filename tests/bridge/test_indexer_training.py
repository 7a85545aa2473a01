"""indexer_selected_logits and indexer_loss on torch tensors: results and gradients as tsmla_jax defines them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import tensor, tensors_of
from tests.jax.ops.indexer_problems import SCALE, Problem, T, floats_of
from tsmla_bridge import indexer_reference

FLOATS = ("index_q", "index_weights", "index_cache")


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all tokens and columns, and blocks of two tokens and four columns, which divide neither."""
    if request.param == "many blocks":
        monkeypatch.setattr(indexer_reference, "BLOCK_COLUMNS", 4)
        monkeypatch.setattr(indexer_reference, "BLOCK_BYTES", 2 * 4 * 4 * 24)


def arguments(x: Problem, which: str, sinks: bool = True) -> dict[str, Any]:
    """A call's arrays by name."""
    given: dict[str, Any] = dict(zip(FLOATS, floats_of(x, which), strict=True))
    given |= {"q": x.q, "kv_cache": x.caches(which)[1], "lse": x.lse, **x.where(which)}
    return given | ({"sinks": x.sinks} if sinks else {})


def loss_of(given: dict[str, torch.Tensor], call: Any = tsmla_bridge.indexer_loss) -> torch.Tensor:
    return call(**given, softmax_scale=SCALE)


def in_torch(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors, those of the indexer asking for a gradient."""
    given = tensors_of(arrays)
    for name in FLOATS:
        given[name].requires_grad_()
    return given


def wanted(arrays: dict[str, Any]) -> tuple[Any, Any]:
    """The losses and the gradients of their weighted sum by jax's definition."""

    def loss(*floats: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = {**arrays, **dict(zip(FLOATS, floats, strict=True))}
        each = tsmla_jax.indexer_loss(**given, softmax_scale=SCALE, implementation="reference")
        return (each * jnp.arange(1, T + 1)).sum(), each

    gradients, each = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*(arrays[name] for name in FLOATS))
    return each, gradients


def assert_gradients(given: dict[str, torch.Tensor], want: Any, rtol: float = 1e-4) -> None:
    for name, gradient in zip(FLOATS, want, strict=True):
        found = given[name].grad
        assert found is not None and found.dtype == given[name].dtype
        scale = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(found.float().numpy(), np.float32(gradient), rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("which", ["selected", "all keys"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("blocks")
def test_the_loss_as_jax_defines_it(which: str, sinks: bool) -> None:
    arrays = arguments(Problem(1), which, sinks)
    want, gradients = wanted(arrays)
    given = in_torch(arrays)
    loss = loss_of(given)
    np.testing.assert_allclose(loss.detach().numpy(), want, rtol=1e-5, atol=1e-5)
    (loss * torch.arange(1, T + 1)).sum().backward()
    assert_gradients(given, gradients)


@pytest.mark.parametrize("name", ["sinks", "q", "lse", "index_q"])
def test_sinks_with_nearly_all_weight_and_nan(name: str) -> None:
    x = Problem(1)
    x.sinks += 150
    arrays = arguments(x, "selected")
    if name != "sinks":
        arrays[name] = np.array(arrays[name])
        arrays[name][0] = np.nan
    want, gradients = wanted(arrays)
    given = in_torch(arrays)
    loss = loss_of(given)
    np.testing.assert_allclose(loss.detach().numpy(), want, rtol=1e-4, atol=1e-4)
    assert np.isnan(want[0]) == (name != "sinks") and (want[1:] > 0.1).any()
    (loss * torch.arange(1, T + 1)).sum().backward()
    found = given["index_weights"].grad
    assert found is not None
    np.testing.assert_allclose(found.numpy(), gradients[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("which", ["selected", "all keys"])
def test_16_bits(which: str) -> None:
    arrays = arguments(Problem(2, "bfloat16"), which)
    want, gradients = wanted(arrays)
    given = in_torch(arrays)
    loss = loss_of(given)
    np.testing.assert_allclose(loss.detach().numpy(), want, rtol=1e-4, atol=1e-4)
    (loss * torch.arange(1, T + 1)).sum().backward()
    assert_gradients(given, gradients, rtol=2**-7)


@pytest.mark.usefixtures("blocks")
def test_selected_logits_as_jax_defines_them() -> None:
    x = Problem(3)
    arrays = dict(zip(("q", "weights", "k_cache"), floats_of(x, "selected"), strict=True))
    where = x.where("selected")
    cotangent = np.random.default_rng(0).standard_normal((T, where["indices"].shape[1])).astype(np.float32)

    def loss(*floats: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = tsmla_jax.indexer_selected_logits(*floats, **where, implementation="reference")  # type: ignore[misc]
        return jnp.where(jnp.isfinite(logits), logits * cotangent, 0).sum(), logits

    gradients, want = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays.values())
    given = [x.requires_grad_() for x in tensors_of(arrays).values()]
    logits = tsmla_bridge.indexer_selected_logits(*given, **tensors_of(where))
    np.testing.assert_allclose(logits.detach().numpy(), want, rtol=1e-5, atol=1e-5)
    torch.where(logits.isfinite(), logits * torch.from_numpy(cotangent), 0).sum().backward()
    for found, gradient in zip(given, gradients, strict=True):
        assert found.grad is not None
        np.testing.assert_allclose(found.grad.numpy(), gradient, rtol=1e-4, atol=1e-4)


def test_no_gradient_passes_through_the_attention() -> None:
    given = in_torch(arguments(Problem(4), "selected"))
    for name in ("q", "kv_cache", "lse", "sinks"):
        given[name].requires_grad_()
    loss_of(given).sum().backward()
    assert all(given[name].grad is None for name in ("q", "kv_cache", "lse", "sinks"))


def test_under_torch_compile() -> None:
    arrays = arguments(Problem(5), "selected")
    _, gradients = wanted(arrays)
    given = in_torch(arrays)
    weights = torch.arange(1, T + 1)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def total(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return (loss_of(given) * weights).sum()

    total(given).backward()
    assert_gradients(given, gradients)


def test_the_operators_are_sound() -> None:
    given = in_torch(arguments(Problem(6), "selected"))
    order = [*FLOATS, "q", "kv_cache", "lse", "sinks", "indices", "lengths"]
    arrays = (*(given[name] for name in order), None, None, None, None, SCALE)
    torch.library.opcheck(torch.ops.tsmla.indexer_loss.default, arrays)
    selected = (*(given[name] for name in FLOATS), given["indices"], given["lengths"])
    torch.library.opcheck(torch.ops.tsmla.indexer_selected_logits.default, selected)


def test_a_scale_on_the_device() -> None:
    given = tensors_of(arguments(Problem(7), "selected"))
    want = loss_of(given)
    got = tsmla_bridge.indexer_loss(**given, softmax_scale=torch.tensor(SCALE))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"implementation": "cute"}, NotImplementedError, "indexer_loss.*there is no kernel for this operation yet"),
        ({"implementation": "fast"}, ValueError, "implementation: got 'fast'"),
        (
            {"index_q": torch.zeros((T, 3, 16), dtype=torch.float8_e4m3fn)},
            ValueError,
            "index_q: got float8_e4m3fn, qua",
        ),
        ({"indices": None, "lengths": None}, ValueError, "indices: got None; legal: indices, or block_tables"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale: got 0.0"),
        ({"lse": torch.zeros(T, 9)}, ValueError, r"lse: .* axis 1 must be 2 \(H, q's heads\)"),
    ],
)
def test_illegal_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {**tensors_of(arguments(Problem(8), "selected")), "softmax_scale": SCALE, **changes}
    with pytest.raises(error, match=message):
        tsmla_bridge.indexer_loss(**given)


def test_checks_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    given = tensors_of(arguments(Problem(9), "selected"))
    given["lengths"] = tensor(np.full(T, 10, np.int32))
    with pytest.raises(ValueError, match="lengths: token 0 has 10 active indices; legal: 0 to K = 9"):
        loss_of(given)
