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
