"""The layer's examples run as they are; each checks its own numbers and leaves with an error if they are off."""

import pytest

from tests.jax.nn.examples import load


def test_decode_loop(capsys: pytest.CaptureFixture[str]) -> None:
    load("decode_loop").main()
    assert "12 tokens for 3 requests" in capsys.readouterr().out


def test_flax_nnx_layer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax", reason="needs flax: pip install 'tsmla-jax[flax]'")
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'tsmla-jax[hf]'")
    load("flax_nnx_layer").main([])
    assert "decoded 4 tokens" in capsys.readouterr().out


def test_linen_layer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax", reason="needs flax: pip install 'tsmla-jax[flax]'")
    load("linen_layer").main()
    assert "decode over the cache differs" in capsys.readouterr().out


@pytest.mark.slow  # compiles four steps of training
def test_train_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax", reason="needs flax: pip install 'tsmla-jax[flax]'")
    load("train_sparse").main(["--steps", "32", "--warm_up", "16"])
    assert "from the reference's" in capsys.readouterr().out


def test_train_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax", reason="needs flax: pip install 'tsmla-jax[flax]'")
    load("train_transformer").main(["--steps", "22"])
    assert "from the reference's" in capsys.readouterr().out


slow = pytest.mark.slow  # 2 x 2 has both


@pytest.mark.parametrize(("fsdp", "context"), [(2, 2), pytest.param(2, 1, marks=slow), pytest.param(1, 2, marks=slow)])
def test_train_mesh(capsys: pytest.CaptureFixture[str], fsdp: int, context: int) -> None:
    """The losses are those of one device, with parameters and tokens split over two or four."""
    pytest.importorskip("optax", reason="needs optax: pip install 'tsmla-jax[flax]'")
    sizes = ["--layers", "1", "--tokens", "64", "--max_len", "40", "--width", "64"]
    load("train_mesh").main(["--fsdp", str(fsdp), "--context", str(context), "--steps", "3", *sizes])
    said = capsys.readouterr().out
    assert f"a device holds {1 / fsdp:.2f} of the parameters" in said and "from one device's" in said
