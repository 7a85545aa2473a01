"""`tsmla generate` from the outside: its output, its JSON, and one line for everything that is wrong with the input."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from examples import make_checkpoint
from tests.jax.generate.tiny import tiny_config, tiny_tensors, write_tiny
from tsmla_jax.generate import Engine, command
from tsmla_jax.generate.command import (
    Stream,
    keep_compiled_programs,
    put_collectives_in_graphs,
    table,
)
from tsmla_jax.generate.prompts import read_lines, read_prompt_ids
from tsmla_kernels import object_cache
from tsmla_kernels.cli import command as cli

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[5, 6, 7], [1], [2, 3, 2, 3, 2], [9] * 20]


def run(*arguments: object) -> int:
    return cli.run(cli.parse(["tsmla", "generate", *map(str, arguments)]))


@pytest.fixture(scope="module")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts, which compiles in half the time."""
    return write_tiny(tmp_path_factory.mktemp("dense"), first_k_dense_replace=2)


@pytest.fixture
def prompt_ids(tmp_path: Path) -> Path:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    return tmp_path / "ids.json"


def test_a_prompt_is_a_line_and_no_less(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("first\u2028part\n\nform\x0cfeed\r\nnext\x85line".encode())
    assert read_lines(tmp_path / "p.txt") == ["first\u2028part", "form\x0cfeed", "next\x85line"]


def test_ids_in_tokens_and_figures_out(
    dense_checkpoint: Path, prompt_ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", dense_checkpoint, "--prompt-ids", prompt_ids, "--max-new-tokens", 8, "--chunk", 16]
    paging = ["--page-size", 4, "--cache-tokens", 50, "--speculative", 3, "--implementation", "xla"]
    assert run(*arguments, *paging, "--json", tmp_path / "out.json") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert [len(tokens) for tokens in record["tokens"]] == [8] * 4
    assert record["cache_bytes_per_token"] == 2 * 40 * 4 and record["cache_pages"] == 13
    assert record["cache_bytes"] == 13 * 4 * record["cache_bytes_per_token"]
    assert record["implementation"] == {"mla_prefill": "xla", "mla_decode": "xla"}
    assert record["prefill_tokens_per_second"] > 0 and record["decode_tokens_per_second"] > 0
    assert record["drafted_tokens"] >= record["accepted_tokens"] and 0 <= record["acceptance"] <= 1

    output = capsys.readouterr().out
    for index, tokens in enumerate(record["tokens"]):
        assert f"[{index}] {' '.join(map(str, tokens))}" in [line.rstrip() for line in output.splitlines()]
    for part in ("prefill  ", "decode  ", "tokens/s", "320 bytes/token (float32)", "13 pages of 4", "drafted tokens"):
        assert part in output
    assert "mla_decode   xla (as asked for)" in output

    paging = ["--page-size", 4, "--cache-pages", 13, "--cache-dtype", "fp8", "--q-dtype", "fp8", "--speculative", 3]
    assert record["q_dtype"] == "float32" and "queries      float32\n" in output
    assert run(*arguments, *paging, "--json", tmp_path / "fp8.json") == 0
    narrow = json.loads((tmp_path / "fp8.json").read_text())
    assert narrow["cache_dtype"] == narrow["q_dtype"] == "float8_e4m3fn"
    assert narrow["cache_bytes"] * 4 == record["cache_bytes"]
    assert set(narrow["implementation"]) == {"mla_prefill", "mla_decode"} and all(narrow["why"].values())


def test_text_in_text_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    tokenizer, _ = make_checkpoint.make_tokenizer()
    size = len(tokenizer["model"]["vocab"]) + 2
    write_tiny(tmp_path, vocab_size=size, bos_token_id=size - 2, first_k_dense_replace=2)
    make_checkpoint.write_json(tmp_path / "tokenizer.json", tokenizer)
    names = {"bos_token": {"content": make_checkpoint.BOS}, "add_bos_token": True}
    make_checkpoint.write_json(tmp_path / "tokenizer_config.json", names)
    (tmp_path / "prompts.txt").write_text("the river runs\n\nmoon, Zürich\n", encoding="utf-8")
    arguments = ["--prompt-file", tmp_path / "prompts.txt", "--max-new-tokens", 3, "--json", tmp_path / "out.json"]
    assert run("--checkpoint", tmp_path, *arguments) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [backend.decode(tokens) for tokens in record["tokens"]]
    output = capsys.readouterr().out
    assert output.startswith(f"[0] the river runs{texts[0]}\n[1] moon, Zürich{texts[1]}\n")
    record["why"] = dict.fromkeys(record["why"], why := "not cute: there is no NVIDIA GPU that jax can use")
    shown = table(record)
    assert shown.count(why) == 1 and shown.endswith("mla_decode   xla (as mla_prefill)")
    (tmp_path / "prompts.txt").unlink()
    prompts = ["--prompt", "the river runs", "--prompt", "moon, Zürich"]
    assert run("--checkpoint", tmp_path, *prompts, "--max-new-tokens", 3) == 0
    assert capsys.readouterr().out.startswith(f"[0] the river runs{texts[0]}\n[1] moon, Zürich{texts[1]}\n")
    # The tokenizer's own tokens and the beginning of text before them.
    lengths = [len(backend.encode(line).ids) for line in ("the river runs", "moon, Zürich")]
    assert record["prompt_tokens"] == sum(lengths) + 2


def test_streams_take_turns_and_wait_for_whole_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    out = io.StringIO()
    stream = Stream(out, ["a", "b", "c"], Bytes(), 3)  # type: ignore[arg-type]
    steps = [
        (0, [ord("x")], False, "[0] ax"),
        (1, [ord("y")], False, "[0] ax"),
        (2, [ord("z")], True, "[0] ax"),
        (0, ["ü".encode()[0]], False, "[0] ax"),
        (0, ["ü".encode()[1]], True, "[0] axü\n[1] by"),
        (1, [ord("!")], True, "[0] axü\n[1] by!\n[2] cz\n"),
    ]
    for index, tokens, done, expected in steps:
        stream(index, tokens, done)
        assert out.getvalue() == expected


def test_compiled_programs_are_kept_unless_jax_keeps_them_already(cache_directory: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    mask = os.umask(0o002)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == str(cache_directory / "xla")
        (cache_directory / "xla").mkdir(parents=True, exist_ok=True)  # as jax makes it
        assert object_cache.entries() == []  # this user's alone, so kernels are loaded from it
        jax.config.update("jax_compilation_cache_dir", "elsewhere")
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == "elsewhere"
    finally:
        os.umask(mask)
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("flags", "after"),
    [
        ("", "--xla_gpu_enable_command_buffer=+COLLECTIVES"),
        ("--xla_dump_to=/x", "--xla_dump_to=/x --xla_gpu_enable_command_buffer=+COLLECTIVES"),
        ("--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
        ("/etc/flags-of-xla", "/etc/flags-of-xla"),
    ],
)
def test_collectives_run_in_graphs_unless_the_user_says_what_does(
    flags: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    put_collectives_in_graphs()
    assert os.environ["XLA_FLAGS"] == after


@pytest.mark.parametrize(
    ("flags", "asked"),
    [([], False), (["--data-parallel", "2"], False), (["--expert-parallel", "2"], True),
     (["--context-parallel", "2"], True), (["--expert-parallel", "2", "--num-processes", "2"], False)],
)  # fmt: skip
def test_collectives_of_one_process_are_put_in_graphs(
    flags: list[str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(command, "put_collectives_in_graphs", lambda: calls.append(None))
    monkeypatch.setattr(command.processes, "join", lambda *given: None)
    monkeypatch.setattr(command.processes, "end_at_once", lambda status: None)
    assert run("--checkpoint", "nowhere", "--prompt", "x", *flags) == 2  # there is no such checkpoint
    assert len(calls) == asked


def test_compiling_is_said_where_no_terminal_is(
    dense_checkpoint: Path, prompt_ids: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", dense_checkpoint, "--prompt-ids", prompt_ids, "--max-new-tokens", 8, "--chunk", 16]
    assert run(*arguments, "--page-size", 4, "--cache-tokens", 50) == 0
    said = capsys.readouterr().err
    assert "compiling decode of 4 tokens, up to 4 texts\ncompiled decode of 4 tokens, up to 4 texts: " in said


Change = Callable[[Path], None]


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def unchanged(directory: Path) -> None: ...


def without(name: str) -> Change:
    def change(directory: Path) -> None:
        tensors = tiny_tensors(tiny_config())
        del tensors[name]
        write_tiny(directory, tensors)

    return change


def misshapen(name: str) -> Change:
    def change(directory: Path) -> None:
        tensors = tiny_tensors(tiny_config())
        write_tiny(directory, {**tensors, name: tensors[name][:-1]})

    return change


def writes(name: str, text: str) -> Change:
    return lambda directory: (directory / name).write_text(text) and None


def removes(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def pipe(name: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def piped_tokenizer_config(directory: Path) -> None:
    tokenizer_config("{}")(directory)
    pipe("tokenizer_config.json")(directory)


def piped_shard(directory: Path) -> None:
    index = {"weight_map": dict.fromkeys(tiny_tensors(tiny_config()), "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    pipe("model.safetensors")(directory)


def sized(**sizes: int) -> Change:
    return writes("config.json", json.dumps(tiny_config(**sizes)))


def tokenizer_config(text: str) -> Change:
    def change(directory: Path) -> None:
        tokenizer, _ = make_checkpoint.make_tokenizer()
        make_checkpoint.write_json(directory / "tokenizer.json", tokenizer)
        (directory / "tokenizer_config.json").write_text(text)

    return change


def latin(name: str) -> Change:
    def change(directory: Path) -> None:
        tokenizer_config("{}")(directory)
        (directory / name).write_bytes(b"Z\xfcrich")

    return change


NESTED = "[" * 100_000
IDS = ["--prompt-ids", "ids.json"]
GATE = "model.layers.1.mlp.gate.weight"

WRONG = {
    "a file of the checkpoint": (
        unchanged,
        ["--checkpoint", "config.json", *IDS],
        "--checkpoint config.json: a file; legal: the directory that holds it",
    ),
    "no checkpoint": (unchanged, ["--checkpoint", "nowhere", *IDS], "--checkpoint nowhere"),
    "no config": (removes("config.json"), IDS, "config.json"),
    "config not json": (writes("config.json", "{"), IDS, "config.json"),
    "another model": (writes("config.json", '{"model_type": "llama"}'), IDS, "model_type"),
    "no weights": (removes("model.safetensors"), IDS, "model.safetensors"),
    "truncated weights": (truncate, IDS, "truncated"),
    "missing tensor": (without(GATE), IDS, GATE),
    "misshapen tensor": (misshapen(GATE), IDS, GATE),
    "prompt longer than the cache": (
        unchanged,
        [*IDS, "--cache-tokens", "16", "--page-size", "4", "--max-new-tokens", "4"],
        "prompt 3: 20",
    ),
    "ids not json": (writes("ids.json", "[[1, 2"), IDS, "--prompt-ids ids.json"),
    "ids not lists": (writes("ids.json", "[1, 2]"), IDS, "prompt 0 = 1"),
    "ids not a list": (writes("ids.json", "{}"), IDS, "list of lists"),
    "ids not integers": (writes("ids.json", "[[1], [2.5]]"), IDS, "prompt 1 holds 2.5"),
    "empty prompt": (writes("ids.json", "[[1], []]"), IDS, "prompt 1: empty"),
    "id outside the vocabulary": (writes("ids.json", "[[1], [101]]"), IDS, "prompt 1: token id 101; legal: 0 to 100"),
    "negative id": (writes("ids.json", "[[-1]]"), IDS, "token id -1"),
    "no ids file": (removes("ids.json"), IDS, "ids.json"),
    "ids without end": (unchanged, ["--prompt-ids", "/dev/zero"],
                        "--prompt-ids /dev/zero: goes on after 67108864 bytes; legal: at most that many"),
    "ids in a directory": (unchanged, ["--prompt-ids", "/dev"], "--prompt-ids /dev: can't be read: Is a directory"),
    "prompts without end": (tokenizer_config("{}"), ["--prompt-file", "/dev/zero"],
                            "--prompt-file /dev/zero: goes on after 67108864 bytes; legal: at most that many"),
    "prompts not UTF-8": (latin("p.txt"), ["--prompt-file", "p.txt"], "--prompt-file p.txt: not UTF-8 text: "),
    "no tokenizer": (writes("p.txt", "hello"), ["--prompt-file", "p.txt"], "tokenizer.json"),
    "unknown implementation": (unchanged, [*IDS, "--implementation", "cudnn"], "'cudnn'"),
    "implementation that can't run": (unchanged, [*IDS, "--implementation", "cute"], "cute"),
    "cache dtype": (unchanged, [*IDS, "--dtype", "bf16", "--cache-dtype", "f32"],
                    "--cache-dtype 'f32'; legal with parameters of bf16: bf16, fp8"),
    "q dtype": (unchanged, [*IDS, "--dtype", "bf16", "--cache-dtype", "fp8", "--q-dtype", "f16"],
                "--q-dtype 'f16'; legal with parameters of bf16 and a cache of fp8: bf16, fp8"),
    "fp8 queries over a wide cache": (unchanged, [*IDS, "--q-dtype", "fp8"],
                                      "--q-dtype 'fp8'; legal with parameters of f32 and a cache of f32: f32"),
    "more devices than there are": (
        unchanged,
        [*IDS, "--data-parallel", "3", "--expert-parallel", "4"],
        "--data-parallel 3, --expert-parallel 4, --context-parallel 1: needs 12 devices, and jax has 8 (cpu); what "
        "fits: --data-parallel 2; JAX_NUM_CPU_DEVICES=12 in",
    ),
    "experts that can't be split": (
        unchanged,
        [*IDS, "--expert-parallel", "3"],
        "--expert-parallel 3: 8 experts on --expert-parallel x --context-parallel = 3 devices; legal products: 1, 2, 4",
    ),
    "page size": (unchanged, [*IDS, "--page-size", "0"], "--page-size 0"),
    "cache tokens": (unchanged, [*IDS, "--cache-tokens", "0"], "--cache-tokens 0"),
    "top p": (unchanged, [*IDS, "--top-p", "1.5"], "--top-p 1.5; legal"),
    "no new token": (unchanged, [*IDS, "--max-new-tokens", "0"], "--max-new-tokens 0; legal: 1 to"),
    "huge chunk": (unchanged, [*IDS, "--chunk", "1000000000"], "--chunk 1000000000; legal: 1 to 1048576"),
    "huge drafts": (unchanged, [*IDS, "--speculative", "1000000000"], "--speculative 1000000000; legal: 0 to 1024"),
    "huge cache": (unchanged, [*IDS, "--cache-pages", str(10**30)], f"--cache-pages {10**30}; legal: 1 to"),
    "cache beyond memory": (unchanged, [*IDS, "--cache-pages", str(10**9)], "GB, and this machine has"),
    "top p without temperature": (unchanged, [*IDS, "--top-p", "0.5"], "--top-p 0.5: tokens are chosen greedily"),
    "seed without temperature": (unchanged, [*IDS, "--seed", "3"], "--seed 3: tokens are chosen greedily"),
    "negative seed": (unchanged, [*IDS, "--seed", "-1"], "--seed -1; legal: 0 to"),
    "temperature": (unchanged, [*IDS, "--temperature", "-1"], "--temperature -1.0; legal"),
    "layers without end": (sized(num_hidden_layers=10**50), IDS,
                           "num_hidden_layers = 100000000000000000...0000000000000000000; legal: 1 to 10000"),
    "vocabulary without end": (sized(vocab_size=10**30), IDS, "vocab_size = 1000000"),
    "nested config": (writes("config.json", NESTED), IDS, "config.json: cannot be read as JSON: nested too deeply"),
    "nested ids": (writes("ids.json", NESTED), IDS, "--prompt-ids ids.json: not readable as JSON: nested too deeply"),
    "nested index": (writes("model.safetensors.index.json", NESTED), IDS, "index.json: not a readable JSON index"),
    "config is a pipe": (pipe("config.json"), IDS, "config.json: cannot read the config: not a regular file"),
    "weights are a pipe": (pipe("model.safetensors"), IDS, "model.safetensors: not a regular file"),
    "a shard is a pipe": (piped_shard, IDS, "model.safetensors: not a regular file, though model.safetensors.index"),
    "the index is a pipe": (pipe("model.safetensors.index.json"), IDS,
                            "index.json: not a readable JSON index: not a regular file"),
    "generation config is a pipe": (pipe("generation_config.json"), IDS,
                                    "generation_config.json: cannot read the config: not a regular file"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), ["--prompt", "a"], "tokenizer.json: not a regular file; --prompt"),
    "tokenizer config is a pipe": (piped_tokenizer_config, ["--prompt", "a"],
                                   "tokenizer_config.json: cannot read the config: not a regular file"),
    "tokenizer config is a list": (tokenizer_config("[]"), ["--prompt", "a"], "must hold a JSON object, got list"),
    "tokenizer config is a number": (tokenizer_config("3"), ["--prompt", "a"], "must hold a JSON object, got int"),
    "tokenizer config is nested": (tokenizer_config(NESTED), ["--prompt", "a"], "nested too deeply"),
    "odd beginning of text": (tokenizer_config('{"bos_token": 7, "add_bos_token": true}'), ["--prompt", "a"],
                              "bos_token = 7; legal: a token's text, or null"),
    "json in no directory": (unchanged, [*IDS, "--json", "no/where.json"], "no/where.json"),
    "json is a directory": (unchanged, [*IDS, "--json", "."], "--json .: can't be written: Is a directory"),
    "json that no one may write": (unchanged, [*IDS, "--json", "/proc/x.json"], "--json /proc/x.json: can't be wr"),
    "ids without a name": (tokenizer_config("{}"), ["--prompt-ids", ""], "--prompt-ids .: can't be read: Is a dir"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_line(
    case: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, arguments, named = WRONG[case]
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    change(tmp_path)
    monkeypatch.chdir(tmp_path)
    checkpoint = [] if "--checkpoint" in arguments else ["--checkpoint", "."]
    assert run(*checkpoint, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("tsmla generate: error: ") and named in captured.err


def test_an_error_has_a_line_of_its_own(
    tiny_checkpoint: Path, prompt_ids: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(engine: Engine, prompts: object, count: int, on_tokens: Callable[[int, list[int], bool], None]) -> None:
        on_tokens(0, [7, 8], True)
        on_tokens(1, [9], False)
        raise FloatingPointError("text 1: NaN")

    monkeypatch.setattr(Engine, "generate", fail)
    assert run("--checkpoint", tiny_checkpoint, "--prompt-ids", prompt_ids) == 2
    said = capsys.readouterr()
    assert said.out == "[0] 7 8 \n[1] 9 \n" and said.err == "tsmla generate: error: text 1: NaN\n"


def test_prompts_may_come_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ids")
    writer = threading.Thread(target=lambda: (tmp_path / "ids").write_text(json.dumps(PROMPTS)))
    writer.start()
    assert read_prompt_ids(tmp_path / "ids") == PROMPTS
    writer.join()


def test_no_traceback_from_a_process_of_its_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    truncate(tmp_path)
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "bridge"))
    command = [sys.executable, "-m", "tsmla_kernels.cli", "generate", "--checkpoint", ".", *IDS]
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tsmla generate: error: ") and done.stderr.count("\n") == 1


def test_the_demo_checkpoint_is_what_it_says(tmp_path: Path) -> None:
    """Real head dimensions, shards with their index, a tokenizer that gives every prompt back."""
    total = make_checkpoint.make_checkpoint(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == total and len(shards) > 1
    assert shards == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    from tsmla_jax.nn import Checkpoint, MLAConfig, load_hf_attention

    checkpoint, config = Checkpoint(tmp_path), MLAConfig.from_hf(tmp_path)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank) == (
        128, 64, 128, 512,
    )  # fmt: skip
    assert load_hf_attention(checkpoint, 3)["w_uk"].shape == (8, 128, 512)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for line in (tmp_path / "prompts.txt").read_text().splitlines():
        assert tokenizer.decode(tokenizer.encode(line).ids) == line
