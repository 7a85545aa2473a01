"""`tsmla compile` and `tsmla cache`, on stand-in kernels."""

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.emulator.standin import SCALE, ScaleConfig
from tsmla_kernels import contract, object_cache, options
from tsmla_kernels.catalog import (
    INDEXER_LOGITS,
    INDEXER_TOPK,
    MLA_DECODE,
    MLA_PREFILL,
    MLA_PREFILL_BACKWARD,
    SELECT_TOPK,
)
from tsmla_kernels.cli import objects as kernel_commands
from tsmla_kernels.cli.packages import install_hint
from tsmla_kernels.sm90.decode.config import DecodeConfig


@pytest.fixture(autouse=True)
def catalog(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_commands.KERNELS, "scale", SCALE)


def compile_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    kernel_commands.add_compile_arguments(parser)
    return kernel_commands.run_compile(parser.parse_args(argv))


def cache_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    kernel_commands.add_cache_arguments(parser)
    return kernel_commands.run_cache(parser.parse_args(argv))


def widths(entries: Sequence[object_cache.Entry]) -> list[int]:
    return sorted(json.loads(entry.description["config"])["width"] for entry in entries)


def test_compile_fills_the_cache_in_parallel(builds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--arch",
        "sm_90a",
        "--kernel",
        "scale",
        "--config",
        "narrow",
        "--config",
        "wide",
        "--config",
        "width=64",
    ]
    assert compile_command(*arguments, "--jobs", "2") == 0
    assert widths(object_cache.entries()) == [32, 64]
    said = capsys.readouterr()
    assert "2 compiled for sm_90a" in said.out
    assert "compiling 2 kernels\n[1/2] scale " in said.err and "[2/2] scale " in said.err and "\r" not in said.err
    assert re.search(r"compiled in [\d.]+ s: \d+ registers, 0 bytes of local memory\n", said.err)

    assert compile_command(*arguments, "--config", "width=96", "--jobs", "1") == 0
    assert "2 of 3 in the cache already" in capsys.readouterr().out
    assert len(builds.read_text().splitlines()) == 3


def test_compile_reports_what_fails_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        compile_command("--kernel", "scale", "--config", "width=32,fault=trace", "--config", "wide", "--jobs", "1") == 1
    )
    said = capsys.readouterr()
    assert "failed: scale: " in said.err and "made not to compile" in said.err and "1 compiled" in said.out
    assert widths(object_cache.entries()) == [64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "deepseek-v9"], "got preset 'deepseek-v9'; legal: deepseek-v2, "),
        (["--config", "narrow", "--kernel", "select_topk"], "got preset 'narrow'; legal: NAME=VALUE"),
        (["--config", "wide,fast"], "got 'fast' in 'wide,fast'; legal: NAME=VALUE"),
        (["--config", "wide", "--jobs", "0"], "--jobs: got 0; legal: an int >= 1"),
        (["--config", "wide", "--arch", "sm_75"], "--arch: got 'sm_75'; legal: sm_90a, sm_100a"),
        (["--config", "deepseek-v3,rope_dim=63"], "no kernel for it: the rope width is 63"),
        (["--config", "num_heads=3"], r"no kernel for it: num_heads \(Hi\) is 3; the sm_90 indexer kernel takes a mul"),
        (["--config", "deepseek-v3,shared_rope=true"], "(kernel mla_decode; --kernel names those to compile)"),
        (["--config", "deepseek-v3.2,tensor_parallel=3"], "got tensor_parallel=3; it must divide num_heads=128"),
        (["--config", "deepseek-v3.2,num_columns=100"], "got num_columns=100; legal: a multiple of page_size=64"),
        (["--config", "num_heads=3", "--kernel", "indexer_topk"], r"\(Hi\) is 3; .* \(kernel indexer_topk; --kernel"),
        (
            ["--config", "num_heads=" + "9" * 5000, "--kernel", "mla_decode"],
            "got num_heads=9*; legal: an int from 1 to",
        ),
        (["--config", "num_heads=8,page_size=2147483648", "--kernel", "mla_decode"], "got page_size=2147483648; legal"),
        (["--config", "eps=nan", "--kernel", "few_token_matmul"], "got eps=nan; legal: a finite number, at least 0"),
        (["--config", "eps=-1", "--kernel", "compress_write_kv_cache"], "got eps=-1; legal: a finite number, at least"),
        (["--config", "gated=true,limit=0", "--kernel", "few_token_matmul"], "got limit=0; legal: a finite number, ab"),
        (["--config", "limit=2", "--kernel", "few_token_matmul"], "got limit=2; legal: with gated=true"),
        (["--config", "limit=2", "--kernel", "block_scaled_matmul"], "got limit=2; legal: with gated=true"),
        (["--config", "quantized=true", "--kernel", "block_scaled_matmul"], "got quantized=true; legal: with gated=tr"),
        (["--config", "num_heads=8,form=all", "--kernel", "sparse_mla"], "got form=all; legal: auto, direct, union"),
        (
            ["--config", "num_heads=8,page_span=1", "--kernel", "sparse_mla"],
            "got page_span=1; legal: at least the page",
        ),
        (["--config", "num_heads=8,window=9,num_selected=8", "--kernel", "sparse_mla"], "got window=9; legal: at most"),
        (["--config", "rope_layout=rows", "--kernel", "write_packed_kv_cache"], "got rope_layout=rows; legal: interl"),
        (["--config", "rope_offset=96", "--kernel", "write_indexer_cache"], "rope_offset=96, rope_dim=64; legal: at m"),
        (
            ["--config", "return_bits=true", "--kernel", "indexer_topk"],
            "got return_bits=true; legal: with return_slots",
        ),
    ],
)
def test_compile_says_what_is_wrong(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_command(*arguments)


def test_compile_names_the_variable_of_a_wrong_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_75")
    with pytest.raises(ValueError, match=r"^CUTE_DSL_ARCH: got 'sm_75'; legal: sm_90a"):
        compile_command("--kernel", "scale", "--config", "wide")


def test_compile_says_that_a_process_was_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """As the system does if memory runs out."""
    with pytest.raises(OSError, match=r"^a process that compiled was ended, .* fewer --jobs need less memory"):
        compile_command("--kernel", "scale", "--config", "width=32,fault=end", "--config", "wide", "--jobs", "2")


def test_compile_asks_for_the_compiler_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec  # other modules are looked for, too
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else found(name))
    with pytest.raises(ModuleNotFoundError, match="compiling needs the CuTe DSL, package nvidia-cutlass-dsl") as raised:
        compile_command("--kernel", "scale", "--config", "wide")
    assert install_hint(raised.value.name) == ': pip install "tsmla-jax[cuda13]"'


