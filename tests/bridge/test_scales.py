"""Scales of a call on the stand-in for the GPU: multiplied as they should be, and kept where that is safe."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import BF16, assert_close, assert_right, attend, served
from tests.emulator.launcher import Gpu
from tsmla_bridge.runtime import scales


def test_scales_are_those_of_the_call(gpu: Gpu) -> None:
    case = served([5, 33])
    for scale, kv_scale in ((0.05, 1.0), (0.1, 0.5), (0.05, 1.0), (0.2, 2.0)):
        got = attend(case, softmax_scale=scale, kv_scale=kv_scale)
        assert_right(got, case, scale=scale, kv_scale=kv_scale)
    changing = torch.tensor(0.5)
    for value in (0.5, 3.0):
        changing.fill_(value)
        got = attend(case, softmax_scale=0.2, kv_scale=changing, q_scale=torch.tensor(2.0))
        assert_right(got, case, scale=0.2, kv_scale=value, q_scale=2.0)


def test_scalars_of_numpy_are_numbers(gpu: Gpu) -> None:
    """Not rounded to float32 before they are multiplied: the results are those of Python's numbers, bit by bit."""
    case, numbers = served([5, 33]), {"softmax_scale": 0.1, "q_scale": 0.7, "kv_scale": 0.3}
    of_numpy = {name: np.float32(number) for name, number in numbers.items()}
    numbers = {name: float(number) for name, number in of_numpy.items()}
    assert scales.product(*of_numpy.values(), None) == scales.product(*numbers.values(), None)
    torch.testing.assert_close(attend(case, **of_numpy), attend(case, **numbers), rtol=0, atol=0)
    rows, slots = torch.ones(1, 320, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    cache = torch.zeros(2, 1, 16, 320, dtype=torch.bfloat16)
    for page, scale in zip(cache, (of_numpy["kv_scale"], numbers["kv_scale"]), strict=True):
        tsmla_bridge.write_kv_cache(page, rows, None, slots, kv_scale=scale)
        tsmla_bridge.gather_kv_cache(page, slots[:, None], slots, slots + 1, total_len=1, kv_scale=scale)
    assert cache[0].equal(cache[1])


@pytest.fixture
def written(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stream of each pair of numbers that was written, by the one kernel that writes one."""
    streams: list[int] = []
    write = torch.linspace

    def linspace(*args: Any, **options: Any) -> torch.Tensor:
        streams.append(gpu.stream)
        return write(*args, **options)

    monkeypatch.setattr(torch, "linspace", linspace)
    return streams


def test_numbers_are_written_once_a_stream_and_once_a_capture(gpu: Gpu, written: list[int]) -> None:
    case = served([5, 33])

    def call(scale: float = 0.1) -> int:
        attend(case, softmax_scale=scale)
        return gpu.operands["scales"].data_ptr()

    places = {call(), call(), call()}
    assert written == [0] and len(places) == 1
    with gpu.on_stream(7):
        places |= {call(), call()}
    assert written == [0, 7] and len(places) == 2
    for capture in (1, 2):  # what a graph reads, the graph has written
        with gpu.on_stream(7, capture):
            inside = {call(), call()}
            assert len(inside) == 1 and not inside & places
            assert call(0.2) not in inside
    assert written == [0, 7, 7, 7, 7, 7]


def test_numbers_do_not_pile_up(gpu: Gpu, written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "MAX_PAIRS", 2)
    for number in (1.0, 2.0, 3.0, 1.0):
        scales.on_device((number, 1.0), -1, 0)
    assert len(written) == 4  # the third dropped the others


def test_operators_keep_no_scales(gpu: Gpu, written: list[int]) -> None:
    """torch.compile runs them on memory that it takes back: its warm-up's, or its graph's."""
    case = served([5, 33])
    options = (256, None, True, False, False, None)
    latent, slots = torch.ones(1, 320, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    for capture in (None, 1):
        with gpu.on_stream(7, capture):
            for _ in range(2):
                out, _ = torch.ops.tsmla.mla_decode(*case.arrays, None, None, None, case.case.scale, 2.0, *options)
                assert_close(out, case.want()[0] * 2, 2 * BF16)
                cache = torch.zeros(1, 16, 320, dtype=torch.bfloat16)
                torch.ops.tsmla.write_kv_cache(cache, latent, None, slots, None, 2.0, None)
                assert cache.sum() == 160
    assert len(gpu.launches) == len(written) == 8
    with gpu.on_stream(7):
        attend(case)
        kept = gpu.operands["scales"].data_ptr()
        torch.ops.tsmla.mla_decode(*case.arrays, None, None, None, case.case.scale, 1.0, *options)
    assert gpu.operands["scales"].data_ptr() == kept and len(written) == 9  # a kept pair is used


@pytest.mark.parametrize("pair", [(0.1, 1.0), (1e-30, 3e38), (-3e38, 3e38), (np.inf, 1.0), (np.nan, 2.0), (0.0, -0.0)])
def test_a_pair_is_written_to_the_bit(gpu: Gpu, pair: tuple[float, float]) -> None:
    np.testing.assert_array_equal(scales.on_device(pair, -1, 0).numpy(), np.asarray(pair, np.float32))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_scales_are_rounded_in_one_order(on_gpu: bool, request: pytest.FixtureRequest) -> None:
    """Numbers are multiplied in float64 and rounded at the end; with a tensor all are float32, multiplied in order. The
    custom calls of jax do the same."""
    if on_gpu:
        request.getfixturevalue("gpu")
    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.uniform(1e-3, 3.0), rng.choice([None, rng.uniform(0.1, 9.0)]), rng.uniform(1e-3, 3.0)]
        as_tensors = [x is not None and rng.random() < 0.6 for x in numbers]
        given = [torch.tensor(x) if wrap else x for x, wrap in zip(numbers, as_tensors, strict=True)]
        pair = scales.product(given[0], given[1], given[2], given[2])
        softmax, query, key = (1.0 if x is None else x for x in numbers)
        if any(as_tensors):
            logits = np.float32(softmax) * np.float32(query) * np.float32(key)
        else:
            logits = np.float32(softmax * query * key)
        got = pair.numpy() if isinstance(pair, torch.Tensor) else np.asarray(pair, np.float32)
        np.testing.assert_array_equal(got, np.asarray([logits, key], np.float32))


# ---- threads, captures


def test_threads_and_streams_do_not_meet(gpu: Gpu) -> None:
    cases = [served([5 + i, 33 - i, i], s=1 + i % 3, seed=i) for i in range(6)]
    wants = [case.want() for case in cases]
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        try:
            gpu.stream = 100 + thread
            for _ in range(20):
                i = rng.randrange(len(cases))
                scale = rng.choice([None, cases[i].case.scale * (1 + thread)])
                got = attend(cases[i], **({} if scale is None else {"softmax_scale": scale}))
                want = wants[i] if scale is None else cases[i].want(scale=scale)
                assert_close(got[0], want[0], BF16)
                assert_close(got[1], want[1], 1e-3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert gpu.loads == 3  # S is 1, 2 or 3


def test_a_kernel_is_not_loaded_during_a_capture(gpu: Gpu) -> None:
    case = served([5, 33])
    message = "mla_decode: the first call with these static sizes loads its kernel"
    with gpu.on_stream(7, capture=1), pytest.raises(RuntimeError, match=message):
        attend(case)
    attend(case)
    with gpu.on_stream(7, capture=1):
        tsmla_bridge.mla_decode(*served([5, 33, 1]).arrays, **case.options)


def test_numbers_beside_a_tensor_are_rounded_as_in_jax() -> None:
    """Each to float32 before they are multiplied, not after: the two differ in a last bit."""
    rng = np.random.default_rng(0)
    pairs = rng.uniform(0.01, 2, (200, 2))
    got = [float(scales.factors(softmax, query, torch.tensor(0.5), None)[0]) for softmax, query in pairs.tolist()]
    want = np.float32(pairs[:, 0]) * np.float32(pairs[:, 1])
    np.testing.assert_array_equal(np.float32(got), want)
    assert (want != np.float32(pairs[:, 0] * pairs[:, 1])).any()


@pytest.mark.parametrize("q_scale", [None, 0.3])
def test_numbers_beside_a_tensor_of_float64_stay_float64(q_scale: float | None) -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    want = torch.tensor(0.1 * (q_scale or 1.0), dtype=torch.float64)
    assert torch.equal(scales.product(0.1, q_scale, one, one)[0], want)
    assert torch.equal(scales.factors(0.1, q_scale, one, None)[0], want)
