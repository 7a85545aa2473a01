"""`tsmla generate`: prompts in, tokens out, and a table of its costs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from tsmla_jax.generate import processes
from tsmla_jax.generate.prompts import Tokenizer, load_tokenizer, read_lines, read_prompt_ids

if TYPE_CHECKING:
    from tsmla_jax.generate.engine import Generation
    from tsmla_jax.generate.plan import Plan

Result = TypeVar("Result")

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
Q_DTYPES = {**DTYPES, "fp8": "float8_e4m3fn"}
CACHE_DTYPES = {**Q_DTYPES, "packed": "packed"}

# The least and the most that a flag may be, checked before the checkpoint is read.
_BOUNDS = {
    "--max-new-tokens": (1, 2**31 - 1),
    "--page-size": (1, 2**20),
    "--cache-pages": (1, 2**31 - 1),
    "--cache-tokens": (1, 2**31 - 1),
    "--max-batch": (1, 1024),
    "--chunk": (1, 2**20),
    "--speculative": (0, 1024),
    "--seed": (0, 2**32 - 1),
    "--data-parallel": (1, 2**16),
    "--expert-parallel": (1, 2**16),
    "--context-parallel": (1, 2**16),
}
# The engine's options that have another name on the command line.
_FLAGS = {"num_pages": "--cache-pages"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tsmla generate`."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="Hugging Face checkpoint directory")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated; needs the package tokenizers"
    )
    prompts.add_argument("--prompt-file", metavar="F", help="one prompt a line; needs the package tokenizers")
    prompts.add_argument("--prompt-ids", metavar="FILE", help="a file with prompts as token ids: a JSON list of lists")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="at most N a prompt (default 64)")
    parser.add_argument("--json", metavar="FILE", help="write the tokens and the figures to FILE")
    parser.add_argument(
        "--speculative",
        type=int,
        default=0,
        metavar="K",
        help="draft up to K tokens of a text in each step from the text's own n-grams (default 0: none)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="with --temperature: sample from the most likely tokens whose probability reaches P (default 1: from all)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with --temperature: the seed of sampling (default 0)")
    parser.add_argument(
        "--page-size", type=int, metavar="Z", help="tokens a page of the cache (default 64; 256 for DeepSeek-V4)"
    )
    parser.add_argument(
        "--widen",
        action="store_true",
        help="widen block-scaled fp8 and MXFP4 weights to --dtype when they are loaded (the default on a CPU)",
    )
    parser.add_argument(
        "--fp8-products",
        choices=("quantized", "exact"),
        help="multiply by block-scaled fp8 weights in block_scaled_matmul: with activations quantized to fp8 for each"
        " 128 columns, as DeepSeek's inference code does, or exact, with activations as they are (default: exact on"
        " Hopper; elsewhere each step widens the weights)",
    )
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-pages", type=int, metavar="P", help="pages of each device's cache (default: as the prompts need)"
    )
    cache.add_argument("--cache-tokens", type=int, metavar="N", help="the same in tokens, rounded up to pages")
    parser.add_argument(
        "--max-batch", type=int, default=32, metavar="B", help="texts that decode together (default 32)"
    )
    parser.add_argument(
        "--chunk", type=int, default=2048, metavar="T", help="most prompt tokens of a prefill step (default 2048)"
    )
    parser.add_argument(
        "--implementation", metavar="NAME", help="cute, xla or reference (default: the best that can run)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the dtype of weights and activations (default: the checkpoint's)"
    )
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="the cache's dtype; packed is the fp8 layout with scales of DeepSeek-V3.2, GLM-5 and V4 (default: packed"
        " for these with weights of bf16 or f16, else as --dtype)",
    )
    parser.add_argument(
        "--q-dtype",
        choices=Q_DTYPES,
        help="the absorbed queries' dtype (default: as --dtype); fp8 goes with a cache of fp8 or packed",
    )
    mesh = parser.add_argument_group("several devices", "their number is the product of the three")
    mesh.add_argument("--data-parallel", type=int, default=1, metavar="N", help="copies of the model (default 1)")
    mesh.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="parts of a copy's devices that have texts of their own; all devices of a copy share its experts"
        " (default 1)",
    )
    mesh.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="devices that the keys of one text are dealt out to (default 1)",
    )
    hosts = parser.add_argument_group("several processes", "each runs this command; jax.distributed's arguments")
    hosts.add_argument("--coordinator-address", metavar="HOST:PORT", help="where process 0 can be reached")
    hosts.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    hosts.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0; process 0 writes")


def run(args: argparse.Namespace) -> int:
    """Runs `tsmla generate`. Returns 0, or 2 after one line on stderr: the input is at fault, a package or memory is
    missing, or logits are not finite. Other errors are raised. With --num-processes no error returns or is raised:
    after that line, or a traceback, this process ends at once, and jax ends the others."""
    if args.num_processes is None:
        return _run(args)
    try:
        status = _run(args)
    except Exception as error:
        status = 1
        if _is_of_jax(error):
            # Most likely a collective whose other end is gone.
            status = _fail(f"a step with the other processes failed; has one of them ended? {error}")
        else:
            traceback.print_exc()
    if status:
        processes.end_at_once(status)
    return status


def _run(args: argparse.Namespace) -> int:
    try:
        _generate(args)
    except BrokenPipeError:
        raise
    except (ValueError, NotImplementedError, ImportError, OSError, FloatingPointError) as error:
        return _fail(str(error))
    except Exception as error:
        if _is_of_jax(error) and "RESOURCE_EXHAUSTED" in str(error):
            return _fail(str(error))
        raise
    return 0


def _is_of_jax(error: Exception) -> bool:
    """Whether the error comes from a program that jax runs. The name of its class says so."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")


