"""Every case of `benchmarks.run` on a CPU, at a size for one: ours by the definitions, and what the rows say."""

import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("absl", reason="the benchmarks' flags")
pytest.importorskip("torch")
import torch
from absl import flags
from absl.testing import flagsaver
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import harness, peers, run
from benchmarks.cases import (
    CASES,
    bridge_overhead,
    cache,
    case,
    compress,
    indexer_topk,
    packed,
    prefill_backward,
    segment_attention,
    select_topk,
    sparse_backward,
    sparse_mla,
    sparse_mla_plain,
    sparse_mla_prefill,
)
from tsmla_kernels import object_cache
from tsmla_kernels.kernel import Kernel

POINTS = {
    "decode_bf16": ["2,2,4,100,fixed", "2,1,4,100,varlen"], "decode_fp8": ["2,2,4,100,varlen"],
    "sparse_mla": ["v32,2,1,4", "shared80,2,4,16", "v4-512,1,2,4"],
    "sparse_mla_prefill": ["random,6,4", "shared95,6,16", "prompt,6,4", "prompt80,80,4", "v4,6,4"],
    "sparse_mla_plain": ["steps,6,4", "random,6,16", "prompt,80,4"],
    "prefill": ["2x40h2", "30on50h2"], "prefill_backward": ["40h2"], "select_topk": ["3,100"],
    "sparse_backward": ["random,512,4", "shared80,576,4"],
    "indexer_logits": ["2,2,128", "1,64,128"], "indexer_topk": ["2,2,128"],
    "cache": [f"{op},{','.join(dtypes)},20" for op, of in cache.DTYPES.items() if "rope" not in op for dtypes in of],
    "fp8_products": ["linear,5,264,272", "experts,9,256,272"],
    "merge": ["merge_attention_states,float32,float32,20"], "compress": ["v4_4,2,some", "indexer_4,16,prefill"],
    "bridge_overhead": ["4,1,16,256"],
    "sglang": [
        "v3.2 decode,2,4,64", "v4-flash c4 decode,2,4,160", "v4-pro window decode,2,4,128", "v3 decode,2,4,100",
        "v3 fp8 decode,2,4,100",
    ],
}  # fmt: skip
"""Points for a CPU; the other cases are tested below, or need a GPU."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Smaller contexts and selections, and a clock that runs everything once."""

    def clock(functions: dict[str, Any], iterations: int) -> dict[str, float]:
        return {name: 1.0 for name, function in functions.items() if function() is not None}

    for module in (harness, cache, compress):
        monkeypatch.setattr(module, "time_all", clock)
    monkeypatch.setattr(prefill_backward, "CHECKED", "40h2")
    for module, sizes in (
        (sparse_mla, {"CONTEXT": 256, "LONG": 512, "COMPRESSED": 128}),
        (sparse_mla_prefill, {"CONTEXT": 256, "COMPRESSED": 128}),
        (sparse_mla_plain, {"CONTEXT": 128, "REQUESTS": 4, "SELECTED": 64}),
        (sparse_backward, {"TOKENS": 6, "SELECTED": 16, "CONTEXT": 128, "CHECKED": 5}), (select_topk, {"K": 16}),
        (indexer_topk, {"K": 16}), (bridge_overhead, {"CALLS": 2, "ROUNDS": 1, "WARM": 1}),
    ):  # fmt: skip
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(sparse_mla, "MODES", {"v32": 64, "shared80": 64, "v4-512": 32, "v4-1024": 32})
    monkeypatch.setattr(sparse_mla_plain, "MODES", {"steps": 128, "random": 256, "prompt": 0})
    few = {"random": 64, "shared80": 64, "shared95": 64, "prompt": 64, "prompt80": 64, "v4": 32}
    monkeypatch.setattr(sparse_mla_prefill, "SELECTED", few)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    gradients = prefill_backward.errors_of, prefill_backward._checked
    gradients += (sparse_backward.errors_of,)
    caches = sparse_mla.caches_of, sparse_mla_prefill.caches_of, sparse_mla_plain.rows_of, *gradients
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in POINTS.items() for text in texts])
def test_ours_runs_at_a_point_and_is_right(name: str, text: str) -> None:
    kind, heard = case(name), []
    point = kind.parse(text)
    assert kind.text(point) == text
    rows = kind(point).rows(set(), heard.append)
    assert rows and heard and json.dumps(rows)
    for row in rows:
        assert row["us"] > 0 and row.get("floor_us", 0) >= 0
        for field in ("rel_err", "own_err", "dq_err", "dk_err", "dv_err", "dkv_err"):
            assert 0 <= row.get(field, 0) < (0.2 if "8" in name or "fp8" in row.get("peer", "") else 0.02), (row, field)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_point_says_what_is_legal(name: str) -> None:
    with pytest.raises(ValueError, match="legal: "):
        case(name).parse("nothing,of,that")


