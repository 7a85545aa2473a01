"""What is not legal is refused with the words that jax's front end uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import as_torch, inputs, said
from tests.emulator.launcher import Gpu
from tests.oracles import bad_input, wrong_values

OPERATIONS = ("mla_decode", "mla_prefill", "write_kv_cache", "gather_kv_cache", "merge_attention_states")


@pytest.mark.parametrize("case", bad_input.CASES, ids=lambda case: f"{case.op}-{case.message[:30]}")
def test_both_front_ends_say_the_same(case: bad_input.Case) -> None:
    ours = getattr(tsmla_bridge, case.op)
    arguments = {name: as_torch(value) for name, value in case.arguments.items()}
    if case.arguments.get("kv_cache") is not None and case.arguments["kv_cache"].shape == (6, 1, 16, 48):
        ours(**arguments)  # engines pass the cache with its one key head
        return
    if case.op == "write_kv_cache" and getattr(case.arguments["slot_mapping"], "dtype", None) == np.int64:
        ours(**arguments)  # engines have slots of int64
        return
    got = said(case.error, ours, arguments)
    want = said(case.error, getattr(tsmla_jax, case.op), case.arguments)
    want = want.replace("ArrayImpl", "Tensor").replace(", 'xla'", "")
    assert got == want.replace("legal: an array", "legal: a torch.Tensor")


@pytest.mark.parametrize(
    ("argument", "value"),
    [("latent_dim", 32.0), ("causal", 1), ("batch_invariant", 0), ("fp8_probabilities", 0), ("max_q_len", True)],
)
def test_a_legal_call_before_makes_nothing_legal(argument: str, value: Any) -> None:
    arguments = {name: as_torch(value) for name, value in bad_input.DECODE.items()}
    arguments |= {"max_q_len": 1, "batch_invariant": False, "fp8_probabilities": False, "causal": True}
    tsmla_bridge.mla_decode(**arguments)
    tsmla_bridge.mla_decode(**arguments)
    with pytest.raises(TypeError, match=f"{argument}: got "):
        tsmla_bridge.mla_decode(**arguments | {argument: value})


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_static_argument_that_changes_in_place_is_read_in_each_call(kind: Any) -> None:
    """A tensor of one number, as lens.max() makes it, is a legal int; kept plans must not know it by its identity."""
    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn(5, 2, 24, generator=generator), torch.randn(6, 4, 24, generator=generator)
    tables, lens = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([9, 7], dtype=torch.int32)
    starts, indices = torch.tensor([0, 2, 5], dtype=torch.int32), torch.arange(20, dtype=torch.int32).view(5, 4)
    options = {"softmax_scale": 0.1, "latent_dim": 16}

    def decode(bound: Any) -> torch.Tensor:
        return tsmla_bridge.mla_decode(q, cache, tables, lens, cu_seqlens_q=starts, max_q_len=bound, **options)

    def select(window: Any) -> torch.Tensor:
        return tsmla_bridge.sparse_mla(q, cache, indices, compressed_kv_cache=2 * cache, window=window, **options)

    for call in (decode, select):
        number = kind(1)
        assert torch.equal(call(number), call(1))
        number[...] = 3
        assert torch.equal(call(number), call(3)) and not torch.equal(call(number), call(1))


@pytest.mark.parametrize("dtype", ["bfloat16", ["bfloat16"], {}])
def test_what_is_no_dtype_is_named(dtype: Any) -> None:
    cache, ints = torch.zeros(2, 4, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^out_dtype: got (str|list|dict); legal: a torch.dtype$"):
        tsmla_bridge.gather_kv_cache(cache, ints[None], ints, ints, total_len=1, out_dtype=dtype)
    with pytest.raises(TypeError, match=r"^dtype: got (str|list|dict); legal: a torch.dtype$"):
        tsmla_bridge.init_cache(1, dtype=dtype)


def test_a_legal_scale_before_makes_no_other_legal() -> None:
    arguments = {name: as_torch(value) for name, value in bad_input.DECODE.items()}
    wrong = (-0.1, 0.0, 1e-50, 1e39, float("inf"), float("nan"))
    for scale in ({name: value} for name in ("softmax_scale", "kv_scale") for value in wrong):
        tsmla_bridge.mla_decode(**arguments)
        with pytest.raises(ValueError, match=r"legal: a positive number, 1\.2e-38 to 8\.5e37"):
            tsmla_bridge.mla_decode(**arguments | scale)


@pytest.mark.parametrize("argument", ["kv_cache", "latent", "k_rope"])
def test_a_write_has_no_derivative(argument: str) -> None:
    arguments = {name: as_torch(value) for name, value in bad_input.WRITE.items()}
    arguments[argument].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"write_kv_cache has no derivative.*torch\.no_grad"):
        tsmla_bridge.write_kv_cache(**arguments)
    with torch.no_grad():
        tsmla_bridge.write_kv_cache(**arguments)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_meta_tensor_among_others_is_refused(op: str) -> None:
    """Its results would be memory that nobody writes."""
    base = {name: as_torch(value) for name, value in bad_input.BASES[op].items()}
    for argument, value in base.items():
        if isinstance(value, torch.Tensor):
            mixed = base | {argument: value.to("meta")}
        elif isinstance(value, list):
            mixed = base | {argument: [value[0], value[1].to("meta")]}
        else:
            continue
        with pytest.raises(ValueError, match=r"device|meta"):
            getattr(tsmla_bridge, op)(**mixed)


@pytest.mark.parametrize("op", OPERATIONS)
def test_vmap_is_refused_by_name(op: str) -> None:
    base = {name: as_torch(value) for name, value in bad_input.BASES[op].items()}
    mapped = [name for name, value in base.items() if isinstance(value, torch.Tensor | list)]
    both = [base[name] if isinstance(base[name], list) else [base[name]] for name in mapped]
    doubled = [[torch.stack([x, x]) for x in values] for values in both]
    twice = [d if isinstance(base[name], list) else d[0] for name, d in zip(mapped, doubled, strict=True)]

    def call(*values: Any) -> Any:
        return getattr(tsmla_bridge, op)(**base | dict(zip(mapped, values, strict=True)))

    with pytest.raises(NotImplementedError, match=f"{op}: got tensors under torch.vmap"):
        torch.vmap(call)(*twice)
    with pytest.raises(NotImplementedError, match=f"{op}: got tensors under torch.vmap"):  # one of them alone
        torch.vmap(call, in_dims=(None,) * (len(mapped) - 1) + (0,))(*[base[m] for m in mapped[:-1]], twice[-1])


@pytest.mark.parametrize("derive", [torch.func.grad, lambda f: lambda q: torch.func.vjp(f, q)])
def test_functional_gradients_are_refused_by_name(derive: Any) -> None:
    base = {name: as_torch(value) for name, value in bad_input.BASES["mla_prefill"].items()}

    def loss(q: torch.Tensor, **options: Any) -> torch.Tensor:
        out = tsmla_bridge.mla_prefill(**base | {"q": q, "return_lse": False} | options)
        assert isinstance(out, torch.Tensor)
        return out.float().sum()

    with pytest.raises(NotImplementedError, match=r"mla_prefill: got tensors under torch\.func\.grad, vjp or jvp"):
        derive(loss)(base["q"])
    found = torch.func.grad(lambda q: loss(q, implementation="reference"))(base["q"])
    assert found.shape == base["q"].shape


def test_the_bases_are_legal() -> None:
    for op, base in [*bad_input.BASES.items(), ("mla_decode", bad_input.RAGGED)]:
        getattr(tsmla_bridge, op)(**{name: as_torch(value) for name, value in base.items()})


@pytest.mark.parametrize(("op", "arguments", "message"), wrong_values.WRONG)
def test_data_is_checked_when_asked(op: Any, arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        given = [torch.tensor(part, dtype=torch.int32) for part in arguments]
        if op is wrong_values.decode:
            lens, tables, *offsets = given
            q = torch.ones((4, 2, 48) if offsets else (3, 1, 2, 48))
            ragged = {"cu_seqlens_q": offsets[0], "max_q_len": 2} if offsets else {}
            tsmla_bridge.mla_decode(q, torch.ones(6, 16, 48), tables, lens, softmax_scale=0.1, latent_dim=32, **ragged)
        elif op is wrong_values.prefill:
            x, (cu_q, cu_kv) = torch.ones(6, 2, 8), given
            tsmla_bridge.mla_prefill(
                x, x, x, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_q_len=4, max_kv_len=5, softmax_scale=0.1
            )
        elif op is wrong_values.write:
            tsmla_bridge.write_kv_cache(torch.ones(6, 16, 8), torch.ones(3, 8), None, given[0])
        else:
            starts, lens, tables = given
            tsmla_bridge.gather_kv_cache(torch.ones(6, 16, 8), tables, starts, lens, total_len=40)

    call()
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("op", "arguments"), wrong_values.RIGHT)
def test_right_data_passes_the_check(op: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if op is not wrong_values.decode:
        pytest.skip("the checks are shared; one operation shows that they are wired")
    monkeypatch.setenv("TSMLA_CHECK", "1")
    lens, tables, *offsets = (torch.tensor(part, dtype=torch.int32) for part in arguments)
    ragged = {"cu_seqlens_q": offsets[0], "max_q_len": 2} if offsets else {}
    q = torch.ones((4, 2, 48) if offsets else (3, 1, 2, 48))
    tsmla_bridge.mla_decode(q, torch.ones(6, 16, 48), tables, lens, softmax_scale=0.1, latent_dim=32, **ragged)


def test_a_kernel_named_for_a_cpu_gives_the_reason() -> None:
    case = inputs([5])
    with pytest.raises(
        NotImplementedError, match=r"mla_decode: implementation='cute' can't run this call: the tensors"
    ):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, implementation="cute")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"q_dtype": "float32"}, r"q\.dtype is float32; the sm_90 decode kernel takes"),
        ({"page_size": 8}, r"page size is 8; the sm_90 decode kernel takes 16, 32, 64 or 128"),
        ({"latent_dim": 96}, r"latent_dim is 96; the sm_90 decode kernel takes 256 or 512"),
        ({"rope_dim": 16}, r"the rope width is 16; the sm_90 decode kernel takes 0 or 64"),
    ],
)
def test_what_no_kernel_serves_is_refused_on_a_gpu(gpu: Gpu, changed: dict[str, Any], reason: str) -> None:
    legal = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "latent_dim": 256, "rope_dim": 64}
    changed = changed | {"kv_dtype": changed["q_dtype"]} if "q_dtype" in changed else changed
    case = inputs([5], **(legal | changed))
    with pytest.raises(
        NotImplementedError, match=rf"mla_decode: implementation='cute' can't run this call: .*{reason}"
    ):
        tsmla_bridge.mla_decode(*case.arrays, **case.options)
    assert not gpu.launches


def test_another_architecture_is_refused(gpu: Gpu) -> None:
    gpu.capability = (8, 0)
    case = inputs([5], q_dtype="bfloat16", kv_dtype="bfloat16", latent_dim=256, rope_dim=64)
    with pytest.raises(NotImplementedError, match="the architecture is sm_80a; mla_decode is written for sm_90a"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options)


def test_prefill_on_a_gpu_has_a_kernel_or_a_reason(gpu: Gpu) -> None:
    x, cu = torch.ones(6, 2, 8), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="mla_prefill: implementation='cute' can't run this call"):
        tsmla_bridge.mla_prefill(
            x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_q_len=6, max_kv_len=6, softmax_scale=0.1
        )


def test_tensors_on_other_devices_are_refused() -> None:
    case = inputs([5])
    with pytest.raises(ValueError, match=r"seq_lens: got a tensor on meta; it must be on q's device, cpu"):
        tsmla_bridge.mla_decode(*case.arrays[:3], case.seq_lens.to("meta"), **case.options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has the GPU that these calls miss")
@pytest.mark.parametrize("device", ["cuda:0", 0])
def test_without_a_gpu_the_sizes_of_workspaces_say_what_is_missing(device: Any) -> None:
    for size in (
        lambda: tsmla_bridge.decode_workspace_size(max_batch=8, num_heads=16, device=device),
        lambda: tsmla_bridge.sparse_workspace_size(max_tokens=8, num_heads=16, device=device),
    ):
        legal = r"cpu, or a CUDA device that torch can use \("
        with pytest.raises(ValueError, match=f"^device: got {device}; legal: {legal}"):
            size()


@pytest.mark.parametrize(
    "value", [np.float32(0), np.float32(-1), np.float64(np.nan), np.array(0.0, np.float32), np.float16(1), np.int64(1)]
)
@pytest.mark.parametrize("name", ["softmax_scale", "q_scale", "kv_scale"])
def test_scalars_of_numpy_are_scales_in_both_front_ends(name: str, value: Any) -> None:
    """By value, as numbers are; those of another dtype in neither."""
    arguments = bad_input.DECODE
    for module, given in (tsmla_jax, arguments), (tsmla_bridge, {name: as_torch(x) for name, x in arguments.items()}):
        for legal in np.float32(0.5), np.float64(0.5), np.array(0.5, np.float32):
            module.mla_decode(**given | {name: legal})
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got .*legal: a (positive|float or a float32)"):
            module.mla_decode(**given | {name: value})


@pytest.mark.parametrize(
    ("latent", "rope", "message"),
    [
        (torch.ones(2, 1, 4, 512).bfloat16(), torch.ones(2, 1, 4, 64), "dtypes bfloat16 and float32; legal: two tens"),
        (torch.ones(2, 1, 4, 512), torch.ones(2, 1, 4, 64, device="meta"), "on the devices cpu and meta; legal: two"),
        (torch.ones(2, 1, 4, 512), torch.ones(2, 1, 3, 64), r"shapes \[2, 1, 4, 512\] and \[2, 1, 3, 64\]; legal: \["),
        (torch.ones(512), torch.ones(64), r"shapes \[512\] and \[64\]; legal: \["),
        (torch.ones(()), torch.ones(()), r"shapes \[\] and \[\]; legal: \["),
    ],
)
def test_a_pair_of_two_kinds_is_refused_as_such(latent: torch.Tensor, rope: torch.Tensor, message: str) -> None:
    arguments = {name: as_torch(value) for name, value in bad_input.DECODE.items()}
    with pytest.raises(ValueError, match=f"^q: got a pair (of )?{message}"):
        tsmla_bridge.mla_decode(**arguments | {"q": (latent, rope)})


def test_a_pair_that_the_kernels_cannot_read_is_refused_with_its_strides() -> None:
    arguments = {name: as_torch(value) for name, value in bad_input.DECODE.items()}
    latent, rope = arguments["q"].split((32, 16), -1)
    arguments["q"] = latent.contiguous(), rope[..., :14].contiguous()
    with pytest.raises(ValueError, match=r"strides \[.*\] and \[.*14, 1\]; legal: .* a multiple of 16 bytes"):
        tsmla_bridge.mla_decode(**arguments)