def test_cache_lists_jaxs_programs_too(cache_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_command() == 0 and "compilation cache" not in capsys.readouterr().out
    object_cache.programs_directory().mkdir(parents=True)
    (cache_directory / "xla" / "jit_step-cache").write_bytes(bytes(20_000))
    assert cache_command() == 0
    assert f"1 files of jax's compilation cache, 0.02 MB in {cache_directory / 'xla'}" in capsys.readouterr().out
    assert cache_command("prune", "--all") == 0 and (cache_directory / "xla" / "jit_step-cache").exists()


def test_cache_list_beside_a_process_that_removes_jaxs_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = object_cache.programs_directory()
    programs.mkdir(parents=True)
    programs.parent.chmod(0o700)
    (programs / "kept").write_bytes(b"0" * 20_000)
    (programs / "removed").write_bytes(b"0")
    found = os.scandir

    def scandir(folder: Path) -> list[os.DirEntry[str]]:
        entries = list(found(folder))
        (programs / "removed").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    assert cache_command() == 0
    assert "1 files of jax's compilation cache, 0.02 MB" in capsys.readouterr().out


def test_presets_are_the_configs_that_calls_get() -> None:
    ((kernel, config),) = kernel_commands.configs("deepseek-v3,tensor_parallel=8,max_q_len=2", [MLA_DECODE, SCALE])
    assert kernel is MLA_DECODE and isinstance(config, DecodeConfig)
    assert (config.num_heads, config.max_q_len, config.latent_dim, config.rope_dim) == (16, 2, 512, 64)
    assert config.dtype == "bfloat16" and config.causal and not config.ragged


@pytest.mark.parametrize("kind", [contract.DecodeSpec, contract.PrefillSpec])
def test_fields_with_a_default_are_options(kind: type) -> None:
    """So a new static argument needs no list of options."""
    make = {contract.DecodeSpec: options.decode_spec, contract.PrefillSpec: options.prefill_spec}[kind]
    fields = dataclasses.fields(kind)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    flags = [name for name, default in defaults.items() if default is False]
    usual, other = make({"num_heads": "16"}), make({"num_heads": "16", **dict.fromkeys(flags, "true")})
    assert flags and {name: getattr(usual, name) for name in defaults} == defaults
    assert other == dataclasses.replace(usual, **dict.fromkeys(flags, True))


def test_an_option_that_is_a_float() -> None:
    assert options.compress_write_spec({"eps": "1e-5"}).eps == 1e-5
    with pytest.raises(ValueError, match="--config: got eps=small; legal: a float"):
        options.compress_write_spec({"eps": "small"})


@pytest.mark.parametrize("given", ["", ",tensor_parallel=8", ",dtype=float16"])
def test_presets_have_both_operations_of_prefill(given: str) -> None:
    found = kernel_commands.configs(f"deepseek-v3{given}", [MLA_PREFILL, MLA_PREFILL_BACKWARD])
    assert [(kernel.name, config.rope_dim) for kernel, config in found] == [
        (kernel.name, rope_dim) for kernel in (MLA_PREFILL, MLA_PREFILL_BACKWARD) for rope_dim in (0, 64)
    ]
    both = kernel_commands.configs("deepseek-v3,shared_rope=true", [MLA_PREFILL])
    assert {config.rope_dim for _, config in both} == {64}


def test_a_chain_is_its_kernels_as_a_call_launches_them() -> None:
    found = dict(kernel_commands.configs("num_heads=32,k=1024,page_size=128", [INDEXER_TOPK]))
    assert list(found) == [INDEXER_LOGITS, SELECT_TOPK]
    logits, topk = found[INDEXER_LOGITS], found[SELECT_TOPK]
    assert (logits.num_heads, logits.page_size, logits.writes_rows) == (32, 128, True)
    assert (topk.k, topk.page_size, topk.row_requests, topk.follows) == (1024, 128, True, True)
    options = "index_n_heads=64,num_heads=16,ragged=false,return_slots=false,return_scores=true"
    found = dict(kernel_commands.configs(options, [INDEXER_TOPK]))
    assert found[INDEXER_LOGITS].num_heads == 64 and not found[INDEXER_LOGITS].writes_rows
    assert found[SELECT_TOPK].scores and not found[SELECT_TOPK].page_size


def test_what_a_cache_holds_is_compiled_elsewhere(
    cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another version too: the list says nothing of it."""
    lines = tmp_path / "objects.jsonl"
    for config in ScaleConfig(32), ScaleConfig(64):
        object_cache.load_or_compile(SCALE, config, "sm_90a")
    capsys.readouterr()
    assert cache_command("--json") == 0
    listed = capsys.readouterr().out
    assert listed.splitlines()[0] == '{"kernel": "scale", "arch": "sm_90a", "config": {"fault": "", "width": 32}}'
    monkeypatch.setattr(object_cache, "__version__", "another")
    object_cache.load_or_compile(SCALE, ScaleConfig(32), "sm_90a")
    assert cache_command("--json") == 0 and capsys.readouterr().out == listed

    lines.write_text(listed)
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert compile_command("--list", str(lines), "--kernel", "mla_decode") == 0
    assert compile_command("--list", str(lines), "--arch", "sm_100a") == 0
    assert capsys.readouterr().out.count("nothing to compile: --list has no line of this version for") == 2
    with pytest.raises(ValueError, match="--arch: got 'sm_90'; legal: sm_90a, "):
        compile_command("--list", str(lines), "--arch", "sm_90")
    assert object_cache.entries() == []
    assert compile_command("--list", str(lines), "--jobs", "1") == 0
    assert widths(object_cache.entries()) == [32, 64]
    assert "2 compiled for sm_90a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scale", "got 'scale'; legal: a line that `tsmla cache list --json` printed"),
        ("[" * 100_000, "got '[[["),
        ({"kernel": "gone"}, "got kernel 'gone'; legal: mla_decode, "),
        ({"kernel": ["scale"]}, "got kernel ['scale']; legal: mla_decode, "),
        ({"arch": "sm_75"}, "got arch 'sm_75'; scale is written for sm_90a"),
        ({"config": {}}, "scale: got no width; a config has width, fault"),
        ({"config": [[1, 2]]}, 'got \'{"kernel": "scale", "arch": "sm_90a", "config": [[1, 2]]}\'; legal: a line that'),
        ({"config": {"width": 32, "depth": 1}}, "scale: got depth; legal: width, fault"),
        ({"config": {"width": "32"}}, "scale: width: got '32'; legal: int"),
        ({"config": {"width": True}}, "scale: width: got True; legal: int"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_list_of_another_version(
    line: str | dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What this version does not have is said; the rest is compiled."""
    good = {"kernel": "scale", "arch": "sm_90a", "config": {"width": 64}}
    bad = line if isinstance(line, str) else json.dumps(good | line)
    lines = tmp_path / "objects.jsonl"
    lines.write_text(f"{bad}\n{json.dumps(good)}\n")
    assert compile_command("--list", str(lines), "--jobs", "1") == 1
    said = capsys.readouterr()
    assert "1 compiled for sm_90a" in said.out and f"--list {lines}, line 1: {message}" in said.err
    assert widths(object_cache.entries()) == [64]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/zero", r"^--list /dev/zero: goes on after 67108864 bytes; legal: at most that many$"),
        ("/dev/null", r"^--list /dev/null: is empty; legal: lines that `tsmla cache list --json` printed$"),
        ("/dev", r"^--list /dev: can't be read: Is a directory$"),
        ("/nowhere", r"^--list /nowhere: there is no such file$"),
    ],
)
def test_what_is_no_list(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_command("--list", path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar() -> None:
    terminal = Terminal()
    with kernel_commands._Progress(2, terminal) as progress:
        assert not progress.done(kernel_commands._Outcome("scale a", 1.0, None, "9 registers"))
        assert progress.done(kernel_commands._Outcome("scale b", 1.0, "no"))
    drawn = terminal.getvalue()
    assert "[1/2] scale a compiled in 1.0 s: 9 registers\n" in drawn
    assert "[........................] 0/2 kernels" in drawn and "[############............] 1/2 kernels" in drawn
    assert (
        "[########################] 2/2 kernels" in drawn and "scale b failed: no\n" in drawn and drawn.endswith("\n")
    )


def test_cache_lists_verifies_and_prunes(cache_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_command() == 0 and cache_command("verify") == 0
    compile_command("--kernel", "scale", "--config", "narrow", "--config", "wide", "--jobs", "1")
    capsys.readouterr()
    assert cache_command("list") == 0
    listed = capsys.readouterr().out
    assert listed.count('scale sm_90a {"fault": "", "width": ') == 2 and "2 entries" in listed
    assert "unused" not in listed

    damaged = next(cache_directory.glob("*.obj"))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert cache_command("verify") == 1
    said = capsys.readouterr().out
    assert f"{damaged.name}: damaged: " in said and "1 damaged" in said

    assert cache_command("prune") == 0 and not damaged.exists()
    assert "1 entries" in capsys.readouterr().out and len(object_cache.entries()) == 1
    assert cache_command("prune", "--older-than", "1") == 0 and len(object_cache.entries()) == 1
    assert cache_command("prune", "--all") == 0 and object_cache.entries() == []
    with pytest.raises(ValueError, match="--all, --older-than: got list; they go with prune"):
        cache_command("list", "--all")


@pytest.mark.parametrize("days", ["-1", "nan", "inf"])
def test_prune_refuses_ages_that_are_none(days: str) -> None:
    with pytest.raises(ValueError, match=f"--older-than: got {float(days)}; legal: a number of days, at least 0"):
        cache_command("prune", "--all", f"--older-than={days}")


def test_prune_says_what_it_can_not_remove(cache_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1")
    path = next(cache_directory.glob("*.obj"))
    path.unlink()
    path.mkdir()
    assert cache_command() == 0 and cache_command("verify") == 1 and cache_command("prune") == 1
    assert f"{path.name}: can't be removed: " in capsys.readouterr().err


def test_compile_refuses_a_directory_that_can_not_be_written(
    tmp_path: Path, builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=r"file/below can't be written .*TSMLA_CACHE_DIR names another"):
        compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1")
    assert not builds.read_text()


def test_compile_is_content_with_a_full_cache_that_can_not_be_written(
    builds: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1") == 0

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(object_cache.tempfile, "TemporaryFile", refuse)
    assert compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1") == 0
    assert "1 of 1 in the cache already" in capsys.readouterr().out
    with pytest.raises(OSError, match=r"can't be written \(Read-only file system\)"):
        compile_command("--kernel", "scale", "--config", "wide", "--jobs", "1")
    assert len(builds.read_text().splitlines()) == 1


def test_a_cache_that_is_a_file_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path / "file"))
    for command in ([], ["--json"], ["verify"], ["prune"]):
        with pytest.raises(OSError, match=r"^the cache of compiled kernels .*/file can't be read \(Not a directory\)"):
            cache_command(*command)


def test_compile_fails_where_an_object_could_not_be_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(object_cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1") == 1
    assert "failed: compiled, and not stored in " in capsys.readouterr().err


def test_is_stored_says_what_a_compilation_would_find() -> None:
    config = ScaleConfig(width=32)
    assert not object_cache.is_stored(SCALE, config, "sm_90a")
    compile_command("--kernel", "scale", "--config", "narrow", "--jobs", "1")
    assert object_cache.is_stored(SCALE, config, "sm_90a")
