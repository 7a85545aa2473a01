"""Pallas' kernels on other GPUs than Hopper: which can run them, with how much shared memory, by which widening."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.gpu_compiler import CARDS
from tsmla_jax.generate import explaining, moe
from tsmla_jax.nn.products import grouped_matmul, linear, triton
from tsmla_jax.nn.products.block_scaled import BlockScaled
from tsmla_jax.nn.products.tiles import expert_tiles, fitting_stages, linear_tile
from tsmla_jax.ops import device


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose jax has a GPU of the parameter's architecture, and can't compile for it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device, "target_arch", lambda: request.param)
    jax.clear_caches()  # what was traced for another GPU
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("gpu", "capability", "kib"),
    [("sm_80a", (8, 0), 163), ("sm_86a", (8, 6), 99), ("sm_89", (8, 9), 99), ("sm_90a", (9, 0), 227),
     ("sm_100a", (10, 0), 227), ("sm_103a", (10, 3), 227), ("sm_120a", (12, 0), 99), (None, (9, 0), 227)],
    indirect=["gpu"],
)  # fmt: skip
def test_what_a_gpu_can_do(gpu: None, capability: tuple[int, int], kib: int) -> None:
    assert triton.compute_capability() == capability
    assert triton.shared_memory() == 1024 * kib
    assert triton.why_not() == []
    assert grouped_matmul.why_not(jnp.bfloat16, 128, 128, narrow=True) == []


@pytest.mark.parametrize("gpu", ["sm_75a", "sm_70a"], indirect=True)
def test_older_gpus_take_another_path_and_explain_says_so(gpu: None) -> None:
    (reason,) = triton.why_not()
    assert "compute capability 8.0 or more" in reason and "this one has 7." in reason
    x = jax.ShapeDtypeStruct((20, 128), jnp.bfloat16)
    weight = BlockScaled(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((256, 128), jnp.float8_e4m3fn), ((2, 1), jnp.float32))))  # type: ignore[arg-type]  # fmt: skip
    assert "pallas_call" not in str(jax.make_jaxpr(linear.linear)(x, weight))
    mlp = {"router": jnp.zeros((4, 128)), "down": jnp.zeros((4, 128, 256), jnp.bfloat16)}
    (choice,) = explaining.explain_experts({"layers": [{"mlp": mlp}]}, jnp.dtype(jnp.bfloat16))
    assert choice.implementation == "lax.ragged_dot" and "compute capability 8.0" in choice.why
    assert moe.why_not_grouped(jnp.bfloat16, 128, 256, True)


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_loads_in_flight_fit_the_shared_memory(kib: int) -> None:
    """Fewer where there is less; on Hopper as many as the tiles say."""
    tiles = []
    for hidden, width, experts in ((2048, 1408, 64), (7168, 2048, 256), (4096, 2048, 256)):
        for narrow in (False, True):
            for pairs in (1, 16, 100, 1000, 10_000, 100_000):
                block, up, down = expert_tiles(pairs, experts, hidden, width, narrow)
                tiles += [(block, up, narrow, True), (block, down, narrow, False)]
    tiles += [(*linear_tile(rows, 2112, 7168), True, False) for rows in (1, 16, 64, 128, 256, 512)]
    for block, tile, narrow, gated in tiles:
        stages = fitting_stages(tile, block, 1 if narrow else 2, gated=gated, most=1024 * kib)
        load = tile.depth * (2 * block + (1 if narrow else 2) * tile.columns * (2 if gated else 1))
        assert 1 <= stages <= tile.stages and (stages - 1) * load < 1024 * kib
        assert stages == tile.stages or kib < 227
        assert stages > 1  # one load is always ahead


@pytest.mark.parametrize(("gpu", "knows"), [("sm_80a", False), ("sm_86a", False), ("sm_89a", True)], indirect=["gpu"])
def test_weights_are_widened_by_instructions_that_the_gpu_has(gpu: None, knows: bool) -> None:
    for rows, instruction in ((4, "fma.rn.bf16x2"), (20, "cvt.rn.f16x2.e4m3x2" if knows else "mul.rn.f16x2")):
        weight = BlockScaled(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
            ((256, 128), jnp.float8_e4m3fn), ((2, 1), jnp.float32))))  # type: ignore[arg-type]  # fmt: skip
        traced = str(jax.make_jaxpr(linear.linear)(jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16), weight))
        assert instruction in traced and "mul.rn.bf16x2" not in traced
        assert ("e4m3x2" in traced) is (knows and rows > 8)


def run_ptx(text: str, four: np.ndarray) -> np.ndarray:
    """What the PTX of a widening makes of e4m3 bytes [N, 4]: 16-bit patterns [N, 4]."""
    kind = np.float16 if "f16x2" in text and "bf16x2" not in text else jnp.bfloat16
    registers = {"$2": four.astype(np.uint8).view(np.uint32)[:, 0]}

    def value(name: str) -> np.ndarray:
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    def halves(bits: np.ndarray) -> np.ndarray:
        return np.broadcast_to(bits, len(four)).copy().view(np.uint16).reshape(-1, 2).view(kind).astype(np.float32)

    for line in text.split("\n")[2:-1]:
        name, rest = line.rstrip(";").split(" ", 1)
        target, *sources = rest.split(", ")
        given = [value(source) for source in sources]
        if name == "mov.b32":
            out = given[0]
        elif name == "prmt.b32":
            chosen = [int(sources[2], 16) >> 4 * byte & 0xF for byte in range(4)]
            out = sum((given[0] >> 8 * at & 0xFF) << 8 * byte for byte, at in enumerate(chosen) if at < 4)
        elif name == "shr.u32":
            out = given[0] >> given[1]
        elif name == "and.b32":
            out = given[0] & given[1]
        elif name == "lop3.b32":
            assert given[3] == 0xEA  # (a & b) | c
            out = given[0] & given[1] | given[2]
        else:
            assert re.fullmatch(r"(mul|fma)\.rn\.b?f16x2", name)
            product = halves(given[0]) * halves(given[1]) + (halves(given[2]) if "fma" in name else 0)
            out = product.astype(kind).view(np.uint16).copy().view(np.uint32)[:, 0]
        registers[target] = np.asarray(out, np.uint32)
    both = np.stack([registers["$0"], registers["$1"]], axis=1)
    return both.copy().view(np.uint16).reshape(-1, 4).view(kind)


@pytest.mark.parametrize("text", [grouped_matmul._WIDEN, grouped_matmul._MOVE_TO_F16])
def test_every_weight_is_widened_exactly(text: str) -> None:
    every = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)  # but the two that are no numbers
    four = np.stack([np.roll(every, shift) for shift in range(4)], axis=1)
    expected = four.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(run_ptx(text, four).astype(np.float32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_products_compile_for_other_cards(card: str, child_environment: dict[str, str]) -> None:
    """By XLA's compiler, which needs the plug-in's packages and no GPU."""
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        pytest.skip("needs jax's CUDA plug-in: pip install 'jax[cuda13]'")
    command = [sys.executable, "-m", "tests.jax.gpu_compiler", card]
    ran = subprocess.run(command, env=child_environment, capture_output=True, text=True, timeout=900, check=False)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(lines) == 16 and all(line.endswith(": ok") for line in lines), ran.stdout
