"""The machine that runs PTX: what it computes, and the faults and hazards that it finds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.ptx import machine
from tests.emulator.ptx.machine import Memory, Order, Part

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 source, .param .u64 target)
.reqntid {threads}, 1, 1
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
ld.param.b64 %rd1, [source];
ld.param.b64 %rd2, [target];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
shl.b32 %r2, %r1, 2;
mov.b32 %r3, memory;
add.s32 %r4, %r3, %r2;
setp.eq.s32 %p1, %r1, 0;
{body}
ret;
}}
"""


def run(
    body: str,
    source: np.ndarray,
    count: int = 0,
    threads: int = 32,
    seed: int = 0,
    programmatic: tuple[bool, ...] = (False,),
    blocks: int = 1,
    **order: Any,
) -> tuple[np.ndarray, list[str]]:
    """What `body` leaves in a target of `count` words, and the hazards. %rd4 and %rd5 are the thread's words of source
    and target, %r4 its word of shared memory; %p1 holds in the first thread. order: further fields of Order."""
    target = np.zeros(count or source.size, np.int32)
    memory = [
        Memory("source", source.ctypes.data, source.nbytes, writable=False),
        Memory("target", target.ctypes.data, target.nbytes, writable=True),
    ]
    text = HEAD.format(threads=threads, body=body)
    arguments = [source.ctypes.data, target.ctypes.data]
    hazards = machine.run_text(text, memory, arguments, Order(seed, **order), programmatic, blocks)
    return target, hazards


NUMBERS = np.arange(1, 257, dtype=np.int32)


def test_lanes_that_part_meet_again() -> None:
    body = """
    ld.global.b32 %r5, [%rd4];
    and.b32 %r6, %r5, 1;
    setp.eq.s32 %p2, %r6, 0;
    @%p2 bra EVEN;
    mul.lo.s32 %r5, %r5, 10;
    bra.uni JOIN;
    EVEN:
    add.s32 %r5, %r5, 1000;
    JOIN:
    shfl.sync.bfly.b32 %r7, %r5, 1, 31, -1;
    st.global.b32 [%rd5], %r7;
    """
    got, _ = run(body, NUMBERS[:32])
    own = np.where(NUMBERS[:32] % 2, NUMBERS[:32] * 10, NUMBERS[:32] + 1000)
    assert np.array_equal(got, own.reshape(-1, 2)[:, ::-1].ravel())


def test_labels_in_braces_are_those_of_the_braces() -> None:
    """Inline assembly has the same labels at every place."""
    count = "{{ .reg .pred p; AGAIN: add.s32 %r5, %r5, {step}; setp.lt.s32 p, %r5, 10; @p bra AGAIN; }}"
    body = f"mov.b32 %r5, 0; {count.format(step=5)} {count.format(step=3)} st.global.b32 [%rd5], %r5;"
    got, _ = run(body, NUMBERS[:32])
    assert (got == 13).all()


@pytest.mark.parametrize(
    ("instruction", "dtype", "bits"),
    [
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %r5, %r5; cvt.u32.u16 %r6, %h1; and.b32 %r6, %r6, 255;", "float8_e4m3fn", 8),
        ("cvt.rn.bf16x2.f32 %r6, %r5, %r5; and.b32 %r6, %r6, 65535;", "bfloat16", 16),
        ("cvt.rn.f16x2.f32 %r6, %r5, %r5; and.b32 %r6, %r6, 65535;", "float16", 16),
    ],
)
def test_rounding_is_that_of_ml_dtypes(instruction: str, dtype: str, bits: int) -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(256) * 2.0 ** generator.integers(-30, 8, 256)).astype(np.float32)
    values[:8] = 0.0, -0.0, 448.0, 2.0**-9, 2.0**-10, 1.0625, 17.0, -(2.0**-24)
    body = f"ld.global.b32 %r5, [%rd4]; {instruction} st.global.b32 [%rd5], %r6;"
    got, _ = run(body, values.view(np.int32), threads=256)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    want = np.clip(values, -448, 448).astype(kind) if bits == 8 else values.astype(kind)
    assert np.array_equal(got, want.view(f"u{bits // 8}").astype(np.int32))


