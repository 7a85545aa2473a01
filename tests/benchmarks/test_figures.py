"""`make figures` on made-up results: what it writes, and that nothing is shown that the file does not hold."""

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import figures, table
from benchmarks.records import RECORDS, attention, operations
from examples.whole_models.figures import RECORDS as MODELS

RESULTS = Path(figures.__file__).parent / "results"


def row(peer: str, us: float, **changes: object) -> dict[str, object]:
    """A result of B 4, S 1, H 16, 4096 keys, unless changed."""
    base: dict[str, object] = dict(b=4, s=1, h=16, keys=4096, varlen=False, page=64, dtype="bf16", peer=peer, us=us)
    base |= dict(floor_us=5.0, rel_err=2e-3, device="NVIDIA H200", commit="abc1234", date="2026-11-21", versions={})
    return base | changes


def written(argv: list[str]) -> int:
    """What `make figures` gives of all records."""
    return figures.main(argv, (*RECORDS, *MODELS))


def place(folder: Path, rows: object) -> list[str]:
    """Write `rows` and a README with markers into the tree `folder`; return main's arguments."""
    put(folder, "decode_bf16", rows)
    page = folder / "benchmarks" / "README.md"
    page.write_text("before\n<!-- decode_bf16 -->\nold\n<!-- /decode_bf16 -->\nafter\n")
    return arguments(folder)


def put(folder: Path, name: str, rows: object, device: str = "h200") -> None:
    """Write a record into the tree; `rows` may be a text."""
    results = folder / "benchmarks" / "results" / device
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(rows if isinstance(rows, str) else json.dumps(rows))


def with_markers(folder: Path, *names: str) -> list[str]:
    """A benchmarks/README.md with these parts to fill; main's arguments."""
    text = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names)
    (folder / "benchmarks" / "README.md").write_text(text)
    (folder / "README.md").write_text("<!-- vllm_steps -->\nold\n<!-- /vllm_steps -->\n")
    return arguments(folder)


def page_of(folder: Path) -> str:
    return (folder / "benchmarks" / "README.md").read_text()


def arguments(folder: Path) -> list[str]:
    return [f"--root={folder}"]


def is_png(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG") and 2_000 < len(data) < 300_000


def test_readme_table_and_figures_come_from_the_file(tmp_path: Path) -> None:
    rows = [row("tsmla", 10.0), row("flashmla", 40.0), row("fa4", 20.0)]
    rows += [row("tsmla", 9.0, h=128, varlen=True), row("fa3", 6.0, h=128, varlen=True)]
    given = place(tmp_path, rows)
    assert written(given) == 0
    readme = (tmp_path / "benchmarks" / "README.md").read_text()
    assert readme.startswith("before\n<!-- decode_bf16 -->\n") and readme.endswith("<!-- /decode_bf16 -->\nafter\n")
    assert "old" not in readme
    assert "| B, S, H, keys | floor | FlashMLA | FA4 SM90 | **tsmla** | / best peer | of floor |" in readme
    assert "| 4, 1, 16, 4096 | 5.0 | 40.0 | 20.0 | **10.0** | 0.50 | 50% |" in readme
    assert "ragged" not in readme  # the short table leaves it out, the full one has it
    full = (tmp_path / "benchmarks" / "figures" / "decode_bf16.md").read_text()
    assert "## 128 heads\n\n| B, S, H, keys | floor | FlashMLA | FA3 | FA4 SM90 |" in full  # the columns of all heads
    assert "| 4, 1, 128, 4096, ragged | 5.0 | - | 6.0 | - | **9.0** | 1.50 | 56% |" in full
    assert "(figures/decode_bf16_relative.png)" in readme and "(figures/decode_bf16.md)" in readme
    assert "2 points; tsmla's time over the best peer's: geometric mean 0.87" in readme  # sqrt(0.5 * 1.5)
    assert "worst 1.50, ahead at 1 of 2" in readme
    assert "NVIDIA H200; commit abc1234; 2026-11-21" in readme
    assert "(decode_bf16_relative.png)" in full
    assert is_png(tmp_path / "benchmarks" / "figures" / "decode_bf16_relative.png")
    assert written(given) == 0
    assert (tmp_path / "benchmarks" / "README.md").read_text() == readme


def test_a_point_measured_again_replaces_the_older(tmp_path: Path) -> None:
    place(tmp_path, [row("tsmla", 7.0, date="2026-11-22"), row("tsmla", 10.0), row("fa3", 14.0)])
    path = tmp_path / "benchmarks" / "results" / "h200" / "decode_bf16.json"
    (point,) = table.load(path, attention.decode("bf16")).points
    assert {peer: point.us(peer) for peer in point.rows} == {"tsmla": 7.0, "fa3": 14.0}
    assert point.ratio("tsmla", *attention.DENSE) == 0.5


def test_bf16_queries_are_shown_and_not_compared(tmp_path: Path) -> None:
    assert written(place(tmp_path, [row("tsmla", 10.0), row("tsmla_bf16_q", 12.0), row("fa3", 20.0)])) == 0
    readme = (tmp_path / "benchmarks" / "README.md").read_text()
    assert "| **tsmla** | / best peer | of floor | bf16 queries |" in readme
    assert "| 4, 1, 16, 4096 | 5.0 | 20.0 | **10.0** | 0.50 | 50% | 12.0 |" in readme


def test_only_ours_measured_shows_no_comparison(tmp_path: Path) -> None:
    assert written(place(tmp_path, [row("tsmla", 10.0)])) == 0
    readme = (tmp_path / "benchmarks" / "README.md").read_text()
    assert "geometric mean" not in readme
    assert "| 4, 1, 16, 4096 | 5.0 | **10.0** | 50% |" in readme


def test_the_sparse_record_has_modes_and_fa3_apart(tmp_path: Path) -> None:
    sizes = {"tsmla": 15.0, "flashmla": 30.0, "legacy": 25.0, "fa3": 20.0}
    rows = [row(peer, us, b=8, keys=2048, mode="v32") for peer, us in sizes.items()]
    rows += [row(peer, us, b=64, h=64, keys=640, mode="v4-512") for peer, us in (("tsmla", 10.0), ("legacy", 40.0))]
    put(tmp_path, "sparse_mla", rows)
    assert written(with_markers(tmp_path, "sparse_mla")) == 0
    readme = page_of(tmp_path)
    assert "| B, S, H, keys | floor | FlashMLA | SGLang | FA3 | **tsmla** | / best peer | of floor |" in readme
    assert "| 8, 1, 16, V3.2 | 5.0 | 30.0 | 25.0 | 20.0 | **15.0** | 0.60 | 33% |" in readme
    assert "| 64, 1, 64, V4, 128 + 512 | 5.0 | - | 40.0 | - | **10.0** | 0.25 | 50% |" in readme
    assert "V3.2: 1 points; tsmla's time over the best peer's: geometric mean 0.60" in readme
    assert "over FA3's on a bf16 cache 0.75, worst 0.75" in readme
    for mode in ("v32", "v4-512"):
        assert is_png(tmp_path / "benchmarks" / "figures" / f"sparse_mla_{mode}_relative.png")
    put(tmp_path, "sparse_mla", [row("tsmla", 3.0)])
    assert written(arguments(tmp_path)) == 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": 1}, "a list of objects"),
        ([], "no rows"),
        ([{"b": 1}], "KeyError 'h'"),
        ([row("tsmla", 0.0)], "must be positive"),
    ],
)
def test_bad_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: object, said: str) -> None:
    assert written(place(tmp_path, rows)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_missing_markers_are_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        table.between_markers("<!-- /decode_bf16 --> <!-- decode_bf16 -->", "decode_bf16", "x")


def test_nothing_recorded_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "README.md").write_text("as it was")
    assert written(arguments(tmp_path)) == 0
    assert (tmp_path / "benchmarks" / "README.md").read_text() == "as it was"


