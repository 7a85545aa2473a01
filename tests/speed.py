"""What makes the suite quick and changes no test. tests/conftest.py calls it; TSMLA_PLAIN_TESTS=1 leaves all of it out,
so that a suspect among these can be told from a fault.

Most of the suite's time is XLA compiling some ten thousand programs, most of them small.
"""

import functools
import gc
import io
import os
from typing import Any

import jax
import jaxlib
from jax._src import compiler
from jax._src.interpreters import mlir

PLAIN = bool(os.environ.get("TSMLA_PLAIN_TESTS"))
# Versions that were seen to know the flags, and to make their MLIR contexts by the function that is replaced.
KNOWN = jaxlib.__version__.startswith(("0.9.", "0.10.")) and not PLAIN
MOST_SHARED = 20_000
"""Bytes of a program that compile_once keeps: larger ones have no twin."""
OF_THIS_PROCESS = (b"callback", b"CustomSPMDPartitioning")
_compiled: dict[tuple[Any, ...], Any] = {}
# Less than half of Linux's limit for a process: a module's tests add some thousands.
MOST_MAPPED = 30_000


def compile_quickly() -> None:
    """Before jax's first backend: makes XLA compile, and jax lower, a small program in half the time.

    XLA's older way of emitting fused loops takes half as long as the one through MLIR, and a program in one part less
    than in parts for many cores. XLA ends the process over a flag that it doesn't know. jax lowers each program in an
    MLIR context of its own, and most of a small program's lowering is loading dialects into that: the programs of a
    module share one. tests/test_speed.py notices when jax goes another way."""
    if KNOWN:
        flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def optimise_little() -> None:
    """Before the first program: LLVM optimises little, for toy sizes run for milliseconds and compile for seconds.
    Tests of which bits come out however a program is compiled use optimised_compilation."""
    if not PLAIN:
        jax.config.update("jax_disable_most_optimizations", True)


def compile_once() -> None:
    """Before the first program: a small program is compiled once in a process. The modules have many in common, those
    of single operations above all, and each begins with empty caches of jax's. A program that names what is in this
    process alone, a callback or a way to partition, is its own."""
    if not KNOWN:
        return
    compile_anew = compiler.compile_or_get_cached

    def compile_or_share(
        backend: Any, computation: Any, devices: Any, options: Any, host_callbacks: Any, *others: Any, **named: Any
    ) -> Any:
        text = io.BytesIO()
        computation.operation.write_bytecode(file=text)
        program = text.getvalue()
        given = (backend, computation, devices, options, host_callbacks, *others)
        if host_callbacks or len(program) > MOST_SHARED or any(name in program for name in OF_THIS_PROCESS):
            return compile_anew(*given, **named)
        key = (program, options.SerializeAsString(), *(device.id for device in devices.flat))
        if key not in _compiled:
            _compiled[key] = compile_anew(*given, **named)
        return _compiled[key]

    compiler.compile_or_get_cached = compile_or_share
    # The lines that made an operation would tell apart what is one program.
    jax.config.update("jax_traceback_in_locations_limit", 0)


def share_programs() -> None:
    """Before the first program: if TSMLA_TEST_PROGRAMS names a folder, jax's persistent cache is there. A run that
    finds the programs of an earlier one compiles only what has changed. Without one nothing is written: that takes
    longer than what the processes of one run have in common."""
    if PLAIN or not os.environ.get("TSMLA_TEST_PROGRAMS"):
        return
    # Absolute: some tests change the working directory.
    jax.config.update("jax_compilation_cache_dir", os.path.abspath(os.environ["TSMLA_TEST_PROGRAMS"]))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def forget_programs() -> None:
    """Ends the programs that are loaded: another module's tests trace under other circumstances. Each of XLA's programs
    for a CPU maps pieces of memory: a worker that keeps those of the whole suite meets Linux's limit (vm.max_map_count,
    65,530) and is ended by a signal. Those that compile_once keeps and those in cycles of references go where there are
    many: looking for cycles takes as long as a small module's tests."""
    jax.clear_caches()
    if hasattr(mlir.make_ir_context, "cache_clear"):
        mlir.make_ir_context.cache_clear()
    if PLAIN or _mapped() > MOST_MAPPED:
        _compiled.clear()
        gc.collect()


def _mapped() -> int:
    """The number of this process's pieces of memory; where there is no /proc, as if they were too many."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return MOST_MAPPED + 1


def collect_no_garbage() -> None:
    """Before imports and collection: they make millions of objects that stay, and each garbage collection would look
    at them."""
    if not PLAIN:
        gc.disable()


def collect_garbage_rarely() -> None:
    """After collection: what there is lives until the end. Tracing makes objects by the hundred thousand, which
    reference counts free, all but a few."""
    if not PLAIN:
        gc.collect()
        gc.freeze()
        gc.set_threshold(1_000_000, 20, 20)
        gc.enable()