def test_rounding_towards_zero_makes_no_infinity() -> None:
    values = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    values *= 2.0 ** np.linspace(-30, 20, 256, dtype=np.float32)
    values[:8] = 65504.0, 65519.9, -65520.0, 1e30, -1e30, np.inf, -np.inf, 0.0
    instruction = "cvt.rz.f16x2.f32 %r6, %r5, %r5; and.b32 %r6, %r6, 65535;"
    body = f"ld.global.b32 %r5, [%rd4]; {instruction} st.global.b32 [%rd5], %r6;"
    got, _ = run(body, values.view(np.int32), threads=256)
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float16)
    too_far = np.abs(nearest.astype(np.float32)) > np.abs(values)
    want = np.where(too_far, np.nextafter(nearest, np.float16(0)), nearest)
    assert np.array_equal(got, want.view(np.uint16).astype(np.int32))


def test_a_read_outside_of_the_arrays_is_found() -> None:
    with pytest.raises(AssertionError, match=r"reaches over the end of source|outside of all arrays"):
        run("ld.global.b32 %r5, [%rd4+4]; st.global.b32 [%rd5], %r5;", NUMBERS[:32])


def test_a_write_into_an_input_is_found() -> None:
    with pytest.raises(AssertionError, match=r"writes into source, an input \(st.global.b32, line \d+ of the PTX"):
        run("st.global.b32 [%rd4], 1;", NUMBERS[:32])


@pytest.mark.parametrize("early", ["ld.global.b32 %r5, [%rd4];", "st.global.b32 [%rd5], %r5;"])
def test_an_array_touched_before_the_kernel_before_has_ended_is_found(early: str) -> None:
    wait, copy = "griddepcontrol.wait;", "ld.global.b32 %r5, [%rd4]; st.global.b32 [%rd5], %r5;"
    got, _ = run(wait + copy, NUMBERS[:32], programmatic=(True,))
    assert np.array_equal(got, NUMBERS[:32])
    run(copy, NUMBERS[:32])  # not launched before that kernel's end
    run(copy, NUMBERS[:32], programmatic=(False, True))  # the first launch has waited for it
    with pytest.raises(AssertionError, match=r"touches an array before griddepcontrol.wait"):
        run(early + wait + copy, NUMBERS[:32], programmatic=(True,))


def test_a_misaligned_access_is_found() -> None:
    with pytest.raises(AssertionError, match="not aligned to 8"):
        run("ld.global.v2.b32 {%r5, %r6}, [%rd4]; st.global.b32 [%rd5], %r5;", NUMBERS[:64], 32)


def test_a_group_of_copies_is_there_when_it_was_waited_for() -> None:
    """Two groups, and only the first is waited for: what the second one brings is not there yet."""
    body = """
    cp.async.ca.shared.global [%r4], [%rd4], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r4+128], [%rd4+128], 4;
    cp.async.commit_group;
    st.shared.b32 [%r4+128], 7;
    cp.async.wait_group 1;
    ld.shared.b32 %r5, [%r4];
    ld.shared.b32 %r6, [%r4+128];
    add.s32 %r5, %r5, %r6;
    cp.async.wait_group 0;
    ld.shared.b32 %r6, [%r4+128];
    add.s32 %r5, %r5, %r6;
    st.global.b32 [%rd5], %r5;
    """
    got, hazards = run(body, NUMBERS[:64], 32)
    assert np.array_equal(got, NUMBERS[:32] + 7 + NUMBERS[32:64]) and hazards == []


def test_an_asynchronous_store_counts_at_its_mbarrier() -> None:
    body = """
    @%p1 mbarrier.init.shared.b64 [%r3+1024], 1;
    bar.sync 0;
    ld.global.b32 %r5, [%rd4];
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3+1024], 128;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r5, [%r3+1024];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0;
    @!%p2 bra WAIT;
    xor.b32 %r6, %r4, 4;
    ld.shared.b32 %r7, [%r6];
    st.global.b32 [%rd5], %r7;
    """
    got, hazards = run(body, NUMBERS[:32])
    assert np.array_equal(got, NUMBERS[:32].reshape(-1, 2)[:, ::-1].ravel()) and hazards == []


@pytest.mark.parametrize("seed", range(4))
def test_a_lane_arrives_at_an_mbarrier_when_its_copies_are_there(seed: int) -> None:
    """And the other lanes see them behind it: here the same lane of the other warp."""
    body = """
    @%p1 mbarrier.init.shared.b64 [%r3+1024], 64;
    bar.sync 0;
    cp.async.ca.shared.global [%r4], [%rd4], 4;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3+1024];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0;
    @!%p2 bra WAIT;
    xor.b32 %r6, %r4, 128;
    ld.shared.b32 %r7, [%r6];
    st.global.b32 [%rd5], %r7;
    """
    got, hazards = run(body, NUMBERS[:64], threads=64, seed=seed)
    assert np.array_equal(got, np.roll(NUMBERS[:64], 32)) and hazards == []


