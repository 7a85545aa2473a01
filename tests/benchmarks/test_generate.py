"""examples/whole_models on a CPU: tiny models, and a stand-in for vLLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples import make_checkpoint
from tsmla_jax.generate import ModelConfig, load_model

pytest.importorskip("absl", reason="the benchmarks' flags")
from examples.whole_models import models, random_checkpoint, random_model

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "vocab_size": 97, "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

OF_MODEL = {
    "v2-lite": {},
    "v3-slice": {"q_lora_rank": 128, "n_group": 2, "topk_group": 1},
    "v3.2-slice": {"q_lora_rank": 128, "n_group": 2, "topk_group": 1, "index_n_heads": 4, "index_topk": 32},
    "glm-5-slice": {"q_lora_rank": 128, "index_n_heads": 4, "index_topk": 32},
    "glm-5.2-slice": {"num_hidden_layers": 3, "q_lora_rank": 128, "index_n_heads": 4, "index_topk": 32},
    "v4-slice": {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64,
        "index_n_heads": 4, "index_topk": 16,
    },
}  # fmt: skip

QUICK = {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

# What a program runs before its main: tiny models, and short texts.
PATCH = f"""
import sys
from examples.whole_models import models
for name, fields in models.MODELS.items():
    fields.update({TINY!r} | {OF_MODEL!r}[name[0]])
"""


def run(program: str, arguments: list[Any], path: str = "", devices: int = 1, **patches: int) -> str:
    """The output of a program of the benchmarks whose module has these values, on `devices` CPU devices."""
    code = PATCH + f"from examples.whole_models import {program} as program\nfrom absl import app\n"
    code += "".join(f"program.{name} = {value}\n" for name, value in patches.items())
    code += f"sys.argv = [{program + '.py'!r}, *sys.argv[1:]]\napp.run(program.main)\n"
    quick = {**QUICK, "XLA_FLAGS": f"{QUICK['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"}
    paths = ":".join([path, *(str(ROOT / folder) for folder in ("", "kernels", "bridge"))]).strip(":")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", **quick},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("model", [("v2-lite", "fp8"), ("v3-slice", "bf16")])
def test_checkpoints_of_random_weights(model: tuple[str, str], tmp_path: Path) -> None:
    fields = models.MODELS[model] | TINY | OF_MODEL[model[0]]
    config, narrow = ModelConfig.from_hf(fields), model[1] == "fp8"
    for directory in (tmp_path / "a", tmp_path / "b"):
        random_checkpoint.write_checkpoint(directory, fields)
    params = load_model(tmp_path / "a", config, keep_fp8=narrow)
    # The parameters that the benchmark makes on the device have the same shapes and dtypes.
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), random_model.shapes(config, narrow))
    for left, right in zip(*(jax.tree.leaves(load_model(tmp_path / x, config)) for x in "ab"), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    wide = load_model(tmp_path / "a", config, dtype="float32", keep_fp8=False)
    experts = np.asarray(wide["layers"][1]["mlp"]["gate_up"])
    np.testing.assert_allclose(experts.std() * fields["hidden_size"] ** 0.5, 1, atol=0.02)
    assert not np.array_equal(np.sort(experts[0, 0]), np.sort(experts[1, 0]))


@pytest.mark.parametrize("model", ["v3.2", "v4"])
def test_random_parameters_are_shaped_as_loaded_ones(model: str, tmp_path: Path) -> None:
    """Of the models with sparse attention; and are finite, matrices of the variance of their inputs."""
    make_checkpoint.make_checkpoint(tmp_path, model=model, fp8=model == "v3.2")
    config = ModelConfig.from_hf(tmp_path)
    params = load_model(tmp_path, config, keep_fp8=True)
    shapes = random_model.shapes(config, model == "v3.2")
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == described
    made = random_model.random_params(config, shapes, None)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == described
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        values = np.asarray(leaf, np.float32)
        assert np.isfinite(values).all()
        if values.ndim == 2 and leaf.dtype == np.dtype("bfloat16"):
            np.testing.assert_allclose(values.std() * values.shape[-1] ** 0.5, 1, atol=0.1, err_msg=str(path))


@pytest.mark.slow
def test_a_record_of_sparse_models(tmp_path: Path) -> None:
    slices = ("v3.2-slice", "glm-5.2-slice", "v4-slice")
    points = "/".join(f"{model},fp8,{what}" for model in slices for what in ("2", "prompt300"))
    arguments = ["--context", 200, "--chunk", 128, "--points", points, "--out", tmp_path / "out.json"]
    run("generate", arguments, STEPS=6)
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["mode"], row["b"], row["context"]) for row in rows] == [
        ("v3.2-slice fp8 decode", 2, 200), ("v3.2-slice fp8 prompt", 1, 300),
        ("glm-5.2-slice fp8 decode", 2, 200), ("glm-5.2-slice fp8 prompt", 1, 300),
        ("v4-slice fp8 decode", 2, 200), ("v4-slice fp8 prompt", 1, 300),
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in rows)


@pytest.mark.slow
def test_a_record_of_checkpoints(tmp_path: Path) -> None:
    """The same weights give the same tokens again."""
    common, sizes = ["--checkpoints", tmp_path, "--chunk", 64, "--context", 64], {"STEPS": 6}
    points = ["v2-lite,bf16,4", "v2-lite,bf16,4/v2-lite,bf16,prefill/v2-lite,fp8,1"]
    for out, some, more in (("first", points[0], []), ("second", points[1], ["--compare", tmp_path / "first"])):
        run("generate", [*common, "--points", some, "--out", tmp_path / out, *more], **sizes)
    rows = json.loads((tmp_path / "second").read_text())
    assert [row["mode"] for row in rows] == ["v2-lite decode", "v2-lite prefill", "v2-lite fp8 decode"]
    assert [row["b"] for row in rows] == [4, 1, 1] and all(row["peer"] == "tsmla" for row in rows)
    assert all(row["us"] > 0 and row["floor_us"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert [len(row.get("tokens", ())) for row in rows] == [4, 0, 1] and rows[0]["equal_tokens"] == 1
    assert all("--checkpoints WEIGHTS --chunk 64" in row["command"] for row in rows)


@pytest.mark.slow
def test_steps_compile_without_weights(tmp_path: Path) -> None:
    points = "v2-lite,fp8,1/v3-slice,bf16,prefill"
    given = ["--compile_only", "--compilation_cache", tmp_path, "--points", points, "--context", 64]
    said = run("generate", given)
    assert [line.partition(":")[0] for line in said.splitlines()] == ["decode of 1", "prefill of prefill"]
    assert any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "expert", "context"])
def test_steps_of_a_mesh_compile_without_weights(tmp_path: Path, axis: str) -> None:
    """And are those that a run with weights makes: it adds no program of a step to the compilation cache."""
    arguments = ["--compilation_cache", tmp_path, "--points", "v3-slice,bf16,4", f"--{axis}_parallel", 2]
    arguments, sizes = [*arguments, "--context", 64], {"STEPS": 2}
    run("generate", ["--compile_only", *arguments], devices=2, **sizes)
    compiled = {path.name for path in tmp_path.glob("jit_program*")}
    run("generate", [*arguments, "--out", tmp_path / "out.json"], devices=2, **sizes)
    assert compiled and {path.name for path in tmp_path.glob("jit_program*")} == compiled


@pytest.mark.slow
def test_a_record_without_checkpoints(tmp_path: Path) -> None:
    given = ["--points", "v2-lite,bf16,4/v3-slice,fp8,4", "--context", 64, "--out", tmp_path / "out.json"]
    run("generate", given, STEPS=6)
    assert not any("tokens" in row for row in json.loads((tmp_path / "out.json").read_text()))


@pytest.mark.slow
def test_both_products_of_the_same_weights(tmp_path: Path) -> None:
    given = ["--points", "v3-slice,fp8,4", "--context", 64, "--layers", 2, "--out", tmp_path / "out.json"]
    run("generate", [*given, "--fp8_products", "quantized", "--fp8_products", "exact"], STEPS=6)
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["peer"], row["products"]) for row in rows] == [("tsmla", "quantized"), ("tsmla_exact", "exact")]


VLLM = '''
"""A stand-in: every request's tokens are 7, 8, 9, ..."""
import json, sys, types
__version__ = "0.0"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos
        self.count = max_tokens