def _fail(message: str) -> int:
    print("tsmla generate: error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _generate(args: argparse.Namespace) -> None:
    if max(args.expert_parallel, args.context_parallel) > 1 and args.num_processes is None:
        put_collectives_in_graphs()
    _in_flags(processes.join, args.coordinator_address, args.num_processes, args.process_id)
    import jax

    from tsmla_jax.generate.caches import cache_bytes, default_page_size
    from tsmla_jax.generate.config import ModelConfig
    from tsmla_jax.generate.engine import Engine
    from tsmla_jax.generate.loading import load_model, sample_checkpoint
    from tsmla_jax.generate.pages import pages_for
    from tsmla_jax.generate.plan import EngineOptions, make_plan

    checkpoint = Path(args.checkpoint)
    if not checkpoint.is_dir():
        missing = "there is no such directory; nothing is downloaded (hf download NAME --local-dir DIR does that)"
        why = "a file; legal: the directory that holds it" if checkpoint.exists() else missing
        raise ValueError(f"--checkpoint {checkpoint}: {why}")
    _check_bounds(args)
    config = ModelConfig.from_hf(checkpoint)
    num_pages = args.cache_pages
    if args.cache_tokens is not None:
        num_pages = pages_for(args.cache_tokens, args.page_size or default_page_size(config))
    options = _in_flags(
        EngineOptions,
        page_size=args.page_size,
        num_pages=num_pages,
        max_batch=args.max_batch,
        chunk=args.chunk,
        speculative=args.speculative,
        temperature=args.temperature,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.seed or 0,
        cache_dtype=CACHE_DTYPES.get(args.cache_dtype),
        q_dtype=Q_DTYPES.get(args.q_dtype),
        implementation=args.implementation,
        data_parallel=args.data_parallel,
        expert_parallel=args.expert_parallel,
        context_parallel=args.context_parallel,
    )
    _check_sampling(args)
    tokenizer = None if args.prompt_ids is not None else load_tokenizer(checkpoint)
    if tokenizer:
        lines = args.prompt or read_lines(Path(args.prompt_file))
        prompts = [tokenizer.encode(line) for line in lines]
    else:
        lines, prompts = [], read_prompt_ids(Path(args.prompt_ids))
    if args.json is not None:
        _check_writable(Path(args.json))
    # The prompts are checked before the weights are read, which may take minutes.
    dtype = DTYPES.get(args.dtype, config.dtype)
    plan = _in_flags(make_plan, config, options, prompts, args.max_new_tokens, dtype)
    _check_memory(cache_bytes(config, plan.layout).total * plan.mesh.size // jax.process_count())

    same = {"config": config, "options": options, "prompts": prompts, "max_new_tokens": args.max_new_tokens}
    if jax.process_count() > 1:
        same |= {"checkpoint": sample_checkpoint(checkpoint), **processes.environment()}
    processes.check_agreement(**same, dtype=plan.dtype, widen=args.widen, fp8_products=args.fp8_products)

    keep_compiled_programs()
    writes = jax.process_index() == 0
    begin = time.perf_counter()
    params = load_model(
        checkpoint,
        config,
        dtype=plan.dtype,
        keep_fp8=False if args.widen else None,
        fp8_products=args.fp8_products,
        mesh=options.mesh,
        progress=writes,
    )
    load_seconds = time.perf_counter() - begin
    stream = Stream(sys.stdout, lines, tokenizer, len(prompts)) if writes else None
    engine = Engine(params, config, options, _say_compiling if writes else None)
    try:
        result = engine.generate(prompts, args.max_new_tokens, stream)
    finally:
        if stream:
            stream.end_line()
    if not writes:
        return
    record = _record(result, plan, load_seconds) | {"cache_dtype_by_default": options.cache_dtype is None}
    print("\n" + table(record), flush=True)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _record(result: Generation, plan: Plan, load_seconds: float) -> dict[str, Any]:
    """The record of a run: --json writes it, and the closing table shows most of it."""
    return {
        "tokens": result.tokens,
        **dataclasses.asdict(result.figures),
        "prefill_tokens_per_second": result.figures.prefill_tokens_per_second,
        "decode_tokens_per_second": result.figures.decode_tokens_per_second,
        "acceptance": result.figures.acceptance,
        "load_seconds": load_seconds,
        "implementation": {choice.op: choice.implementation for choice in result.choices},
        "why": {choice.op: choice.why for choice in result.choices},
        "dtype": plan.dtype,
        "cache_dtype": plan.layout.dtype,
        "q_dtype": plan.q_dtype,
        "mesh": dataclasses.asdict(plan.mesh),
    }


def _check_bounds(args: argparse.Namespace) -> None:
    """Raises ValueError if a flag's number is outside its bounds."""
    for flag, (least, most) in _BOUNDS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and not least <= value <= most:
            raise ValueError(f"{flag} {value}; legal: {least} to {most}")


def _check_sampling(args: argparse.Namespace) -> None:
    """Raises ValueError if greedy decoding would ignore a flag, or if a --prompt is empty."""
    for flag, value in (("--top-p", args.top_p), ("--seed", args.seed)):
        if value is not None and args.temperature == 0:
            raise ValueError(f"{flag} {value}: tokens are chosen greedily; legal: with a --temperature above 0")
    if args.prompt is not None and "" in args.prompt:
        raise ValueError("--prompt '': got an empty text; legal: a text")


def _in_flags(make: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """The result of make(*args, **kwargs); its errors about an option are raised anew with the name of the flag."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        named = re.match(r"([a-z_]+)( = |: got )", str(error))
        if named is None:
            raise
        flag = _FLAGS.get(named[1], "--" + named[1].replace("_", "-"))
        said = str(error)[named.end() :]
        if named[1].endswith("_parallel"):  # an error about one axis of the mesh may name the others
            said = re.sub(r"\b(data|expert|context)_parallel\b(?: = (\d+)\b(?! devices))?", _parallel_flag, said)
        for short, long in CACHE_DTYPES.items():
            said = re.sub(rf"\b{long}\b", short, said) if named[1] in ("cache_dtype", "q_dtype") else said
        raise ValueError(f"{flag} {said.replace('legal: None, ', 'legal: ').replace(', or None', '')}") from None


def _parallel_flag(named: re.Match[str]) -> str:
    return f"--{named[1]}-parallel" + (f" {named[2]}" if named[2] else "")


def _check_memory(size: int) -> None:
    """Raises ValueError if the caches are larger than the memory of a machine whose CPU runs the model: the system
    would end this process or another. A GPU reports too large caches itself."""
    import jax

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if jax.default_backend() == "cpu" and size > memory:
        raise ValueError(
            f"the caches take {size / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB; --cache-pages,"
            " --cache-tokens, --page-size and --max-batch make them smaller"
        )


def put_collectives_in_graphs() -> None:
    """Tells XLA, before it starts, to run collectives in CUDA graphs too, unless XLA_FLAGS already say what runs in
    them or name a file of flags."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if "--xla_gpu_enable_command_buffer" not in flags and flags[:1] in ("", "-"):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=+COLLECTIVES".strip()


def keep_compiled_programs() -> None:
    """Turns jax's persistent compilation cache on, beside the cache of compiled kernels, unless one is set up already
    (JAX_COMPILATION_CACHE_DIR)."""
    import jax

    from tsmla_kernels import object_cache

    # jax's type annotations lack this attribute.
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009
        with contextlib.suppress(OSError):  # jax will warn
            object_cache.make_directory()
        jax.config.update("jax_compilation_cache_dir", str(object_cache.programs_directory()))


def _say_compiling(step: str, seconds: float | None) -> None:
    """Says on stderr that a step is being compiled or, with seconds, that it was. It does so also if stderr is no
    terminal, because a log is read later."""
    took = "" if seconds is None else f": {seconds:.1f} s"
    print(f"{'compiling' if seconds is None else 'compiled'} {step}{took}", file=sys.stderr, flush=True)


def _check_writable(path: Path) -> None:
    """Raises ValueError, before the run, if the run's record could not be written."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--json {path}: there is no such directory")
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"--json {path}: can't be written: {error.strerror}") from None


class Stream:
    """Writes texts as they grow, in the order of the prompts. Several texts grow at once and a terminal has one cursor:
    the first unfinished text is written live; each later one waits until those before it are done."""

    def __init__(self, out: TextIO, lines: Sequence[str], tokenizer: Tokenizer | None, count: int) -> None:
        """
        Args:
          out: the file or terminal to write to.
          lines: the prompts as text; empty for prompts of ids.
          tokenizer: turns tokens into text; None writes their ids.
          count: the number of prompts.
        """
        self._out, self._lines, self._tokenizer = out, lines, tokenizer
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._current, self._written = 0, -1

    def __call__(self, index: int, tokens: list[int], done: bool) -> None:
        """Takes new tokens of prompt `index`."""
        self._tokens[index] += tokens
        self._done[index] |= done
        while self._current < len(self._tokens) and (index == self._current or self._done[self._current]):
            self._write(self._current, self._done[self._current])
            if not self._done[self._current]:
                return
            self._current, self._written = self._current + 1, -1
            index = self._current
        self._out.flush()

    def end_line(self) -> None:
        """Ends the line of a text that will not be finished, so that an error message gets a line of its own."""
        if self._written >= 0:
            self._written = -1
            self._out.write("\n")
            self._out.flush()

    def _write(self, index: int, done: bool) -> None:
        if self._written < 0:
            self._out.write(
                f"[{index}] {self._lines[index] if self._lines else ''}".rstrip(" ") + ("" if self._lines else " ")
            )
            self._written = 0
        text = self._text(self._tokens[index])
        # A character of several bytes may still lack some: they decode to U+FFFD until the rest has come.
        ready = text if done else text.rstrip("\ufffd")
        self._out.write(ready[self._written :] + ("\n" if done else ""))
        self._written = max(self._written, len(ready))
        self._out.flush()

    def _text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer:
            return self._tokenizer.decode(tokens)
        return "".join(f"{token} " for token in tokens)


def table(record: dict[str, Any]) -> str:
    """The closing table of a run."""

    def rate(tokens: int, seconds: float, per_second: float) -> str:
        return f"{tokens} tokens in {seconds:.2f} s = {per_second:.1f} tokens/s"

    per_text = f" and {record['cache_bytes_per_text']} bytes/text" if record["cache_bytes_per_text"] else ""
    cache = record["cache_dtype"]
    if record["cache_dtype_by_default"] and cache == CACHE_DTYPES["packed"]:
        short = next(short for short, long in DTYPES.items() if long == record["dtype"])
        cache += f" by default; --cache-dtype {short} rounds no key"
    rows = [
        ("prefill", rate(record["prompt_tokens"], record["prefill_seconds"], record["prefill_tokens_per_second"])),
        ("decode", rate(record["decoded_tokens"], record["decode_seconds"], record["decode_tokens_per_second"])),
        ("setup", f"load {record['load_seconds']:.2f} s, compile {record['compile_seconds']:.2f} s"),
        ("mesh", " x ".join(f"{axis} {size}" for axis, size in record["mesh"].items())),
        ("weights", f"{record['weight_bytes'] / 1e6:.1f} MB ({record['dtype']})"),
        ("queries", record["q_dtype"]),
        (
            "cache",
            f"{record['cache_bytes_per_token']} bytes/token{per_text} ({cache}), "
            f"{record['cache_bytes'] / 1e6:.1f} MB in {record['cache_pages']} pages of {record['page_size']}, "
            f"at most {record['peak_pages']} in use",
        ),
    ]
    if record["acceptance"] is not None:
        accepted, drafted = record["accepted_tokens"], record["drafted_tokens"]
        rows.append(("speculative", f"{accepted} of {drafted} drafted tokens accepted = {record['acceptance']:.1%}"))
    said: dict[str, str] = {}
    for op, implementation in record["implementation"].items():
        why = record["why"][op]
        first = said.setdefault(why, op)
        # A long reason often holds for several operations; it is given once, and later rows refer to the first.
        rows.append((op, f"{implementation} ({why if first == op or len(why) < 40 else f'as {first}'})"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
