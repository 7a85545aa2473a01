"""The `tsmla` command: its exit statuses, its one-line errors, and the doctor's report."""

import email
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from absl.testing import parameterized

from tsmla_bridge import report as torch_report
from tsmla_jax.cli.devices import Devices
from tsmla_jax.ops import device
from tsmla_jax.ops.explain import OPERATIONS
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.cli import command as cli
from tsmla_kernels.cli import doctor, packages

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "bridge"))


def tsmla(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, on the CPU unless `variables` of the environment say otherwise."""
    command = [sys.executable, "-m", "tsmla_kernels.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120, check=False)


def in_process(*arguments: str) -> int:
    return cli.run(cli.parse(["tsmla", *arguments]))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[object], int]], None]:
    """A way to make `tsmla doctor` do something else."""

    def install(action: Callable[[object], int]) -> None:
        actions = cli.Actions(lambda parser: None, action)
        monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command("fake", lambda: actions))

    return install


def raising(error: BaseException) -> Callable[[object], int]:
    def action(arguments: object) -> int:
        raise error

    return action


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    close = " ".join(f"{number}>&-" for number in closed.split())
    environment = os.environ | {"PYTHONPATH": PATHS, "TSMLA_CACHE_DIR": str(tmp_path)}
    command = ["sh", "-c", f'exec "$0" -m tsmla_kernels.cli cache list {close}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout[:9] == ("0 entries" if closed == "2" else "")


def test_help_names_every_command() -> None:
    done = tsmla("--help")
    assert done.returncode == 0 and done.stderr == ""
    for name in ("generate", "doctor", "explain", "compile", "cache"):
        assert f"\n    {name} " in done.stdout


def test_help_imports_neither_the_model_nor_the_kernels() -> None:
    code = "import sys; from tsmla_kernels.cli import command\n"
    code += "try: command.parse(['tsmla', '--help'])\nexcept SystemExit: pass\n"
    code += (
        "print([m for m in ('tsmla_jax.generate', 'tsmla_kernels.cli.objects', 'cutlass', 'jax') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": PATHS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_nothing_asked_prints_the_help() -> None:
    bare, asked = tsmla(), tsmla("--help")
    assert bare.returncode == 0 and bare.stdout == asked.stdout and bare.stderr == ""


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.parse(["tsmla", name, "--help"])
    assert stopped.value.code == 0
    assert cli.COMMANDS[name].summary.split()[0] in capsys.readouterr().out


class Usage(parameterized.TestCase):
    """Command lines that are wrong in themselves."""

    @parameterized.parameters(
        (["dance"], "tsmla: error: COMMAND: got 'dance'; legal: generate, doctor, explain, compile, cache, wheel (see"),
        (["cach"], "COMMAND: got 'cach'; legal: generate, doctor, explain, compile, cache, wheel; did you mean cache?"),
        (["doctor", "--loud"], "tsmla doctor: error: unrecognized arguments: --loud (see tsmla doctor --help)"),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--max_new_tokens", "3"], "did you mean --max-new-tokens?"),
        (["generate", "--max-new-tokens", "ten"], "--max-new-tokens: got 'ten'; legal: an int (see tsmla generate"),
        (["cache", "lst"], "tsmla cache: error: action: got 'lst'; legal: list, verify, prune; did you mean list?"),
        (["compile", "--kernel", "x", "--config", "wide"], "tsmla compile: error: --kernel: got 'x'; legal: "),
        (["--verbosity=loud", "doctor"], "--verbosity"),
    )
    def test_exits_2_with_one_line(self, arguments: list[str], said: str) -> None:
        done = tsmla(*arguments)
        self.assertEqual(done.returncode, 2)
        self.assertIn(said, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(done.stdout, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("q has rank 2;\n legal: 4"), "tsmla doctor: error: q has rank 2; legal: 4"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "No such file or directory: 'x.json'"),
        (NotImplementedError(), "tsmla doctor: error: NotImplementedError"),
        (ModuleNotFoundError("No module named 'flax'", name="flax"), 'pip install "tsmla-jax[flax]"'),
    ],
)
def test_a_users_error_is_one_line(
    fake: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    fake(raising(error))
    assert in_process("doctor") == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_fault_of_ours_keeps_its_traceback(fake: Callable[..., None]) -> None:
    fake(raising(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        in_process("doctor")


def test_a_missing_module_of_ours_is_a_fault_of_ours(fake: Callable[..., None]) -> None:
    fake(raising(ModuleNotFoundError("No module named 'tsmla_jax.gone'", name="tsmla_jax.gone")))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        in_process("doctor")


def test_an_interrupt_has_its_own_status(fake: Callable[..., None]) -> None:
    fake(raising(KeyboardInterrupt()))
    assert in_process("doctor") == 130


INTERRUPTED = """
import os, signal, sys, threading, time
from tsmla_kernels.cli import main
signal.set_wakeup_fd(-1)
threading.Thread(target=lambda: (time.sleep({after}), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
{during}
sys.argv = ["tsmla", *{arguments!r}]
main()
"""


def interrupted(arguments: list[str], after: float, during: str = "", **variables: str) -> tuple[int, str]:
    """The exit status and the errors of the command, to which SIGINT comes after this many seconds."""
    code = INTERRUPTED.format(arguments=arguments, after=after, during=during)
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    return done.returncode, done.stderr


SLOW_DISK = """
import importlib.abc
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        for _ in range(200 if name == "jax" else 0):
            time.sleep(0.01)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("after", [0.2, 0.4, 0.7])
def test_an_interrupt_while_importing_is_one_line(after: float) -> None:
    assert interrupted(["doctor"], after, SLOW_DISK) == (130, "interrupted\n")


def test_an_interrupt_while_stderr_is_elsewhere_is_one_line() -> None:
    """As the compiler has it for moments."""
    elsewhere = "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"
    assert interrupted(["doctor"], 0.4, SLOW_DISK + elsewhere) == (130, "interrupted\n")


@pytest.mark.parametrize(("jobs", "after"), [("1", 3.0), ("2", 4.5)])
def test_an_interrupt_while_compiling_is_one_line(jobs: str, after: float, tmp_path: Path) -> None:
    """In the compiler's C++ frames, or in a process that has started others."""
    pytest.importorskip("cutlass")
    # More than any machine compiles in that time; it may have finished some.
    configs = [f"--config=deepseek-v3,tensor_parallel={devices}" for devices in (1, 2, 4, 8)]
    arguments = ["compile", "--arch", "sm_90a", "--kernel", "mla_decode", *configs, "--jobs", jobs]
    status, said = interrupted(arguments, after, TSMLA_CACHE_DIR=str(tmp_path / "cache"))
    progress = re.compile(r"compiling \d kernels|\[\d/\d\] mla_decode .*")
    assert status == 130 and [line for line in said.splitlines() if not progress.fullmatch(line)] == ["interrupted"]


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m tsmla_kernels.cli doctor | head -c 1"
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("t", "")


def test_doctor_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("doctor") == 0
    said = capsys.readouterr().out
    for line in (
        "  jax, backend ",
        "  jax ",
        "mla_decode, bf16: ",
        "Blackwell (SM100, SM103, SM107): ",
        "--page-size 64",
    ):
        assert line in said
    assert "none of them has run on such a GPU" in said
    assert in_process("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["jax"].count(".") == 2
    assert [engine["engine"] for engine in report["engines"]] == ["vllm", "sglang"]
    assert {operation["op"] for operation in report["operations"]} == set(OPERATIONS)
    for operation in report["operations"]:
        # What was chosen can run; without a GPU that is never a kernel, and it says why.
        assert operation["reasons"][operation["chosen"]] == []
        assert report["driver"] or (operation["chosen"] == "xla" and operation["reasons"]["cute"])


def without_jax(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process that can import no jax."""
    code = f"import sys; sys.modules['jax'] = None; sys.argv = {['tsmla', *arguments]}\n"
    command = [sys.executable, "-c", code + "import tsmla_kernels.cli as cli; cli.main()"]
    environment = os.environ | {"PYTHONPATH": PATHS}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_doctor_without_jax_speaks_of_torch() -> None:
    done = without_jax("doctor")
    assert "tensors on a CPU: the reference, for block_scaled_matmul, " in done.stdout
    assert "jax, backend" not in done.stdout and "and the implementation that runs" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["explain"], 2, 'tsmla explain: error: tsmla_jax needs jax: pip install "tsmla-jax[jax]"'),
        (["generate", "--prompt", "x"], 2, 'tsmla generate: error: tsmla_jax needs jax: pip install "tsmla-jax[jax]"'),
        (["cache", "list"], 0, ""),
    ],
)
def test_without_jax_a_subcommand_says_what_to_install(arguments: list[str], status: int, said: str) -> None:
    done = without_jax(*arguments)
    assert (done.returncode, done.stderr.startswith(said)) == (status, True) and done.stderr.count("\n") == bool(status)


def test_doctor_says_why_nothing_is_kept(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert in_process("doctor") == 0
        return capsys.readouterr().out

    assert f"Cache of compiled kernels\n  {cache_directory}\n\n" in said()
    cache_directory.mkdir(exist_ok=True)
    cache_directory.chmod(0o775)
    assert "each process compiles again what it can't load: " in (text := said()) and "may be written by others" in text
    cache_directory.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"{cache_directory} can't be written; TSMLA_CACHE_DIR names another" in said()
    assert in_process("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cache"]["directory"] == str(cache_directory)


def test_doctor_gives_each_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("doctor") == 0
    reasons = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    not ")]
    assert reasons and len(reasons) == len(set(reasons))


COMPRESS = ["kv_score=f32[512,2,1024]", "ape=f32[4,1024]", "state_slots=i32[8]", "seq_lens=i32[8]",
            "cu_seqlens_q=i32[9]", "ratio=4", "overlap=true"]  # fmt: skip
DECODE = ["kv_cache=bf16[9,64,576]", "block_tables=i32[2,4]", "seq_lens=i32[2]"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("explain") == 0
    everything = capsys.readouterr().out
    assert all(f"{name}, " in everything for name in OPERATIONS)
    assert in_process("explain", "mla_decode") == 0
    said = capsys.readouterr().out
    assert "mla_decode, bf16: xla\n  not cute: " in said and "mla_prefill" not in said
    call = ["q=bf16[2,1,16,576]", "kv_cache=bf16[9,64,576]", "block_tables=i32[2,4]", "seq_lens=i32[2]"]
    assert in_process("explain", "mla_decode", *call, "softmax_scale=0.1", "causal=False") == 0
    said = capsys.readouterr().out
    assert "mla_decode: xla runs this call" in said
    assert jax.default_backend() == "gpu" or said.endswith("--arch sm_90a answers for a GPU that is not here\n")
    assert in_process("explain", "--arch", "sm_90a", "mla_decode", *call, "softmax_scale=0.1") == 0
    assert capsys.readouterr().out.startswith("mla_decode: cute runs this call\n  cute: can run\n")
    assert in_process("explain", "--arch", "sm_100a", "merge_attention_states") == 0
    assert "not cute: the kernel is untested on sm_100a" in capsys.readouterr().out
    assert in_process("explain", "--arch", "sm_107a", "indexer_logits") == 0  # no advice to name what can't run
    said = capsys.readouterr().out
    assert "indexer_logits is written for sm_90a" in said and "use it anyway" not in said
    assert device.target_arch() != "sm_100a"


def test_explain_takes_several_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["outs=bf16[64,128,512],bf16[64,128,512]", "lses=f32[64,128],f32[64,128]"]
    assert in_process("explain", "merge_attention_states", *parts) == 0
    assert in_process("explain", "compress_kv", *COMPRESS, "state=f32[8,8,2,1024],i32[8,8]") == 0
    assert "\ncompress_kv: xla runs this call\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention"], "OP: got 'attention'; legal: mla_decode"),
        (["mla_decode", "q"], "got 'q'; legal: NAME=VALUE"),
        (["mla_decode", "q=int4[2]"], "q: got dtype 'int4'; legal: bf16"),
        (
            ["mla_decode", "q=bf16[2,1,16,576]"],
            "mla_decode needs kv_cache, block_tables, seq_lens, softmax_scale, too; legal: NAME=VALUE for each of them",
        ),
        (["mla_decode", "query=bf16[2]"], "query: mla_decode has no such argument; legal: q, kv_cache, "),
        (["mla_decode", "q=bf16[2]", "q=bf16[3]"], "q: got bf16[2] and bf16[3]; legal: one of them"),
        (
            ["mla_decode", "q=bf16[-2,1,16,576]", *DECODE, "softmax_scale=1"],
            "q: got shape [-2,1,16,576]; legal: sizes with commas between them, as in [8,1,128,576]",
        ),
        (["mla_decode", "q=8", *DECODE, "softmax_scale=1"], "q: got 8; legal: a dtype and a shape, as in bf16[8,1,"),
        (
            ["mla_decode", "q=bf16[2,1,16,576]", *DECODE, "softmax_scale=1", "causal=maybe"],
            "causal: got maybe; legal: True or False\n",
        ),
        (
            ["mla_decode", "q=bf16[2,1,16,576]", *DECODE, "softmax_scale=x"],
            "softmax_scale: got x; legal: a float or a scalar array, f32[]\n",
        ),
        (["mla_decode", "q=bf16[2,1,16,576]", *DECODE, "softmax_scale=0"], "softmax_scale: got 0; legal: a positive"),
        (["select_topk", "logits=f32[2,9]", "seq_lens=i32[2]", "k=x"], "k: got x; legal: a static int >= 1\n"),
        (
            ["compress_kv", *COMPRESS, "state=f32[8,8,2,1024]"],
            "state: got f32[8,8,2,1024]; legal: the arrays kv_score and positions, as in state=f32[8,8,2,1024],i32[",
        ),
        (["mla_decode", "--arch", "sm_80"], "--arch: got 'sm_80'; legal: sm_90a, sm_100a, sm_103a, sm_107a, sm_120a"),
    ],
)
def test_explain_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("explain", *arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("tsmla explain: error: ") and said in errors and errors.count("\n") == 1


def test_explain_names_the_unproven_kernels_of_blackwell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "why_not_made", lambda kernel, config: [])
    assert in_process("explain", "--arch", "sm_100a") == 0
    lines = capsys.readouterr().out.splitlines()
    for op in (
        "mla_decode, fp8",
        "sparse_mla",
        "indexer_logits",
        "indexer_topk",
        "select_topk",
        "write_kv_cache, bf16",
    ):
        line = next(line for line in lines if line.startswith(op))
        assert line.endswith(": xla; cute if it is named (untested on such a GPU)")
    assert next(line for line in lines if line.startswith("compress_kv")).endswith(": xla")


def test_doctor_outlives_a_jax_that_starts_no_backend() -> None:
    done = tsmla("doctor", JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "  jax, backend none" in done.stdout
    assert "jax starts no backend: " in done.stdout and "(JAX_PLATFORMS=cuda)" in done.stdout


GPU = Devices("gpu", ("gpu:0  NVIDIA H200  sm_90",), True, None)
CPU = Devices("cpu", ("cpu:0  cpu",), False, None)
BROKEN = Devices(None, (), False, "no such backend")
TORCH = torch_report.Torch((), None, ("mla_decode",))
TORCH_ON_GPU = torch_report.Torch((torch_report.GPU("NVIDIA H200", "sm_90"),), None, ("mla_decode",))
EVERYTHING: dict[str, str | None] = {package.distribution: "1.0" for package in packages.PACKAGES}


def test_doctor_advises_nothing_where_all_is_there() -> None:
    assert doctor.advise(EVERYTHING, "580.65.06", GPU, None) == ()
    assert doctor.advise(EVERYTHING | {"jax": None, "flax": None}, "580.65.06", None, TORCH_ON_GPU) == ()


def test_doctor_names_the_kernels_for_blackwell() -> None:
    said = doctor._architectures()["Blackwell (SM100, SM103, SM107)"]
    for kernel in KERNELS.values():
        assert ("sm_100a" not in kernel.archs) or kernel.name.removesuffix("_sm100") in said
    assert "none of them has run on such a GPU" in said
    for arch, selected in (("sm_100", True), ("sm_107", False)):
        report = torch_report.Torch((torch_report.GPU("NVIDIA B200", arch),), None, ())
        line = next(line for line in torch_report.lines_of(report) if "B200" in line)
        assert "have not run on such a GPU, only where implementation='cute' names them" in line
        assert all(name in line for name in ("mla_decode", "mla_prefill_kv", "select_topk"))
        assert all((name in line) == selected for name in ("sparse_mla", "indexer_logits", "indexer_topk"))


def test_doctor_says_which_operations_have_no_kernel() -> None:
    gpus = [
        torch_report.GPU(name, arch) for name, arch in (("H200", "sm_90"), ("RTX 5090", "sm_120"), ("A100", "sm_80"))
    ]
    _, hopper, small, older = torch_report.lines_of(torch_report.Torch(tuple(gpus), None, ()))
    assert hopper.endswith("sm_90: kernels, for all but indexer_loss, indexer_selected_logits")
    assert "only where implementation='cute' names them: compress_write_kv_cache, gather_kv_cache" in small
    assert "mla_decode" not in small and "other packages" not in small
    assert older.endswith("sm_80: no kernel is written for it")


@pytest.mark.parametrize(
    ("absent", "driver", "jax", "torch", "said"),
    [
        ("jax-cuda13-plugin", "580.65.06", CPU, None, 'jax can\'t use it: pip install "tsmla-jax[cuda13]"'),
        ("jax-cuda12-plugin", "535.1", CPU, None, 'jax can\'t use it: pip install "tsmla-jax[cuda12]"'),
        (None, "580.65.06", CPU, None, "see JAX_PLATFORMS"),
        (None, None, CPU, None, "need a Hopper or Blackwell GPU"),
        (None, "580.65.06", BROKEN, None, "jax starts no backend: no such backend"),
        ("flax", "580.65.06", GPU, None, 'MLAttention): pip install "tsmla-jax[flax]"'),
        (None, "580.65.06", None, TORCH, "torch uses no GPU"),
        (None, "580.65.06", None, torch_report.Torch((), "libcuda.so", ()), "torch can't be imported: libcuda.so"),
        ("nvidia-cutlass-dsl", "580.65.06", None, TORCH_ON_GPU, '"cute"): pip install "tsmla-jax[torch]"'),
        (
            "torch",
            "580.65.06",
            None,
            None,
            'pip install "tsmla-jax[cuda13]" for jax, pip install "tsmla-jax[torch]" for',
        ),
    ],
)
def test_doctor_advises_what_is_missing(
    absent: str | None, driver: str | None, jax: Devices | None, torch: torch_report.Torch | None, said: str
) -> None:
    installed = EVERYTHING | ({absent: None} if absent else {})
    assert said in doctor.advise(installed, driver, jax, torch)[0]


def test_doctor_warns_of_the_former_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version_of", lambda name: "0.2.0" if name == "tsmla-torch" else None)
    said = doctor.advise(EVERYTHING, "580.65.06", GPU, None)[0]
    assert said.startswith("tsmla-torch 0.2.0 is installed beside tsmla-jax") and "pip uninstall tsmla-torch" in said


def test_doctor_says_where_else_it_can_be_installed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = email.message_from_string("Project-URL: Repository, https://example.org/tsmla\n")
    monkeypatch.setattr(packages.importlib.metadata, "metadata", lambda name: metadata)
    assert packages.repository() == "https://example.org/tsmla"
    metadata.replace_header("Project-URL", "Repository, https://tsmla-jax.invalid/tsmla")
    assert packages.repository() is None