class Core:
    def get_output(self):
        return types.SimpleNamespace(outputs=[None] * self.batch)

class LLM:
    def __init__(self, **given):
        print("given", json.dumps(given, default=str))
        cache = types.SimpleNamespace(num_gpu_blocks=1000, block_size=given["block_size"])
        config = types.SimpleNamespace(cache_config=cache)
        self.llm_engine = types.SimpleNamespace(engine_core=Core(), vllm_config=config)

    def generate(self, prompts, sampling, use_tqdm):
        core = self.llm_engine.engine_core
        core.batch = len(prompts)
        for _ in range(sampling.count):
            core.get_output()
        tokens = types.SimpleNamespace(token_ids=range(7, 7 + sampling.count))
        return [types.SimpleNamespace(outputs=[tokens]) for _ in prompts]
'''


def test_vllms_rows_compare_with_ours(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    (package / "arg_utils.py").write_text("class EngineArgs:\n    def __init__(self, model): ...\n")
    (package / "__init__.py").touch()
    arguments = ["--points", "2,16/4,16", "--steps", 10, "--runs", 1, "--out", tmp_path / "out.json"]
    said = run("vllm_steps", arguments, path=str(tmp_path))
    given = json.loads(said.partition("given ")[2].splitlines()[0])
    assert given["load_format"] == "dummy" and given["compilation_config"]["mode"] == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {row["peer"] for row in rows} == {"vllm, dummy weights"}

    folder = tmp_path / "checkpoints" / "v2-lite-fp8"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    ours = [{"mode": "v2-lite fp8 decode", "b": 2, "context": 16, "tokens": [[7] * 8, [7, 8, 9, 10, 11, 12, 13, 0]]}]
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    arguments += ["--checkpoints", tmp_path / "checkpoints", "--model", "v2-lite,fp8"]
    arguments += ["--compare", tmp_path / "ours.json"]
    said = run("vllm_steps", arguments, path=str(tmp_path))
    given = json.loads(said.partition("given ")[2].splitlines()[0])
    assert given["load_format"] == "auto" and given["model"] == str(folder)
    first, second, prompts = json.loads((tmp_path / "out.json").read_text())
    assert (first["peer"], first["mode"], first["b"]) == ("vllm", "v2-lite fp8 decode", 2)
    assert first["equal_tokens"] == 0.5 and "equal_tokens" not in second and first["full_steps"] == 9
    assert (prompts["mode"], prompts["b"]) == ("v2-lite fp8 prefill", 256) and prompts["us"] > 0


SGLANG = '''
"""A stand-in: every request's tokens are 7, 8, 9, ..., 3 us of a step are attention."""
import gzip, json, os, pathlib
__version__ = "0.0"

