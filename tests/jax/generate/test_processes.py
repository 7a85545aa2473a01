"""`tsmla generate` as several processes: the tokens of one, parts of the checkpoint for each, and no end that hangs."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from tsmla_jax.generate import Engine, EngineOptions, ModelConfig, loading, processes

PROMPTS = [[1, 2, 3], [5] * 9, [7]]

# The command, which says at its end which tensors of experts it has read.
CHILD = """
import argparse, sys
from tsmla_jax.generate import command
from tsmla_jax.nn import Checkpoint
command.keep_compiled_programs = lambda: None
read, names = Checkpoint.read, set()
Checkpoint.read = lambda self, name, **named: (names.add(name), read(self, name, **named))[1]
parser = argparse.ArgumentParser()
command.add_arguments(parser)
status = command.run(parser.parse_args(sys.argv[1:]))
print("EXPERTS", *sorted({name.split("experts.")[1].split(".")[0] for name in names if ".experts." in name}))
sys.exit(status)
"""


def start(process: int, port: int, environment: dict[str, str], *flags: object) -> "subprocess.Popen[str]":
    """One of two processes, with two devices."""
    mesh = ("--data-parallel", 1, "--expert-parallel", 4, "--page-size", 4, "--chunk", 16)
    hosts = ("--coordinator", f"localhost:{port}", "--num-processes", 2, "--process-id", process)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, (*mesh, *hosts, *flags))],
        env={**environment, "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


@pytest.mark.slow
def test_two_processes_make_the_tokens_of_one(
    tiny_checkpoint: Path,
    tiny_model: tuple[ModelConfig, Any],
    prompt_file: Path,
    tmp_path: Path,
    child_environment: dict[str, str],
) -> None:
    port, out = free_port(), tmp_path / "out.json"
    flags = ("--checkpoint", tiny_checkpoint, "--prompt-ids", prompt_file, "--max-new-tokens", 5, "--json", out)
    children = [start(process, port, child_environment, *flags) for process in range(2)]
    said = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    config, params = tiny_model
    want = Engine(params, config, EngineOptions(page_size=4, chunk=16)).generate(PROMPTS, 5).tokens
    record = json.loads(out.read_text())
    assert record["tokens"] == want and record["mesh"] == {"data": 1, "expert": 4, "context": 1}
    # Each has read the experts of its own two devices, and process 0 alone has something to say.
    assert "EXPERTS 0 1 2 3\n" in said[0][0] and "EXPERTS 4 5 6 7\n" in said[1][0]
    assert "mla_decode" in said[0][0] and "compiled decode" in said[0][1]
    assert "mla_decode" not in said[1][0] and "compiled" not in said[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fails", "is killed"])
def test_a_process_that_ends_early_ends_the_run(
    end: str, tiny_checkpoint: Path, prompt_file: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    port = free_port()
    flags = ("--checkpoint", tiny_checkpoint, "--prompt-ids", prompt_file, "--max-new-tokens", 2000)
    others = flags if end == "is killed" else ("--checkpoint", tmp_path / "nowhere", *flags[2:])
    children = [start(0, port, child_environment, *flags), start(1, port, child_environment, *others)]
    if end == "is killed":
        assert children[0].stderr is not None
        for line in children[0].stderr:
            if "compiled decode" in line:
                break
        children[1].send_signal(signal.SIGKILL)
    said = [child.communicate(timeout=300) for child in children]
    # The other one ends by a step that fails, or is ended by jax, and either says why.
    why = {2: "a step with the other processes failed; has one of them ended?", -signal.SIGABRT: "another task died"}
    assert why[children[0].returncode] in said[0][1], said[0]
    if end == "fails":
        assert children[1].returncode == 2
        error = f"tsmla generate: error: --checkpoint {tmp_path / 'nowhere'}: there is no such directory; nothing is"
        assert said[1][1].splitlines()[-1].startswith(error)


@pytest.mark.slow
def test_processes_with_other_prompts_are_refused(
    tiny_checkpoint: Path, prompt_file: Path, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Their devices would compute with different tokens as if they were the same."""
    port, other = free_port(), tmp_path / "other.json"
    other.write_text(json.dumps([[3, 2, 1], *PROMPTS[1:]]))
    flags = ("--checkpoint", tiny_checkpoint, "--max-new-tokens", 5, "--prompt-ids")
    children = [start(index, port, child_environment, *flags, path) for index, path in enumerate((prompt_file, other))]
    said = [child.communicate(timeout=300) for child in children]
    error = "tsmla generate: error: prompts: process 1 has another value than process 0; legal: the same for all\n"
    # Each says so, unless the other one has ended before its part of the comparison was done.
    assert all(child.returncode for child in children) and any(err.endswith(error) for _, err in said), said


def test_a_failed_process_ends_though_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several does behind `| head`."""

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match=r"^3$"):
        processes.end_at_once(3)


@pytest.mark.parametrize("odd", [None, "seed"])
def test_what_all_processes_must_have(odd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.check_agreement(prompts=PROMPTS, seed=1)

    def gather(own: np.ndarray) -> np.ndarray:
        """The values of three processes; the last one has another seed."""
        every = np.stack([own, own, own])
        every[2, 1, 0] += odd == "seed"
        return every

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    error = "^seed: process 2 has another value than process 0; legal: the same for all$"
    with pytest.raises(ValueError, match=error) if odd else contextlib.nullcontext():
        processes.check_agreement(prompts=PROMPTS, seed=1)


def test_programs_of_other_flags_and_checkpoints_of_other_weights_are_told_apart(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other flags would run other programs together, and those of other weights a mixture of two models."""
    ours = processes.environment()
    with jax.default_matmul_precision("highest"):
        assert processes.environment() != ours
    monkeypatch.setenv("TSMLA_CHECK", "1")
    assert processes.environment() != ours
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    assert loading.sample_checkpoint(other) == loading.sample_checkpoint(tiny_checkpoint)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    assert loading.sample_checkpoint(other) != loading.sample_checkpoint(tiny_checkpoint)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("host:1", None, 0), r"^--coordinator-address and --process-id: needs --num-processes, too$"),
        ((None, 2, None), r"^--num-processes: needs --coordinator-address and --process-id, too$"),
        (("host", 2, 0), r"^coordinator_address = 'host'; legal: HOST:PORT"),
        (("host:1", 0, 0), r"^num_processes = 0; legal: at least 1"),
        (("host:1", 2, 2), r"^process_id = 2; legal: 0 to 1"),
    ],
)
def test_refused_arguments(arguments: tuple[Any, Any, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        processes.join(*arguments)