def test_the_gradients_points_have_no_older_tokens() -> None:
    """The operator is timed on new tokens alone: such a row would bear the name of another call."""
    with pytest.raises(ValueError, match="--points: got '30on50h2'; legal: like 4096h128"):
        case("prefill_backward").parse("30on50h2")


@pytest.mark.parametrize("name", CASES)
def test_default_points_are_what_their_texts_say(name: str) -> None:
    kind = case(name)
    assert [kind.parse(kind.text(point)) for point in kind.points] == list(kind.points)
    assert len(set(kind.points)) == len(kind.points)
    for library in kind.peers.values():
        assert library in peers.LIBRARIES


def test_what_cannot_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("peers may run on a GPU")
    with flagsaver.flagsaver(list=True):
        assert run.main(["run"]) == 0
    said = capsys.readouterr().out
    ours, needs = (
        "no Hopper GPU",
        "no vllm/_flashmla_C.abi3.so of vllm==0.26.0 (python -m benchmarks.peers DIR flashmla",
    )
    assert f"decode_bf16: nothing\n    without tsmla: {ours}\n    without flashmla: {ours}, {needs}" in said
    assert said.count(f": nothing\n    without tsmla: {ours}\n") == len(CASES)


def test_ours_is_compared_with_peers_that_do_the_same() -> None:
    def ratio(name: str, **us: float) -> float:
        return run.compared(case(name), [{"peer": peer, "us": each} for peer, each in us.items()])[1]

    assert ratio("decode_bf16", tsmla=3.0, flashmla=4.0, fa3=2.0) == 1.5
    assert ratio("sparse_mla_prefill", tsmla=3.0, flashmla=4.0, widen=0.5) == 0.75  # widen copies for flashmla
    both = {"tsmla": 3.0, "tsmla_two": 1.0, "deep_gemm": 4.0, "sgl": 2.0, "vllm_rows": 3.0, "cudnn": 0.1}
    assert ratio("indexer_topk", **both) == 0.5  # logits, and the fastest top-k that the page counts
    assert np.isnan(ratio("indexer_topk", tsmla=3.0, sgl=2.0))
    both_clocks = (("tsmla", 1.0), ("tsmla", 9.0), ("engines", 2.0), ("engines", 3.0))
    with_clocks = type("WithClocks", (harness.Case,), {"peers": {"engines": "vllm_c"}})
    by_clock = [{"peer": peer, "us": us} for peer, us in both_clocks]
    assert run.compared(with_clocks, by_clock)[1] == 0.5  # by the GPU's clock, which comes before the host's
    assert run.compared(case("cache"), [{"us": 3.0, "copy_us": 2.0}])[1] == 1.5