def test_prefill_and_cache_tables_come_from_their_files(tmp_path: Path) -> None:
    common = {
        "dtype": "bf16",
        "head_dims": [192, 128],
        "device": "NVIDIA H200",
        "commit": "abc1234",
        "date": "2026-11-21",
    }
    prefill = [{"point": "1x2048h128", "peer": peer, "us": us, "tflops": 600.0, **common}
               for peer, us in (("tsmla", 300.0), ("fa3", 400.0), ("cudnn", 600.0))]  # fmt: skip
    cache = [
        {
            "op": "write_kv_cache",
            "dtypes": ["bfloat16", "bfloat16"],
            "tokens": 4096,
            "us": 6.0,
            "copy_us": 5.0,
            **common,
        }
    ]
    packed = {"dtypes": ["float32", "uint8"], "us": 5.4, "copy_us": 4.5}
    cache += [{**cache[0], **packed, "op": "write_indexer_cache", "tokens": tokens} for tokens in (128, 4096)]
    put(tmp_path, "prefill", prefill)
    put(tmp_path, "cache", cache)
    merged = [{**cache[0], "op": "merge_attention_states", "tokens": tokens, "us": 4.0} for tokens in (1, 4096)]
    put(tmp_path, "merge", merged)
    names = ("prefill", "cache", "merge")
    assert written(with_markers(tmp_path, *names)) == 0
    readme = page_of(tmp_path)
    assert "old" not in readme
    assert "| 1x2048h128 | 400 |" in (tmp_path / "benchmarks" / "figures" / "prefill.md").read_text()
    assert "FA3 0.75 (1 point)" in readme and "| 1x2048h128 | 400 | 600 | **300** | 0.75 | 600 |" in readme
    assert "take 1.20 to 1.20 times a copy of the same bytes from 4096 tokens on" in readme
    page = (tmp_path / "benchmarks" / "figures" / "cache.md").read_text()
    assert "| | T 128 | T 4096 |" in page and "| `write_kv_cache`, bfloat16 | - | 6.0 (1.20) |" in page
    assert "| `write_indexer_cache`, float32 to uint8 | 5.4 (1.20) | 5.4 (1.20) |" in page
    assert "Merging takes 0.80 to 0.80 times a copy of the same bytes from 4096 tokens on" in readme
    page = (tmp_path / "benchmarks" / "figures" / "merge.md").read_text()
    assert "| | T 1 | T 4096 |" in page and "| `merge_attention_states`, bfloat16 | 4.0 (0.80) | 4.0 (0.80) |" in page
    for name in ("prefill_relative", "cache_relative", "merge_relative"):
        assert is_png(tmp_path / "benchmarks" / "figures" / f"{name}.png")
    assert "fp8" not in readme
    prefill.append({**prefill[0], "peer": "tsmla_fp8", "us": 210.0})
    put(tmp_path, "prefill", prefill)
    assert written(arguments(tmp_path)) == 0
    assert "| **300** | 0.75 | 600 | 210 | 0.70 |" in page_of(tmp_path)
    # Another run is compared within itself alone.
    earlier = [{**prefill[0], "us": 330.0, "commit": "0ld0000"}, {**prefill[0], "peer": "fa4", "us": 300.0}]
    put(tmp_path, "prefill_fa4", earlier)
    assert written(arguments(tmp_path)) == 0
    page = (tmp_path / "benchmarks" / "figures" / "prefill.md").read_text()
    assert "| 1x2048h128 | 400 | 600 | **300** |" in page and "| 1x2048h128 | 300 | **330** | 600 |" in page
    assert "FA4 SM90 1.10 (1 point); commit 0ld0000" in page_of(tmp_path)


