"""The prefill kernel as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tsmla_kernels import cache
from tsmla_kernels.catalog import MLA_PREFILL, mla_prefill_config
from tsmla_kernels.compile import CompiledObject
from tsmla_kernels.resources import resource_report

ARCH = "sm_90a"

CONFIGS = {
    "192 and 128": {},
    "192 and 128, not causal": {"causal": "false"},
    "128 and 128, f16": {"qk_head_dim": "128", "dtype": "float16"},
    "kv and k_rope": {"shared_rope": "true"},
    "64 and 64": {"qk_head_dim": "64", "v_head_dim": "64"},
}
FAST = ("192 and 128",)
"""Compiled in every run of the tests; each takes five to ten seconds. The others are slow tests."""


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("prefill-objects")


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CONFIGS])
def compiled(request: pytest.FixtureRequest, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledObject:
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(shared_cache))
    return cache.load_or_compile(MLA_PREFILL, mla_prefill_config(CONFIGS[request.param]), ARCH)


def test_everything_stays_in_registers(compiled: CompiledObject) -> None:
    report = resource_report(compiled)
    assert len(report.kernels) == 2  # attention and its plan
    for kernel in report.kernels:
        assert kernel.stack_bytes == 0, f"{kernel.name}: {kernel.stack_bytes} bytes of local memory a thread"
        assert kernel.registers <= 255
    assert report.serialised == ()
    assert "Used" in compiled.log and "registers" in compiled.log  # the assembler did speak
    assert " spill stores" not in compiled.log.replace(" 0 bytes spill stores", "")


def test_object_is_small_enough_to_embed(compiled: CompiledObject) -> None:
    # It travels in every program that calls it.
    assert len(compiled.module) < 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            "no kernel for it: q.dtype is float32; the sm_90 prefill kernel takes bfloat16 or float16",
        ),
        (
            {"v_head_dim": "64"},
            "no kernel for it: the head dims of k and v are 192 and 64; the sm_90 prefill kernel takes",
        ),
        ({"head_dim": "64"}, "got option 'head_dim'; legal: batch_invariant, causal, "),
        ({"causal": "maybe"}, "got causal=maybe; legal: true or false"),
    ],
)
def test_options_that_are_not_legal(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_prefill_config(options)