def test_a_list_names_what_a_case_cannot_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And on a GPU what runs is named first."""

    def only_merge(name: str) -> type[harness.Case]:
        if name != "merge":
            raise ModuleNotFoundError("No module named 'jax'")
        return case(name)

    monkeypatch.setattr(run, "case", only_merge)
    monkeypatch.setattr(peers, "no_gpu", lambda: None)
    run.show_list()
    said = capsys.readouterr().out
    assert "merge: tsmla\n" in said and "cache: nothing\n    without tsmla: No module named 'jax'\n" in said


def test_a_library_is_found_in_the_folder_of_peers(tmp_path: Path) -> None:
    (tmp_path / "fa3.so.xz").touch()
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "versions.json").write_text('{"fa3": "FA3 of vLLM 0.26.0"}')
    with flagsaver.flagsaver(peers=str(tmp_path)):
        assert peers.find("fa3") == tmp_path / "fa3.so.xz" and peers.find("deep_gemm") == tmp_path / "deep_gemm"
        assert peers.find("sgl") is None
        assert harness.versions()["fa3"] == "FA3 of vLLM 0.26.0"
    with flagsaver.flagsaver(peers=None):
        assert set(harness.versions()) >= {"python", "torch"} and "fa3" not in harness.versions()


def test_a_recorded_command_has_no_path_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/somewhere/run.py", "merge", "--peers=/tmp/gpu", "--out", "/root/out.json", "--points", "1,8192"]
    assert harness.command(given).endswith(" merge --peers DIR --out FILE --points 1,8192")
    for path in (Path(run.__file__).parent / "results").rglob("*.json"):
        for row in json.loads(path.read_text()):
            assert "/tmp" not in row["command"] and "/root" not in row["command"], path


class Calls(TorchDispatchMode):
    """The operators that run in this context, and where their operands lie."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree.tree_leaves((args, kwargs))
        where = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given)
        self.found.append((str(func), where))
        return func(*args, **kwargs or {})


def gradients() -> dict[str, Any]:
    """Our functions of a case that is forgotten."""
    functions = prefill_backward.PrefillBackward("40h2").ours()
    gc.collect()
    return functions


def test_a_gradient_is_one_operator_whose_operands_stay_where_they_are() -> None:
    """A graph's replay reads what was captured at the captured addresses: nothing of it may have died or moved."""
    for name, function in gradients().items():
        seen, first = [], function()
        for _ in range(2):
            with Calls() as calls:
                function()
            seen.append([call for call in calls.found if call[0].startswith("tsmla")])
        kind = "mla_prefill_kv" if name == "tsmla_kv" else "mla_prefill"
        assert seen[0] == seen[1] and [call[0] for call in seen[0]] == [f"tsmla.{kind}_backward.default"]
        noise = [torch.full((1 << 12,), torch.nan) for _ in range(64)]  # what was freed is written over
        assert all(torch.equal(a, b) for a, b in zip(function(), first, strict=True)) and noise


@pytest.mark.gpu
def test_the_replayed_gradient_is_that_of_a_call() -> None:
    functions = gradients()
    for function in functions.values():
        function()
    torch.cuda.synchronize()
    for function in functions.values():
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            captured = function()
        noise = [torch.full((1 << 16,), torch.nan, device="cuda") for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, function(), strict=True):
            assert float((got - want).float().norm()) <= 2**-7 * float(want.float().norm()) and noise


# ---- objects