BARRIER = "@%p1 mbarrier.init.shared.b64 [%r3+1024], 1; bar.sync 0;"


def test_a_barrier_that_never_completes_is_found() -> None:
    wait = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0; @!%p2 bra AGAIN;"
    with pytest.raises(AssertionError, match=r"nothing moves any more: .*mbarrier.try_wait"):
        run(f"{BARRIER} {wait}", NUMBERS[:32])


def test_an_arrival_too_many_is_found() -> None:
    with pytest.raises(AssertionError, match="more arrivals at an mbarrier than it expects"):
        twice = "mbarrier.arrive.shared.b64 %rd6, [%r3+1024], 2;"
        run(f"{BARRIER} @%p1 {twice}", NUMBERS[:32])


def test_an_exchange_that_lanes_miss_is_found() -> None:
    with pytest.raises(AssertionError, match="nothing moves any more"):
        run("setp.gt.s32 %p2, %r1, 15; @%p2 bra OVER; bar.sync 0; OVER: bar.sync 0;", NUMBERS[:32])


COPY = """
@!%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r3+1024], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 512, [%r3+1024];
WAIT:
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_is_there_when_its_barrier_says_so(seed: int) -> None:
    wait = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0; @!%p2 bra AGAIN;"
    read = "ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd5], %r5;"
    got, hazards = run(f"{BARRIER} {COPY} {wait} {read}", NUMBERS[:128], threads=128, seed=seed)
    assert np.array_equal(got, NUMBERS[:128]) and hazards == []


def test_a_copy_that_is_not_waited_for_is_late() -> None:
    read = "ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd5], %r5;"
    found = [run(f"{BARRIER} {COPY} {read}", NUMBERS[:128], threads=128, seed=seed)[0] for seed in range(8)]
    assert not all(np.array_equal(got, NUMBERS[:128]) for got in found)


STORE = """
ld.global.b32 %r5, [%rd4];
st.shared.b32 [%r4], %r5;
{fence}
bar.sync 0;
@!%p1 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3], 128;
cp.async.bulk.commit_group;
{between}
cp.async.bulk.wait_group.read 0;
DONE:
"""


def test_a_store_that_the_async_proxy_may_not_see_is_found() -> None:
    got, hazards = run(STORE.format(fence="fence.proxy.async.shared::cta;", between=""), NUMBERS[:32])
    assert np.array_equal(got, NUMBERS[:32]) and hazards == []
    _, hazards = run(STORE.format(fence="", between=""), NUMBERS[:32])
    (hazard,) = hazards
    assert hazard.startswith("a bulk store reads") and "without fence.proxy.async" in hazard


@pytest.mark.parametrize("seed", range(4))
def test_one_fence_serves_warps_that_store_the_same(seed: int) -> None:
    """A thread of the first warp lets a bulk store read what both warps stored."""
    store = STORE.replace("ld.global.b32 %r5, [%rd4];", "and.b32 %r5, %r1, 31; mad.lo.u32 %r4, %r5, 4, %r3;")
    one = "setp.gt.u32 %p2, %r1, 31; @%p2 fence.proxy.async.shared::cta;"
    got, hazards = run(store.format(fence=one, between=""), NUMBERS[:64], threads=64, seed=seed)
    assert np.array_equal(got[:32], np.arange(32)) and hazards == []
    _, hazards = run(store.format(fence="", between=""), NUMBERS[:64], threads=64, seed=seed)
    (hazard,) = hazards
    assert "without fence.proxy.async" in hazard


def test_a_write_under_a_bulk_store_is_found() -> None:
    text = STORE.format(fence="fence.proxy.async.shared::cta;", between="st.shared.b32 [%r3], 7;")
    _, hazards = run(text, NUMBERS[:32])
    assert hazards == ["shared memory is written again before a bulk store has read it"]


NEIGHBOUR = """
ld.global.b32 %r5, [%rd4];
st.shared.b32 [%r4], %r5;
{barrier}
xor.b32 %r6, %r2, 128;
add.s32 %r6, %r6, %r3;
ld.shared.b32 %r7, [%r6];
{again}
st.global.b32 [%rd5], %r7;
"""


@pytest.mark.parametrize("seed", range(4))
def test_what_no_barrier_orders_is_found_in_every_order(seed: int) -> None:
    got, hazards = run(NEIGHBOUR.format(barrier="bar.sync 0;", again=""), NUMBERS[:64], threads=64, seed=seed)
    assert np.array_equal(got, np.roll(NUMBERS[:64], 32)) and hazards == []
    _, hazards = run(NEIGHBOUR.format(barrier="", again=""), NUMBERS[:64], threads=64, seed=seed)
    assert hazards and all(hazard.startswith("no barrier orders a") for hazard in hazards)


def test_a_store_that_overtakes_a_read_is_found() -> None:
    text = NEIGHBOUR.format(barrier="bar.sync 0;", again="st.shared.b32 [%r4], 7;")
    _, hazards = run(text, NUMBERS[:64], threads=64)
    assert any("no barrier orders a store" in hazard and "behind a read" in hazard for hazard in hazards)


def test_warps_that_store_the_same_need_no_barrier() -> None:
    text = "st.shared.b32 [%r3], 7; ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd5], %r5;"
    got, hazards = run(text, NUMBERS[:64], threads=64)
    assert np.array_equal(got, np.full(64, 7)) and hazards == []
    _, hazards = run(f"{text} st.shared.b32 [%r3], 8;", NUMBERS[:64], threads=64)
    assert hazards


def test_a_copy_over_what_others_read_is_found() -> None:
    read = "ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd5], %r5;"
    wait = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0; @!%p2 bra AGAIN;"
    again = COPY.replace("WAIT", "OVER")
    to_end = wait.replace("AGAIN", "END").replace("], 0", "], 1")
    _, hazards = run(f"{BARRIER} {COPY} {wait} {read} bar.sync 0; {again} {to_end}", NUMBERS[:128], threads=128)
    assert hazards == []
    _, hazards = run(f"{BARRIER} {COPY} {wait} {read} {again}", NUMBERS[:128], threads=128)
    assert any("no barrier orders a copy" in hazard for hazard in hazards)


PASSED_ON = """
@%p1 mbarrier.init.shared.b64 [%r3+1024], {arrivals};
@%p1 mbarrier.init.shared.b64 [%r3+1032], 1;
bar.sync 0;
and.b32 %r8, %r1, 31;
setp.eq.s32 %p3, %r8, 0;
shr.u32 %r9, %r1, 5;
setp.eq.s32 %p4, %r9, 1;
@%p4 bra SECOND;
setp.eq.s32 %p4, %r9, 2;
@%p4 bra THIRD;
{first}
{meet}
{arrive}
ret;
SECOND:
@!%p3 bra OVER;
FULL: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1024], 0; @!%p2 bra FULL;
mbarrier.arrive.shared.b64 _, [%r3+1032];
OVER: ret;
THIRD:
{wait}
{then}
"""
STORE_OWN, LOAD_OWN = "st.shared.b32 [%r4], %r1;", "ld.shared.b32 %r5, [%r4];"
ELECTED, EVERY = (f"{guard} mbarrier.arrive.shared.b64 _, [%r3+1024];" for guard in ("@%p3", ""))
EMPTY = "EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+1032], 0; @!%p2 bra EMPTY;"


def passed_on(seed: int, **parts: str | int) -> list[str]:
    """The hazards where a warp accesses its words, `meet`, `arrive`, a lane of a second warp passes that on, and a
    third warp waits, then accesses what lies 63 words before its own."""
    given = {"first": STORE_OWN, "meet": "", "arrive": ELECTED, "arrivals": 1, "wait": EMPTY}
    given |= {"then": LOAD_OWN.replace("%r4", "%r4+-252")}
    return run(PASSED_ON.format(**(given | parts)), NUMBERS[:96], threads=96, seed=seed)[1]


SHUFFLE = "shfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;"
MEET = "bar.warp.sync -1;"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first", [STORE_OWN, LOAD_OWN])
def test_a_lane_that_arrives_for_others_must_have_met_them(first: str, seed: int) -> None:
    then = (STORE_OWN if first == LOAD_OWN else LOAD_OWN).replace("%r4", "%r4+-252")
    assert passed_on(seed, first=first, then=then, meet=MEET) == []
    assert passed_on(seed, first=first, then=then, arrive=EVERY, arrivals=32) == []
    for meet in ("", SHUFFLE, "setp.lt.s32 %p5, %r8, 16; @%p5 bar.warp.sync 65535;"):
        (hazard,) = passed_on(seed, first=first, then=then, meet=meet)
        assert "no barrier orders" in hazard and "by lanes that met none of those that arrived" in hazard


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_that_waits_for_others_must_meet_them(seed: int) -> None:
    wait = f"@!%p3 bra REST; {EMPTY} REST: "
    assert passed_on(seed, meet=MEET, wait=wait + MEET) == []
    for meet in ("", SHUFFLE):
        assert any("of another warp" in hazard for hazard in passed_on(seed, meet=MEET, wait=wait + meet))


def test_lanes_of_a_warp_that_pass_on_values_must_meet() -> None:
    text = NEIGHBOUR.replace("128", "64")
    got, hazards = run(text.format(barrier=MEET, again=""), NUMBERS[:32])
    assert np.array_equal(got, np.roll(NUMBERS[:32], 16)) and hazards == []
    for barrier in ("", SHUFFLE):
        _, hazards = run(text.format(barrier=barrier, again=""), NUMBERS[:32])
        (hazard,) = hazards
        assert hazard.startswith("no barrier orders a load") and "behind a store of another lane" in hazard


def test_lanes_may_store_to_bytes_beside_each_other() -> None:
    text = "shl.b32 %r6, %r1, {shift}; add.s32 %r6, %r6, %r3; cvt.u16.u32 %h1, %r1; st.shared.b16 [%r6], %h1; {again}"
    again = "st.shared.b16 [%r6], %h2;"
    for second in ("", "mov.b16 %h2, 7;" + again):
        assert run(text.format(shift=1, again=second), NUMBERS[:32])[1] == []
    _, hazards = run(text.format(shift=0, again="").replace("%r6, %r3", "%r3, %r6; and.b32 %r6, %r6, -2"), NUMBERS[:32])
    assert any("behind a store of another lane" in hazard for hazard in hazards)


DELAY = """
shr.u32 %r10, %r1, 5;
mad.lo.u32 %r10, %r10, 5000, 1;
mov.b32 %r9, 0;
{label}: add.s32 %r9, %r9, 1;
setp.lt.u32 %p3, %r9, %r10;
@%p3 bra {label};
"""
"""Every warp comes some turns behind the one before."""


@pytest.mark.parametrize("seed", range(4))
def test_a_warp_that_has_arrived_at_the_cluster_still_waits_for_its_block(seed: int) -> None:
    """The first warp waits at its block's barrier when the last one arrives at the cluster's."""
    arrive = f"{DELAY.format(label='EARLY')} barrier.cluster.arrive; {DELAY.format(label='LATE')}"
    text = arrive + NEIGHBOUR.format(barrier="bar.sync 0;", again="") + "barrier.cluster.wait;"
    got, hazards = run(text, NUMBERS[:64], threads=64, seed=seed)
    assert np.array_equal(got, np.roll(NUMBERS[:64], 32)) and hazards == []


@pytest.mark.parametrize("seed", range(4))
def test_the_barrier_of_the_cluster_orders(seed: int) -> None:
    barrier = f"{DELAY.format(label='EARLY')} barrier.cluster.arrive; barrier.cluster.wait;"
    text = NEIGHBOUR.format(barrier=barrier, again="")
    got, hazards = run(text, NUMBERS[:64], threads=64, seed=seed)
    assert np.array_equal(got, np.roll(NUMBERS[:64], 32)) and hazards == []
    for change in (("barrier.cluster.wait;", ""), ("arrive;", "arrive.relaxed;")):
        _, hazards = run(text.replace(*change), NUMBERS[:64], threads=64, seed=seed)
        assert hazards


@pytest.mark.parametrize("seed", range(4))
def test_a_warp_that_ends_behind_its_arrival_counts_once(seed: int) -> None:
    """The second of three warps ends before the third one arrives, for which the first one waits."""
    body = f"""
    ld.global.b32 %r5, [%rd4];
    {DELAY.format(label="EARLY")}
    st.shared.b32 [%r4], %r5;
    barrier.cluster.arrive;
    setp.eq.u32 %p2, %r10, 5001;
    @%p2 bra DONE;
    barrier.cluster.wait;
    setp.gt.u32 %p2, %r10, 1;
    @%p2 bra DONE;
    ld.shared.b32 %r7, [%r4+256];
    st.global.b32 [%rd5], %r7;
    DONE:
    """
    got, hazards = run(body, NUMBERS[:96], threads=96, seed=seed)
    assert np.array_equal(got, [*NUMBERS[64:96], *[0] * 64]) and hazards == []


def test_arrivals_at_the_cluster_without_a_wait_are_found() -> None:
    with pytest.raises(AssertionError, match="arrives again at the barrier of the cluster"):
        run("barrier.cluster.arrive; barrier.cluster.arrive;", NUMBERS[:32])
    with pytest.raises(AssertionError, match="waits at the barrier of the cluster and has not arrived"):
        run("barrier.cluster.wait;", NUMBERS[:32])


def test_a_copy_that_comes_after_its_block_is_found() -> None:
    _, hazards = run(f"{BARRIER} {COPY}", NUMBERS[:128], threads=128)
    assert hazards == ["the shared memory of block 0 of a cluster is used after the block has ended"]


ANSWER = """
mov.u32 %r6, %ctaid.x;
setp.eq.s32 %p2, %r6, {first};
mov.b32 %r7, 5;
@%p2 bra WAIT;
st.release.gpu.global.b32 [%rd2+4], %r7;
bra DONE;
WAIT: ld.acquire.gpu.global.b32 %r5, [%rd2+4];
setp.ne.s32 %p3, %r5, %r7;
@%p3 bra WAIT;
st.global.b32 [%rd2], %r5;
DONE:
"""
"""Block `first` of two waits for the other one."""


def test_a_block_waits_for_ever_for_one_that_starts_when_it_ends() -> None:
    assert list(run(ANSWER.format(first=1), NUMBERS[:2], blocks=2, resident=1)[0]) == [5, 5]
    assert list(run(ANSWER.format(first=0), NUMBERS[:2], blocks=2, resident=2)[0]) == [5, 5]
    with pytest.raises(AssertionError, match="nothing moves any more"):
        run(ANSWER.format(first=0), NUMBERS[:2], blocks=2, resident=1)


def test_a_part_of_a_grid_runs_alone() -> None:
    body = "mov.u32 %r6, %ctaid.x; mul.wide.u32 %rd6, %r6, 4; add.s64 %rd7, %rd2, %rd6; @%p1 st.global.b32 [%rd7], 7;"
    assert list(run(body, NUMBERS[:6], blocks=6, part=Part("kernel", (4, 1)))[0]) == [0, 7, 0, 0, 7, 0]
    assert not run(body, NUMBERS[:6], blocks=6, part=Part("another", (1,)))[0].any()
    with pytest.raises(AssertionError, match="the grid has 6 clusters"):
        run(body, NUMBERS[:6], blocks=6, part=Part("kernel", (6,)))


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises((AssertionError, NotImplementedError), match="tanh"):
        run("tanh.approx.f32 %r5, %r6;", NUMBERS[:32])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_small_product(dtype: str) -> None:
    """mma.m16n8k16: every lane loads its registers of A [16, 16], B [8, 16] and C [16, 8] and stores those of D."""
    generator, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (generator.standard_normal((rows, 16)).astype(kind) for rows in (16, 8))
    c = generator.standard_normal((16, 8)).astype(np.float32)
    row, quad = np.divmod(np.arange(32), 4)
    words = np.zeros((10, 32), np.int32)
    for part in range(4):
        first = 2 * quad + part // 2 * 8
        pair = a[row + part % 2 * 8, first], a[row + part % 2 * 8, first + 1]
        words[part] = np.stack(pair, axis=1).copy().view(np.int32)[:, 0]
    for part in range(2):
        pair = b[row, 2 * quad + 8 * part], b[row, 2 * quad + 8 * part + 1]
        words[4 + part] = np.stack(pair, axis=1).copy().view(np.int32)[:, 0]
    for part in range(4):
        words[6 + part] = c[row + part // 2 * 8, 2 * quad + part % 2].view(np.int32)
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd4+{128 * i}]; " for i in range(10))
    stores = "".join(f"st.global.b32 [%rd5+{128 * i}], %r{20 + i}; " for i in range(4))
    name = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    body = (
        f"{loads} mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%r20, %r21, %r22, %r23}},"
        f" {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}}; {stores}"
    )
    got, _ = run(body, words, count=128)
    want = c + a.astype(np.float32) @ b.astype(np.float32).T
    for part, values in enumerate(got.view(np.float32).reshape(4, 32)):
        np.testing.assert_allclose(values, want[row + part // 2 * 8, 2 * quad + part % 2], rtol=1e-5, atol=1e-5)
