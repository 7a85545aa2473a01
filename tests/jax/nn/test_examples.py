"""The layer's examples run as they are; each checks its own numbers and leaves with an error if they are off."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

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
    assert f"a device holds {1 / (fsdp * context):.2f} of the parameters" in said and "from one device's" in said


@pytest.mark.parametrize(("fsdp", "context"), [(2, 1), (1, 2)])
def test_train_mesh_sums_scalars_alone(fsdp: int, context: int) -> None:
    """XLA 0.11.2 can read a bfloat16 sum over GPUs as float32 if it joins it with others (docs/guides/sharding.md)."""
    pytest.importorskip("optax", reason="needs optax: pip install 'tsmla-jax[flax]'")
    example = load("train_mesh")
    mesh, shape = example.make_mesh(fsdp, context), example.Shape(layers=1, tokens=64, max_len=40, width=64)
    params = jax.eval_shape(lambda: example.init(shape))
    specs = example.specs_of(params, mesh)

    def gradients(params: Any, texts: Any) -> Any:
        return jax.value_and_grad(example.loss_of)(params, specs, shape, jnp.bfloat16, texts)

    program = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(specs, example.TEXTS), out_specs=(P(), specs)))
    text = program.lower(params, next(example.batches(shape, 1))).as_text()
    summed = re.findall(r'"stablehlo.all_reduce".*?\) -> (tensor<[^>]*>)', text, re.DOTALL)
    assert summed and set(summed) <= {"tensor<f32>", "tensor<i32>"}


@pytest.mark.parametrize(
    ("example", "name", "value", "least"),
    [
        ("train_mesh", "steps", 0, 1), ("train_mesh", "fsdp", 0, 1), ("train_mesh", "max_len", 2, 3),
        ("rollout_and_training", "texts", 0, 1), ("rollout_and_training", "new", 1, 2),
        ("rollout_and_training", "prompt", -1, 0),
    ],
)  # fmt: skip
def test_sizes_that_examples_refuse(
    capsys: pytest.CaptureFixture[str], example: str, name: str, value: int, least: int
) -> None:
    if example == "train_mesh":
        pytest.importorskip("optax", reason="needs optax: pip install 'tsmla-jax[flax]'")
    with pytest.raises(SystemExit):
        load(example).main([f"--{name}={value}"])
    assert f"--{name}: got {value}; legal: at least {least}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fsdp=2", "--rows=3"], "--rows: got 3; legal: a multiple of --fsdp, 2\n"),
        (["--context=2", "--tokens=255"], "--tokens: got 255; legal: a multiple of --context, 2\n"),
        (["--fsdp=64", "--rows=64"], "--fsdp, --context: got 64 devices; legal: at most "),
    ],
)
def test_meshes_that_train_mesh_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    pytest.importorskip("optax", reason="needs optax: pip install 'tsmla-jax[flax]'")
    with pytest.raises(SystemExit):
        load("train_mesh").main(["--context=1", *arguments])
    assert said in capsys.readouterr().err


def test_a_mesh_whose_loss_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's max passes over NaN behind the first number."""
    pytest.importorskip("optax", reason="needs optax: pip install 'tsmla-jax[flax]'")
    example = load("train_mesh")
    losses = iter(([2.0, float("nan"), 1.0], [2.0, 1.5, 1.0]))
    monkeypatch.setattr(example, "train", lambda *_: example.Run(next(losses), 1, 1.0))
    with pytest.raises(SystemExit, match="the mesh does not train as one device does"):
        example.main(["--fsdp", "1", "--steps", "3"])


def test_a_trainer_by_rows_has_the_rollouts_bits() -> None:
    """And one of whole texts has not: what the example counts."""
    example = load("rollout_and_training")
    model, texts = example.models(1)["tiny"], example.Texts(4, 6, 6)
    params = example.draw(model, jnp.float32)
    rollout = example.roll_out(model, texts, params, jnp.dtype("float32"))
    for batches in (example.in_place(texts), example.text_after_text(texts)):
        assert sorted(batches.reshape(-1)) == list(range(20))
        exact = example.recompute_exact(model, texts, params, rollout.tokens, batches)
        assert example.difference(rollout.log_probs, exact) == (0.0, 0.0, 0.0)
    whole = example.recompute_whole(model, texts, params, rollout.tokens, [None])
    assert 0 < example.difference(rollout.log_probs, whole).greatest < 1e-5
    one, two = jnp.asarray([1.0, -1.0, 0.0]), jnp.asarray([jnp.nextafter(1, 2), -1.0, -0.0])
    assert example.difference(one, two)[:2] == (pytest.approx(1 / 3), 1.0)  # -0 is 0
    with pytest.raises(ValueError, match="got NaN"):
        example.difference(one * jnp.nan, one * jnp.nan)


def test_a_trainer_has_the_rollouts_bits_at_once() -> None:
    """With products that add in one order for any number of rows."""
    example = load("rollout_and_training")
    model, texts = example.models(1)["tiny"], example.Texts(4, 12, 6)
    params = example.draw(model, jnp.dtype("float32"))
    steps = example.in_one_order(model, params)
    rollout = example.roll_out(model, texts, steps, jnp.dtype("float32"))
    for batches in (example.all_rows(texts), example.text_after_text(texts)):
        exact = example.recompute_exact(model, texts, steps, rollout.tokens, batches)
        assert example.difference(rollout.log_probs, exact) == (0.0, 0.0, 0.0)
    whole = example.recompute_whole(model, texts, params, rollout.tokens, [None])
    assert 0 < example.difference(rollout.log_probs, whole).greatest < 1e-5


@pytest.mark.slow  # compiles some ten programs
@pytest.mark.parametrize("model", ["tiny", "tiny-v3.2"])
def test_rollout_and_training(capsys: pytest.CaptureFixture[str], model: str) -> None:
    load("rollout_and_training").main(
        ["--model", model, "--layers", "1", "--texts", "4", "--prompt", "6", "--new", "6"]
    )
    said = capsys.readouterr().out
    for way in ("repeated", "exact   "):
        assert f"  {way}                            0.0% differ, by  0.0 bits" in said
    assert ("attention: absorbed, expanded" in said) == (model == "tiny")
    assert ("  replayed" in said) == (model == "tiny-v3.2")