OBJECTS = {  # of each kernel
    "decode_bf16": ("1,2,16,4096,fixed/4,2,16,81920,varlen", {"mla_decode": 1}),
    "decode_fp8": ("1,2,16,4096,fixed", {"mla_decode": 2}),
    "indexer_logits": ("64,4,131072/1,4096,8192", {"indexer_logits": 2}),
    "indexer_topk": ("1,1,8192", {"indexer_logits": 1, "select_topk": 2}),
    "prefill": ("", {"mla_prefill": 4}),
    "prefill_backward": ("", {"mla_prefill": 4, "mla_prefill_backward": 8}),
    "select_topk": ("64,8192", {"select_topk": 2}),
    "sglang": (
        "v3.2 decode,8,64,2048/v4-flash c4 decode,8,64,640/v4-flash window decode,8,64,128/v3 decode,8,16,4096",
        {"sparse_mla": 9, "mla_decode": 1},
    ),
    "sparse_mla": ("v32,8,1,16/v4-512,8,1,16", {"sparse_mla": 2}),
    "sparse_mla_prefill": ("random,512,16", {"sparse_mla": 2, "sparse_mla_union": 1}),
    "sparse_mla_plain": ("steps,64,128/prompt,4096,64", {"sparse_mla": 2}),
    "sparse_backward": (
        "random,576,16/shared80,512,64",
        {"sparse_mla": 1, "sparse_mla_union": 1, "sparse_mla_backward": 4},
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_named_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, int] = {}

    def is_stored(kernel: Kernel, config: Any, arch: str) -> bool:
        assert isinstance(config, kernel.config) and arch == "sm_90a"
        found[kernel.name] = found.get(kernel.name, 0) + 1
        return True

    monkeypatch.undo()
    monkeypatch.setattr(object_cache, "is_stored", is_stored)
    points, expected = OBJECTS[name]
    with flagsaver.flagsaver(compile_only=True, points=points), pytest.raises(SystemExit) as ended:
        run.main(["run", name])
    assert ended.value.code == 0 and found == expected
    count = sum(found.values())
    assert capsys.readouterr().out == f"{count} objects in {object_cache.directory()}, 0 of them new\n"


# ---- inputs


@pytest.mark.parametrize("mode", ["random", "shared80", "shared95"])
def test_slots_of_a_token_differ_and_neighbours_share_what_they_should(mode: str) -> None:
    slots = sparse_mla_prefill.draw(mode, 12, 200, 5000)
    assert slots.dtype == torch.int32 and slots.shape == (12, 200)
    rows = [set(row.tolist()) for row in slots]
    assert all(len(row) == 200 and min(row) >= 0 and max(row) < 5000 for row in rows)
    shared = [len(a & b) for a, b in itertools.pairwise(rows)]
    wanted = {"shared80": 160, "shared95": 190}.get(mode)
    assert all(count < 40 if wanted is None else count == wanted for count in shared)


def test_a_prompts_tokens_select_earlier_ones() -> None:
    slots = sparse_mla_prefill.draw("prompt", 40, 16, 5000)
    for token, row in enumerate(slots.tolist()):
        count = min(token + 1, 16)
        assert row[count:] == [-1] * (16 - count) and len(set(row[:count])) == count
        assert max(row[:count]) <= token


def test_fp8_queries_have_a_lower_floor() -> None:
    found = sparse_mla_prefill.SparsePrefill(sparse_mla_prefill.Point("random", 64, 128))
    assert found.floor_us("tsmla") > found.floor_us(sparse_mla_prefill.FP8) > 0


def test_packed_rows_are_what_their_values_say() -> None:
    pages = packed.v4_pages(2)
    assert packed.widened(pages).shape == (128, 512) and packed.widened(packed.v32_cache(64)).shape == (64, 576)


def test_cudnns_layout() -> None:
    """As the docstring of jax's operation has it, and with padding between segments."""
    lens, starts = segment_attention.packed_layout(np.array([[1, 2, 3], [4, 5, 0]]), 3)
    assert starts.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]] and lens.tolist() == [[1, 1, 1], [1, 1, -1]]
    lens, starts = segment_attention.packed_layout(np.array([[0, 7, 7, 0, 3, 3, 3]]), 2)
    assert starts.tolist() == [[1, 4, -1]] and lens.tolist() == [[2, 3]]
    ids = segment_attention.Shape.of("3x160h2s5").ids()
    assert [sorted(set(row) - {0}) for row in ids.tolist()] == [[1, 2, 3, 4, 5]] * 3


@pytest.mark.parametrize("name", ["tsmla", "tsmla_kv"])
def test_errors_of_packed_rows(name: str) -> None:
    found = segment_attention.errors(segment_attention.Shape(1, 24, 2, 3), name, "xla")
    assert len(found) == 4 and all(1e-5 < error < 1e-2 for error in found)