def test_the_gradients_figure_and_sentence_come_from_its_file(tmp_path: Path) -> None:
    common = {"dtype": "bf16", "b": 1, "device": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-21"}
    common |= {"head_dims": [192, 128]}
    times = {
        4096: {"tsmla": 400.0, "tsmla_deterministic": 440.0, "cudnn": 600.0, "fa4": 500.0},
        8192: {"tsmla": 1800.0, "tsmla_deterministic": 1800.0, "cudnn": 2000.0},
    }
    rows = [
        {"point": f"{length}h16", "length": length, "h": 16, "peer": peer, "us": us, "tflops": 500.0, **common}
        for length, each in times.items()
        for peer, us in each.items()
    ]
    put(tmp_path, "prefill_backward", rows)
    assert written(with_markers(tmp_path, "prefill_backward")) == 0
    readme = page_of(tmp_path)
    assert "old" not in readme and "(figures/prefill_backward.md)" in readme
    # sqrt(400 / 500 * 1800 / 2000), sqrt(400 / 600 * 1800 / 2000), sqrt(440 / 400)
    assert "over the best peer 0.85 (worst 0.90, 2 points), cuDNN 0.77 (worst 0.90, 2 points)" in readme
    assert "FA4 SM90 0.80 (1 point)" in readme
    assert "deterministic over default 1.05 (worst 1.10, 2 points)" in readme
    page = (tmp_path / "benchmarks" / "figures" / "prefill_backward.md").read_text()
    assert "| B x T, H | **tsmla** | deterministic | cuDNN | FA4 SM90 | TFLOP/s |" in page
    assert "| 8192h16 | 1800 | 1800 | 2000 | - | 500 |" in page
    assert is_png(tmp_path / "benchmarks" / "figures" / "prefill_backward_relative.png")


@pytest.mark.parametrize(
    "name", ["prefill", "prefill_backward", "cache", "sparse_layer", "segment_attention", "indexer_topk", "vllm"]
)
def test_a_file_without_its_fields_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, name, [{"peer": "vllm" if name == "vllm" else "tsmla"}])
    with_markers(tmp_path, name)
    assert written(arguments(tmp_path)) == 2
    assert f"{name}.json: KeyError" in capsys.readouterr().err