class Engine:
    def __init__(self, **given):
        print("given", json.dumps(given))
        print("plugins", os.environ["PYTHONPATH"].split(":")[0])
        self.folder = None

    def generate(self, *, input_ids, sampling_params):
        self.counts = [each.pop("max_new_tokens") for each in sampling_params]
        assert len(input_ids) == len(self.counts)
        assert all(each == {"temperature": 0.0, "ignore_eos": True} for each in sampling_params)
        return [{"output_ids": range(7, 7 + count)} for count in self.counts]

    def start_profile(self, *, output_dir, **how):
        self.folder = output_dir

    def stop_profile(self):
        event = {"cat": "kernel", "name": "flash_fwd", "dur": 3.0}
        other = {"cat": "kernel", "name": "gemm", "dur": 10.0}
        norm = {"cat": "kernel", "name": "void flashinfer::norm::RMSNormKernel<8u>(", "dur": 5.0}
        trace = {"traceEvents": [event, other, norm, {"cat": "cpu_op", "name": "x"}] * self.counts[0]}
        path = pathlib.Path(self.folder, "a.trace.json.gz")
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))

    def shutdown(self): ...
'''


# It compiles a kernel for each batch of requests; and no GPU is asked for its memory.
COMPILES = """
from examples.whole_models import models
models.used_bytes = lambda: 1
folder = pathlib.Path(__file__).parents[1] / "kernels"
folder.mkdir()
os.environ["TSMLA_CACHE_DIR"] = str(folder)

class Engine(Engine):
    def generate(self, **given):
        (folder / str(len(list(folder.iterdir())))).touch()
        return super().generate(**given)
"""


def test_sglangs_rows(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text(SGLANG)
    arguments = ["--points", "2,16", "--steps", 10, "--runs", 1, "--layers", 3, "--backend", "fa3"]
    arguments += ["--out", tmp_path / "out.json", "--profile", tmp_path]
    said = run("sglang_steps", arguments, path=str(tmp_path))
    given = json.loads(said.partition("given ")[2].splitlines()[0])
    assert (given["attention_backend"], given["kv_cache_dtype"], given["load_format"]) == ("fa3", "auto", "dummy")
    assert json.loads(Path(given["model_path"], "config.json").read_text())["num_hidden_layers"] == 3
    assert said.partition("plugins ")[2].splitlines()[0] == given["model_path"]
    decode, prompts = json.loads((tmp_path / "out.json").read_text())
    assert (decode["peer"], decode["mode"], decode["b"]) == ("sglang, drawn weights", "v2-lite decode", 2)
    assert "us" in decode and decode["tokens"] == [[7, 8, 9, 10, 11, 12, 13, 14]] * 2
    assert (decode["attention_us"], decode["kernels_us"], decode["layers"]) == (3.0, 18.0, 3)
    assert (prompts["mode"], prompts["b"]) == ("v2-lite prefill", 256) and prompts["us"] > 0


def test_sglang_serves(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text(SGLANG + COMPILES)
    arguments = ["--points", "2,16", "--steps", 8, "--runs", 1, "--model", "v3.2-slice,fp8", "--backend", "dsa"]
    arguments += ["--decode", "flashmla_kv", "--out", tmp_path / "out.json", "--serve", 24]
    said = run("sglang_steps", arguments, path=str(tmp_path))
    given = json.loads(said.partition("given ")[2].splitlines()[0])
    assert (given["attention_backend"], given["dsa_decode_backend"]) == ("dsa", "flashmla_kv")
    assert "dsa_prefill_backend" not in given
    served = json.loads((tmp_path / "out.json").read_text())[-1]
    assert (served["mode"], served["b"], served["decode"]) == ("v3.2-slice fp8 serving", 24, "flashmla_kv")
    assert served["compiled"] == {"TSMLA_CACHE_DIR": 2}  # a kernel each time that requests are given
    assert served["used_bytes"] == [1, 1]