def test_whole_models_become_the_readmes_table(tmp_path: Path) -> None:
    fixed = {"device": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-23", "context": 512}
    fixed |= {"mode": "v2-lite decode", "b": 16, "layers": 27}
    rows = [{**fixed, "peer": "tsmla", "us": 8000.0, "floor_us": 6000.0, "tokens_per_s": 2000}]
    put(tmp_path, "generate", rows)
    assert written(with_markers(tmp_path, "generate")) == 0
    readme = page_of(tmp_path)
    assert "| v2-lite decode | 16 | 6.00 | **8.00** | 75% | 2,000 |\n" in readme and "512 tokens of context" in readme
    put(tmp_path, "generate", [*rows, {**rows[0], "peer": "bc479d4", "us": 10000.0}])
    assert written(with_markers(tmp_path, "generate")) == 0
    assert "| v2-lite decode | 16 | 6.00 | **8.00** | 75% | 2,000 | 10.00 | 0.80 |\n" in page_of(tmp_path)
    # vLLM's rows of the same weights stand beside ours: the fastest of its own backends and ours in it, no dummy
    # weights, no narrower cache, no texts of another length.
    vllm = [
        {**fixed, "peer": peer, "backend": backend, "us": us, "tokens_per_s": 1, "kv": "auto", "prefill": "auto",
         "vllm": "0.26.0", **other}
        for peer, backend, us, other in (
            ("vllm", "FLASHMLA", 9000.0, {"tokens": [[5, 6], [7, 8]]}), ("vllm", "FLASH_ATTN_MLA", 10000.0, {}),
            ("vllm", "CUSTOM", 7000.0, {"prefill": "CUSTOM", "tokens": [[5, 1], [1, 8]]}),
            ("vllm, dummy weights", "FLASHMLA", 4000.0, {}),
            ("vllm", "FLASHMLA", 5000.0, {"kv": "fp8"}), ("vllm", "FLASHMLA", 6000.0, {"context": 256}),
            ("vllm", "CUSTOM", 6000.0, {"kv": "fp8", "prefill": "CUSTOM"}),
            ("vllm", "CUSTOM", 50000.0, {"mode": "v2-lite prefill", "prefill": "CUSTOM"}),
        )
    ]  # fmt: skip
    rows += [{**rows[0], "b": 1}, {**rows[0], "context": 16384, "us": 9000.0}]
    rows[0]["command"] = "python -m examples.whole_models.generate --checkpoints WEIGHTS --out FILE"
    put(tmp_path, "generate", rows)
    put(tmp_path, "vllm", vllm)
    assert written(with_markers(tmp_path, "generate", "vllm")) == 0
    readme = page_of(tmp_path)
    assert "| v2-lite decode | 16 | 6.00 | **8.00** | 75% | 2,000 | 9.00 | 0.89 | 7.00 | 1.14 |\n" in readme
    assert "| v2-lite decode | 1 | 6.00 | **8.00** | 75% | 2,000 | - | - | - | - |\n" in readme
    assert "| v2-lite decode, 16,384 tokens | 16 | 6.00 | **9.00** | 67% | 2,000 | - | - | - | - |\n" in readme
    assert "timed (FLASHMLA, FLASH_ATTN_MLA)" in readme and "vLLM 0.26.0 read a checkpoint of random weights" in readme
    assert "tsmla read the same checkpoint and had the same prompts." in readme
    page = (tmp_path / "benchmarks" / "figures" / "vllm.md").read_text()
    names = "FLASHMLA | FLASH_ATTN_MLA | **tsmla** | FLASHMLA, fp8 cache | **tsmla**, fp8 cache"
    assert f"| step, context, B | {names} | tsmla / best other | tsmla / best other, fp8 cache |" in page
    assert "| v2-lite decode, 512, 16 | 9.00 | 10.00 | 7.00 | 5.00 | 6.00 | 0.78 | 1.20 |" in page
    assert "| v2-lite decode, 256, 16 | 6.00 | - | - | - | - | - | - |" in page
    assert "decode 0.78 (1 point), decode, fp8 cache 1.20 (1 point)" in readme
    assert "| v2-lite prefill, 512, 16 | - | - | 50.00 | - | - | - | - |\n\n## Equal tokens" in page
    assert "| step, context, B | FLASHMLA = **tsmla** |\n" in page
    assert page.rstrip().endswith("| v2-lite decode, 512, 16 | 0.50 |")
    assert is_png(tmp_path / "benchmarks" / "figures" / "vllm_decode.png")
    # A row that was measured without that checkpoint stands beside vLLM's, too, and the caption says so.
    put(tmp_path, "vllm", [*vllm, {**vllm[0], "b": 1}])
    assert written(arguments(tmp_path)) == 0
    assert "the same checkpoint and had the same prompts in v2-lite decode, B 16; its other rows" in page_of(tmp_path)
    put(tmp_path, "generate", [{**fixed, "b": 16}])
    assert written(arguments(tmp_path)) == 2


FIXED = {"device": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-23"}


def test_the_indexers_records_give_a_figure_and_a_table_each(tmp_path: Path) -> None:
    logits = [
        {**FIXED, "mode": mode, "b": 1, "s": s, "keys": 8192, "floor_us": 5.0, "peer": peer, "us": us}
        for mode, s in (("decode", 2), ("prefill", 4096))
        for peer, us in (("tsmla", 8.0), ("deep_gemm", 10.0))
    ]
    topk = [
        {**FIXED, "mode": mode, "b": 8, "keys": 32768, "k": 2048, "floor_us": 1.0, "peer": peer, "us": us}
        for mode, peer, us in (
            ("position", "tsmla", 9.0), ("value", "tsmla", 11.0), ("position", "sgl", 20.0),
            ("position", "vllm_rows", 18.0),
        )
    ]  # fmt: skip
    put(tmp_path, "indexer_logits", logits)
    put(tmp_path, "select_topk", topk)
    assert written(with_markers(tmp_path, "indexer_logits", "select_topk")) == 0
    readme, folder = page_of(tmp_path), tmp_path / "benchmarks" / "figures"
    assert "old" not in readme and "DeepGEMM's: 0.80 (worst 0.80, 2 points)" in readme
    assert "the best peer's: 0.50 (1 point)" in readme and "The 2048 largest" in readme
    page = (folder / "indexer_logits.md").read_text()
    assert "| 1, 2, 8192 | 5.0 | 10.0 | **8.0** | 0.80 | 62% |" in page and "| 1, 4096, 8192, prefill |" in page
    page = (folder / "select_topk.md").read_text()
    assert "| 8 x 32768 | 1.0 | 18.0 | 20.0 | **9.0** | 0.50 | 11.0 |" in page
    for name in ("indexer_logits", "select_topk"):
        assert f"(figures/{name}_relative.png)" in readme
        assert is_png(folder / f"{name}_relative.png")


def test_the_selection_is_compared_with_the_peers_two_kernels(tmp_path: Path) -> None:
    times = {"tsmla": 12.0, "tsmla_32": 13.0, "tsmla_two": 10.0, "tsmla_logits": 6.0, "deep_gemm": 8.0}
    times |= {"vllm_rows": 20.0, "sgl": 16.0}
    case = {**FIXED, "mode": "decode", "b": 8, "s": 1, "keys": 8192, "k": 2048, "h": 64, "floor_us": 2.0}
    rows = [{**case, "peer": peer, "us": us} for peer, us in times.items()]
    put(tmp_path, "indexer_topk", rows)
    assert written(with_markers(tmp_path, "indexer_topk")) == 0
    readme = page_of(tmp_path)
    assert "fastest top-k's: 0.50 (1 point); with one token a request 0.50" in readme
    assert "one after the other: 1.20 (1 point)" in readme
    page = (tmp_path / "benchmarks" / "figures" / "indexer_topk.md").read_text()
    assert "| 8, 1, 8192 | 2.0 | 24.0 | 10.0 | **12.0** | 0.50 | 1.20 | 13.0 |" in page
    assert is_png(tmp_path / "benchmarks" / "figures" / "indexer_topk_relative.png")


def test_sparse_prefill_is_compared_by_heads(tmp_path: Path) -> None:
    times = {"tsmla": 50.0, "tsmla fp8 queries": 40.0, "flashmla": 100.0, "widen": 62.0}
    rows = [
        {**FIXED, "mode": "random", "length": 4096, "h": 16, "keys": 2048, "floor_us": 20.0, "rel_err": 0.01,
         "peer": peer, "us": us}
        for peer, us in times.items()
    ]  # fmt: skip
    rows += [{**rows[i], "mode": "v4", "h": 64, "us": us} for i, us in ((0, 120.0), (2, 100.0))]
    put(tmp_path, "sparse_mla_prefill", rows)
    assert written(with_markers(tmp_path, "sparse_mla_prefill")) == 0
    readme = page_of(tmp_path)
    assert "FlashMLA's: 0.77 (worst 1.20, 2 points), geometric mean" in readme  # sqrt(0.5 * 1.2)
    assert "16 heads 0.50 (1 point), 64 heads 1.20 (1 point)" in readme
    assert "takes 62 to 62 us, which are not in its time" in readme and "fp8 queries take 0.80 (" in readme
    assert "| 4096, 16, V3.2, random keys | 20.0 | 100.0 | **50.0** | 0.50 | 40% | 40.0 |" in readme
    page = (tmp_path / "benchmarks" / "figures" / "sparse_mla_prefill.md").read_text()
    assert "## V4, 128 + 512\n\n| T, H |" in page and "| 4096, 64 | 20.0 | 100.0 | **120.0** | 1.20 | 17% | - |" in page
    assert is_png(tmp_path / "benchmarks" / "figures" / "sparse_mla_prefill_relative.png")


def test_sparse_attention_over_plain_rows_is_compared_with_the_best_peer(tmp_path: Path) -> None:
    times = {"tsmla": 50.0, "flashmla": 100.0, "fa3": 80.0}
    fields = {"mode": "steps", "length": 64, "h": 128, "keys": 2048, "floor_us": 25.0, "rel_err": 0.002}
    put(tmp_path, "sparse_mla_plain", [{**FIXED, **fields, "peer": peer, "us": us} for peer, us in times.items()])
    assert written(with_markers(tmp_path, "sparse_mla_plain")) == 0
    page = page_of(tmp_path)
    assert "1 points; tsmla's time over the best peer's: geometric mean 0.62" in page
    assert "| 64, 128, 8,192 rows a request | 25.0 | 100.0 | 80.0 | **50.0** | 0.62 | 50% |" in page


def test_a_sparse_layer_is_shown_by_step(tmp_path: Path) -> None:
    case = {**FIXED, "page": 64, "keys": 32768, "k": 2048, "h": 16, "same": 0.99, "part": "step"}
    rows = [{**case, "b": b, "peer": "tsmla", "kernels": "", "us": 40.0} for b in (8, 1)]
    rows += [{**case, "b": 8, "peer": "engines", "kernels": "sgl legacy", "us": 80.0}]
    rows += [{**row, "part": "step by the host's clock", "us": 1.5 * row["us"]} for row in rows]
    rows += [{**rows[0], "part": "write_kv", "us": 7.0}]  # an older record's
    put(tmp_path, "sparse_layer", rows)
    assert written(with_markers(tmp_path, "sparse_layer")) == 0
    readme = page_of(tmp_path)
    assert "32,768 keys a request, 2,048 of them selected" in readme
    assert "tsmla's time over theirs: 0.50 (1 point)" in readme
    assert "| 1, 16 | - | **40.0** | - | - | 60.0 |" in readme
    assert "| 8, 16 | 80.0 | **40.0** | 0.50 | 120.0 | 60.0 |" in readme
    assert is_png(tmp_path / "benchmarks" / "figures" / "sparse_layer.png")


def test_packed_rows_are_shown_forward_and_with_the_gradient(tmp_path: Path) -> None:
    case = {**FIXED, "dtype": "bf16", "errors_at": "2x512h16s3", "point": "4x4096h16s8"}
    rows = [
        {**case, "peer": "tsmla", "forward_us": 50.0, "us": 300.0, "rel_err": [0.002, 0.003, 0.003, 0.002]},
        {**case, "peer": "cudnn", "forward_us": 100.0, "us": 400.0, "rel_err": [0.002, 0.004, 0.003, 0.002]},
        {**case, "peer": "tsmla_kv", "forward_us": 45.0, "us": 310.0, "rel_err": None},
    ]
    put(tmp_path, "segment_attention", rows)
    assert written(with_markers(tmp_path, "segment_attention")) == 0
    readme = page_of(tmp_path)
    assert "forward 0.50 (1 point), with its gradient 0.75 (1 point)" in readme
    assert "| 4x4096h16s8 | 400.0 | 300.0 | 310.0 | 0.75 |" in readme
    page = (tmp_path / "benchmarks" / "figures" / "segment_attention.md").read_text()
    assert (
        "| 4x4096h16s8 | 100.0 | 50.0 | 45.0 | 0.50 |" in page and "| cuDNN | 0.20% | 0.40% | 0.30% | 0.20% |" in page
    )
    assert is_png(tmp_path / "benchmarks" / "figures" / "segment_attention.png")
    put(tmp_path, "segment_attention", rows[:1])  # ours alone
    assert written(with_markers(tmp_path, "segment_attention")) == 0
    assert "cuDNN" not in page_of(tmp_path)


def test_several_gpus_are_compared_with_one(tmp_path: Path) -> None:
    case = {**FIXED, "b": 4, "heads": 16, "keys": 131072, "mode": "decode attention", "peer": "tsmla", "layers": 8}
    case["values"] = 128
    rows = [
        {**case, "heads": heads, "b": texts, "context_parallel": n, "us": us * texts / 4, "floor_us": 35.0 * texts / n}
        for heads, more in ((16, 0), (128, 30)) for texts in (1, 4)
        for n, us in ((1, 150.0), (2, 90.0 + more), (4, 70.0))
    ]  # fmt: skip
    put(tmp_path, "context_parallel", [*rows[:-1], {**rows[-1], "kernels_us": 60.0}], "h200x4")
    put(tmp_path, "context_parallel", [row for row in rows if row["context_parallel"] < 4], "h100x2")
    step = {**FIXED, "peer": "tsmla", "context": 512, "mode": "v2-lite decode", "b": 64, "us": 10000.0}
    step |= {"floor_us": 7000.0, "tokens_per_s": 6400, "layers": 27}
    copies = {"data_parallel": 2, "b": 128, "tokens_per_s": 12800}
    fewer = {"layers": 6, "collectives": "in graphs"}
    mesh = {"data_parallel": 1, "expert_parallel": 2, "context_parallel": 1, "us": 8000.0, "tokens_per_s": 8000}
    mesh |= {"memory_gb": 21.51, "exchanges_us": [100, 300]}
    prompt = {**step, "mode": "v2-lite prompt", "b": 1, "context": 32768, "tokens_per_s": 50000}
    longer = {"context": 131072, "context_parallel": 2}
    sliced = {**step, "mode": "v3-slice fp8 decode", "layers": 6, "b": 256}
    slices = [{**sliced, "expert_parallel": n, "us": 9e3 / n + 1e3, "floor_us": 8e3 / n} for n in (1, 2, 4)]
    put(tmp_path, "generate", [
            step, {**step, **mesh}, {**step, **mesh, "b": 1}, {**step, **copies}, {**step, **mesh, **fewer},
            prompt, {**prompt, "context_parallel": 2, "tokens_per_s": 75000}, {**prompt, **longer}, *slices,
        ], "h200x4")  # fmt: skip
    put(tmp_path, "generate", slices, "h100x2")
    growth = "growth_predicted", "growth_beyond"
    parts = "context_parallel", "context_parallel_four", "generate_mesh", "generate_mesh_four"
    assert written(with_markers(tmp_path, *parts, *growth)) == 0
    readme, of_mesh, in_graphs = page_of(tmp_path), "21.5 | 0.10 to 0.30 |", "collectives in graphs"
    assert "| 4, 128, 131072, 128 | 140.0 | 150.0 | 70.0 | 120.0 | 0.80 | 35.0 | 70.0 | 0.47 | 60.0 |" in readme
    assert "old" not in readme and "4 GPUs 0.47 (worst 0.47, 4 points)" in readme
    assert readme.count("GB a GPU is") == 1  # in the caption of the record that has such a column
    assert "| 4, 16, 131072, 128 | 140.0 | 150.0 | 70.0 | 90.0 | 0.60 | 35.0 | 70.0 | 0.47 | - |" in readme
    assert "| v2-lite decode, 27 layers | one GPU | 64 | 7.00 | **10.00** | 70% | 6,400 | - | - | - |" in readme
    assert f"| v2-lite decode, 27 layers | expert 2 | 64 | 7.00 | **8.00** | 88% | 8,000 | 1.25 | {of_mesh}" in readme
    assert f"| v2-lite decode, 27 layers | expert 2 | 1 | 7.00 | **8.00** | 88% | 8,000 | - | {of_mesh}" in readme
    assert "| v2-lite decode, 27 layers | data 2 | 128 | 7.00 | **10.00** | 70% | 12,800 | 2.00 | - | - |" in readme
    assert (
        f"| v2-lite decode, 6 layers | expert 2, {in_graphs} | 64 | 7.00 | **8.00** | 88% | 8,000 | - | {of_mesh}"
        in readme
    )
    # A prompt is compared with one of its own length.
    of_prompt, prompt_of = "7.00 | **10.00** | 70% |", "| v2-lite prompt of"
    assert f"{prompt_of} 32,768 tokens, 27 layers | context 2 | 1 | {of_prompt} 75,000 | 1.50 | - | - |" in readme
    assert f"{prompt_of} 131,072 tokens, 27 layers | context 2 | 1 | {of_prompt} 50,000 | - | - | - |" in readme
    assert re.search(r"\| 4 x 131,072 keys, 128 heads \| 150.0 \| 60.0 \| \d+.\d \| \d.\d\d \|", readme)
    assert "| 64 | data 1, expert 64 |" in readme
    assert is_png(tmp_path / "benchmarks" / "figures" / "context_parallel.png")


def test_vllms_prompts_are_compared_by_the_means_of_their_starts(tmp_path: Path) -> None:
    case = {**FIXED, "peer": "vllm", "vllm": "0.26.0", "mode": "v2-lite prefill", "b": 8, "context": 512}
    times = ("FLASH_ATTN_MLA", 50e3), ("CUSTOM", 52e3), ("FLASH_ATTN_MLA", 54e3), ("CUSTOM", 46e3)
    rows = [{**case, "backend": backend, "us": us} for backend, us in times]
    put(tmp_path, "vllm_prompts", rows, "h100")
    assert written(with_markers(tmp_path, "vllm_prompts")) == 0
    readme = page_of(tmp_path)
    assert "the other's: 0.94 (1 point)" in readme
    assert "| 512, 8 | 50.00, 54.00 | 52.00, 46.00 | 0.94 |" in readme


def test_the_compressors_table_comes_from_its_file(tmp_path: Path) -> None:
    rows = [
        {**FIXED, "mode": mode, "kind": "v4_4", "b": b, "us": 9.0, "floor_us": 1.5}
        for mode, b in (("all", 8), ("prefill", 4096))
    ]
    put(tmp_path, "compress", rows)
    assert written(with_markers(tmp_path, "compress")) == 0
    readme = page_of(tmp_path)
    assert "| | V4, 1 in 4 |" in readme and "| prefill of 4096 tokens | 9.0 (1.5) |" in readme


def test_errors_are_drawn_of_every_record_that_has_them(tmp_path: Path) -> None:
    gradient = {**FIXED, "peer": "cudnn", "dq_err": 2e-3, "dk_err": 3e-3, "dv_err": None}
    results = tmp_path / "benchmarks" / "results" / "h200"
    put(tmp_path, "decode_fp8", [row("tsmla", 9.0), row("flashmla", 9.0)])
    put(tmp_path, "prefill_backward", [gradient, {**FIXED, "peer": "tsmla", "us": 1.0}])
    assert list(operations.errors_of(gradient)) == [2e-3, 3e-3]
    assert "norm of the difference over norm" in operations.write_errors(results, tmp_path / "benchmarks" / "figures")
    assert sorted(path.name for path in (tmp_path / "benchmarks" / "figures").iterdir()) == [
        "errors.md", "errors_decode.png", "errors_prefill.png"
    ]  # fmt: skip
    page = (tmp_path / "benchmarks" / "figures" / "errors.md").read_text()
    assert "| decode, fp8 | tsmla | 1 | 0.20% | 0.20% | - |" in page
    assert "| gradient, bf16 | cuDNN | 1 | 0.20% | 0.30% | - |" in page
    assert operations.write_errors(tmp_path / "nowhere", tmp_path / "none") == "none recorded"
    put(tmp_path, "decode_fp8", [{"us": 1.0}])
    with pytest.raises(ValueError, match=r"decode_fp8.json: KeyError 'peer'"):
        operations.write_errors(results, tmp_path / "benchmarks" / "figures")


def test_sglangs_calls_are_compared_by_model(tmp_path: Path) -> None:
    """With SGLang's own kernels alone; the short table has one and 64 requests."""
    rows = [
        row(peer, us, mode=mode, b=b, h=64, keys=2048)
        for mode, b, times in (
            ("v3.2 decode", 64, (8.0, 10.0)), ("v3.2 decode", 8, (9.0, 10.0)), ("v4 decode", 1, (12.0, 10.0))
        )
        for peer, us in zip(("tsmla", "legacy"), times, strict=True)
    ]  # fmt: skip
    put(tmp_path, "sglang", rows)
    assert written(with_markers(tmp_path, "sglang")) == 0
    readme = page_of(tmp_path)
    assert "v3.2 0.85 (worst 0.90, 2 points), v4 1.20 (1 point)" in readme
    assert "| v3.2 decode, 64, 64, 2048 | 10.0 | **8.0** | 0.80 |" in readme and "| v3.2 decode, 8, " not in readme
    assert "| v3.2 decode, 8, 64, 2048 |" in (tmp_path / "benchmarks" / "figures" / "sglang.md").read_text()


def test_vllms_slices_show_steps_and_their_attention(tmp_path: Path) -> None:
    """Beside the other backend of each cache, if it ran with ours; runs of mixed requests and checks are no steps."""
    fixed = {**FIXED, "peer": "vllm, drawn weights", "vllm": "0.26.0", "layers": 4, "b": 16, "context": 4096}
    rows = [
        {**fixed, "mode": f"v3.2-slice fp8 {step}", "kv": kv, "backend": backend, "us": us, **more}
        for step, kv, backend, us, more in (
            ("decode", "fp8_ds_mla", "FLASHMLA_SPARSE", 2000.0, {"attention_us": 200.0}),
            ("decode", "fp8_ds_mla", "CUSTOM", 1900.0, {"attention_us": 150.0}),
            ("decode", "auto", "CUSTOM", 1900.0, {}), ("prefill", "auto", "CUSTOM", 50000.0, {}),
            ("prefill", "auto", "FLASH_ATTN_MLA_SPARSE", 40000.0, {}), ("serving", "auto", "CUSTOM", 1.0, {}),
            ("checks", "auto", "CUSTOM", 1.0, {}), ("prefill", "fp8_ds_mla", "CUSTOM", 55000.0, {}),
            ("prefill", "fp8_ds_mla", "FLASHMLA_SPARSE", 50000.0, {"commit": "another"}),
        )
    ]  # fmt: skip
    put(tmp_path, "vllm_slices", rows)
    assert written(with_markers(tmp_path, "vllm_slices")) == 0
    readme = page_of(tmp_path)
    assert "| v3.2-slice fp8 decode, fp8_ds_mla, 4096, 16 | FLASHMLA_SPARSE | 2.00 | **1.90** | 0.950 | 200 |" in readme
    assert "| v3.2-slice fp8 decode, 16 bits, 4096, 16 | - | - | **1.90** |" in readme
    assert "| v3.2-slice fp8 prefill, fp8_ds_mla, 4096, 16 | - | - | **55.00** |" in readme
    assert "serving" not in readme and "slice fp8 checks" not in readme
    assert "decode, fp8_ds_mla: 0.95 (1 point), attention 0.75 (1 point); " in readme
    assert "prefill, 16 bits: 1.25 (1 point); geometric means" in readme


def test_vllms_slices_on_two_gpus_have_their_rows_beside_one(tmp_path: Path) -> None:
    """A step of which the host took a part is left out; the graph of it is shown."""
    fixed = {**FIXED, "peer": "vllm, drawn weights", "vllm": "0.26.0", "layers": 4, "b": 16, "context": 4096}
    rows = [
        {**fixed, "mode": "v2-lite decode", "kv": "auto", "backend": backend, "us": us, "graph_us": graph_us, **more}
        for backend, us, graph_us, more in (
            ("CUSTOM", 1900.0, 1000.0, {"tensor_parallel": 2}),
            ("FLASHMLA", 2000.0, 1250.0, {"tensor_parallel": 2}),
            ("CUSTOM", 1800.0, 1100.0, {}), ("FLASHMLA", 2400.0, 1000.0, {"disturbed": True}),
        )
    ]  # fmt: skip
    put(tmp_path, "vllm_slices", rows, "h200x2")
    assert written(with_markers(tmp_path, "vllm_slices_two")) == 0
    readme = page_of(tmp_path)
    assert "| v2-lite decode, 16 bits, 4096, 16 | FLASHMLA | - | **1.80** | - | 1.100 |" in readme
    assert "| v2-lite decode, 16 bits, 4096, 16, 2 GPUs | FLASHMLA | 2.00 | **1.90** | 0.950 | 0.800 |" in readme
    assert "v2-lite decode, 16 bits: graphs 1.10 (1 point); " in readme and "Attention is" not in readme
    assert "v2-lite decode, 16 bits, 2 GPUs: 0.95 (1 point), graphs 0.80 (1 point); geometric" in readme


def test_sglangs_slices_name_whose_flash_mla_ran(tmp_path: Path) -> None:
    fixed = {**FIXED, "peer": "sglang, drawn weights", "sglang": "0.5.17", "layers": 4, "b": 16, "context": 4096}
    rows = [
        {**fixed, "mode": f"{model} decode", "kv": kv, "backend": backend, "us": us, "attention_us": attention, **more}
        for model, kv, backend, us, attention, more in (
            ("v3.2-slice fp8", "fp8_e4m3", "dsa", 2000.0, 200.0, {"decode": "flashmla_kv"}),
            ("v3.2-slice fp8", "fp8_e4m3", "dsa", 1900.0, 100.0, {"decode": "flashmla_kv", "flash_mla": "tsmla"}),
            ("v2-lite", "auto", "tsmla", 900.0, 50.0, {"layers": 27}),
            ("v2-lite", "auto", "fa3", 1000.0, 100.0, {"layers": 27}),
            ("v2-lite", "auto", "flashmla", 1100.0, 80.0, {"layers": 27}),
            ("v2-lite", "auto", "fa3", 1050.0, 90.0, {"layers": 27, "decode": "flashmla", "flash_mla": "tsmla"}),
            ("v2-lite", "auto", "fa3", 1500.0, 120.0, {"layers": 27, "decode": "flashmla"}),
        )
    ]  # fmt: skip
    put(tmp_path, "sglang_slices", rows)
    assert written(with_markers(tmp_path, "sglang_slices")) == 0
    readme = page_of(tmp_path)
    assert "a step of SGLang 0.5.17" in readme and "(v3.2-slice fp8: 4 layers, v2-lite: 27 layers)" in readme
    step = "v3.2-slice fp8 decode through flashmla_kv, fp8_e4m3, 4096, 16"
    assert f"| {step} | flashmla_kv | 2.00 | **1.90** | 0.950 | 200 | 100 | 0.50 |" in readme
    step = "v2-lite decode through flashmla, 16 bits, 4096, 16"
    assert f"| {step} | flashmla | 1.50 | **1.05** | 0.700 | 120 | 90 | 0.75 |" in readme
    assert "v2-lite decode through flashmla, 16 bits: 0.70 (1 point), attention 0.75 (1 point)" in readme
    assert "| v2-lite decode, 16 bits, 4096, 16 | fa3, flashmla | 1.00 | **0.90** | 0.900 | 80 | 50 | 0.62 |" in readme


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/*_slices.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_steps_of_engines_are_left_out_by_the_rule_of_their_page(path: Path) -> None:
    """Steps that took over 1.25 times what their kernels took, or one run 1.25 times what another one took."""
    for row in json.loads(path.read_text()):
        if "decode" in row["mode"] and "us_of_runs" in row:
            runs = row["us_of_runs"]
            busy = row["us"] > 1.25 * row.get("kernels_us", math.inf) or max(runs) > 1.25 * min(runs)
            assert row.get("disturbed", False) == busy, (
                row["mode"],
                row["backend"],
                row["kv"],
                row["b"],
                row["context"],
            )
