"""The example's backend under sglang-jax's own pools, batches, layers, runner and scheduler. Run by test_sglang_jax.py
in a process of its own. Nothing is stood in for: what its modules import of TPU kernels also imports on a CPU."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.managers import tp_worker
from sgl_jax.srt.managers.communication import QueueBackend
from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.memory_pool import MemoryPools
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.sampling.sampling_params import SamplingParams
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.srt.utils.mesh_utils import create_device_mesh

from examples import make_checkpoint
from examples.sglang_jax import tsmla_backend
from examples.sglang_jax.tsmla_backend import TsmlaMLABackend, TsmlaMLATokenToKVPool, TsmlaModelRunner
from tests.oracles import attention as oracle
from tsmla_jax import generate

HEADS, LATENT, ROPE, PAGE, PAGES, CONTEXT = 4, 256, 64, 16, 24, 48
SCALE = 0.2


class Requests(NamedTuple):
    """A data-parallel rank's requests: their new tokens, and their keys with these."""

    new: list[int]
    lens: list[int]


class Case(NamedTuple):
    """A step of every rank's requests, and float64's answer to it."""

    batch: ModelWorkerBatch
    pool: TsmlaMLATokenToKVPool
    arrays: dict[str, np.ndarray]  # q, q_rope, latent, k_rope: rows of all ranks
    cache: np.ndarray  # what the pool must hold afterwards, [P, Z, L + R]
    out: np.ndarray


def mesh_of(data: int, tensor: int) -> jax.sharding.Mesh:
    devices = list(range(data * tensor))
    return create_device_mesh([data, tensor], [1, 1], device_indexes=devices)


def make_case(mode: ForwardMode, ranks: list[Requests], mesh: jax.sharding.Mesh, dtype: Any) -> Case:
    """Pages in no order, unused slots NaN, and each rank's requests and tokens padded to the same number."""
    rng = np.random.default_rng(0)
    decode, dp = mode == ForwardMode.DECODE, len(ranks)
    batch = max(len(requests.lens) for requests in ranks) + 1
    tokens = batch if decode else max(sum(requests.new) for requests in ranks) + 3
    arrays = {
        name: np.asarray(jnp.asarray(rng.standard_normal((dp * tokens, *shape)), dtype), np.float64)
        for name, shape in (
            ("q", (HEADS, LATENT)), ("q_rope", (HEADS, ROPE)), ("latent", (1, LATENT)), ("k_rope", (1, ROPE))
        )
    }  # fmt: skip
    pool = TsmlaMLATokenToKVPool(dp * PAGES * PAGE, PAGE, dtype, LATENT, ROPE, layer_num=1, mesh=mesh, dp_size=dp)
    before = np.full((dp, PAGES + 1, PAGE, LATENT + ROPE), np.nan)
    metadata = {name: np.zeros((dp, batch), np.int32) for name in ("lens", "new")}
    slots = np.full((dp, tokens), -1, np.int32)
    cache_loc = rng.integers(0, PAGES * PAGE, (dp, batch * (CONTEXT // PAGE) * PAGE)).astype(np.int32)
    after, out = before.copy(), np.zeros((dp, tokens, HEADS, LATENT))
    for rank, requests in enumerate(ranks):
        pages, row, at = iter(rng.permutation(np.arange(1, PAGES + 1))), 0, 0
        tables = np.zeros((len(requests.lens), CONTEXT // PAGE), np.int32)
        for r, (new, length) in enumerate(zip(*requests, strict=True)):
            metadata["new"][rank, r], metadata["lens"][rank, r] = new, length
            used = [next(pages) for _ in range(-(-length // PAGE))]
            tables[r, : len(used)] = used
            where = (np.asarray(used)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
            cache_loc[rank, at : at + len(where)] = where
            slots[rank, row : row + new] = where[length - new : length]
            known = np.asarray(jnp.asarray(rng.standard_normal((length - new, LATENT + ROPE)), dtype), np.float64)
            for cache in (before, after):
                cache[rank].reshape(-1, LATENT + ROPE)[where[: length - new]] = known
            rows = slice(rank * tokens + row, rank * tokens + row + new)
            keys = np.concatenate([arrays["latent"][rows, 0], arrays["k_rope"][rows, 0]], -1)
            after[rank].reshape(-1, LATENT + ROPE)[where[length - new : length]] = keys
            row, at = row + new, at + len(where)
        q = np.concatenate([arrays["q"], arrays["q_rope"]], -1)[rank * tokens : rank * tokens + row]
        starts = np.concatenate([[0], np.cumsum(requests.new)])
        out[rank, :row], _ = oracle.batched_decode(
            q, after[rank], tables, requests.lens, scale=SCALE, latent_dim=LATENT, cu_seqlens_q=starts
        )
    pool.replace_buffer([jax.device_put(jnp.asarray(before.reshape(-1, PAGE, LATENT + ROPE), dtype), pool.kv_sharding)])
    flat = {name: value.reshape(-1) for name, value in metadata.items()}
    worker_batch = ModelWorkerBatch(
        bid=1, forward_mode=mode, input_ids=np.zeros(dp * tokens, np.int32), real_input_ids_len=dp * tokens,
        seq_lens=flat["lens"], out_cache_loc=slots.reshape(-1), req_pool_indices=np.arange(dp * batch, dtype=np.int32),
        sampling_info=None, positions=np.zeros(dp * tokens, np.int32), cache_loc=cache_loc.reshape(-1),
        extend_seq_lens=None if decode else flat["new"],
        extend_prefix_lens=None if decode else flat["lens"] - flat["new"], return_logprob=False,
        return_output_logprob_only=False, top_logprobs_nums=None, token_ids_logprobs=None,
        extend_logprob_start_lens=None, extend_input_logprob_token_ids=None, logits_indices=None,
        real_bs=dp * batch, real_bs_per_dp=[batch] * dp, dp_size=dp, per_dp_bs_size=batch, spec_info_padded=None,
    )  # fmt: skip
    return Case(worker_batch, pool, arrays, after.reshape(-1, PAGE, LATENT + ROPE), out.reshape(-1, HEADS, LATENT))


def placed(case: Case, mesh: jax.sharding.Mesh, dtype: str) -> list[jax.Array]:
    """q, q_rope, latent and k_rope, as the model's projections leave them on the mesh."""
    heads, rows = NamedSharding(mesh, P("data", "tensor", None)), NamedSharding(mesh, P("data", None, None))
    return [
        jax.device_put(jnp.asarray(value, dtype), heads if name.startswith("q") else rows)
        for name, value in case.arrays.items()
    ]


def make_backend(mesh: jax.sharding.Mesh, implementation: str | None = None) -> TsmlaMLABackend:
    return TsmlaMLABackend(
        max_request_len=CONTEXT, implementation=implementation, num_attn_heads=HEADS, kv_lora_rank=LATENT,
        qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128, page_size=PAGE, mesh=mesh,
    )  # fmt: skip


def make_layer(**other: Any) -> RadixAttention:
    return RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, layer_id=0, v_head_dim=LATENT, **other)


class Step(NamedTuple):
    """A layer's call as the runner's compiled step makes it, and its operands."""

    run: Any  # jitted: (forward batch, pools, q, q_rope, latent, k_rope) -> out and the layer's cache
    operands: tuple[Any, ...]


def step_of(case: Case, backend: TsmlaMLABackend, dtype: str, layers: int = 1) -> Step:
    """`layers` layers; each has the latent of the one before for its query."""
    backend.forward_metadata = backend.get_forward_metadata(case.batch)
    layer = make_layer()

    def run(
        batch: ForwardBatch, pools: MemoryPools, q: jax.Array, q_rope: jax.Array, latent: jax.Array, k_rope: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        pool = pools.token_to_kv_pool
        for _ in range(layers):
            q, pool.kv_buffer[0] = layer(q, latent, latent, batch, pool, q_rope=q_rope, k_rope=k_rope)
        return q, pool.kv_buffer[0]

    pools = MemoryPools(token_to_kv_pool=case.pool)
    operands = forward_batch_of(case, backend), pools, *placed(case, backend.mesh, dtype)
    return Step(jax.jit(run, donate_argnums=1), operands)


def forward_batch_of(case: Case, backend: TsmlaMLABackend) -> ForwardBatch:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]), is_embedding=False)
    runner: Any = SimpleNamespace(mesh=backend.mesh, attn_backend=backend, model_config=config)
    return ForwardBatch.init_new(case.batch, runner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", [(1, 1), (2, 2)], ids=["one device", "data 2, tensor 2"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=["extend", "decode"])
def test_against_float64(mode: ForwardMode, split: tuple[int, int], dtype: str) -> None:
    """New prompts and prompts with a cached prefix, or one token a request; ranks with different numbers of both."""
    mesh = mesh_of(*split)
    ranks = [Requests([5, 1, 7], [5, 21, 12]), Requests([9, 2], [40, 2])][: split[0]]
    if mode == ForwardMode.DECODE:
        ranks = [Requests([1] * len(lens), lens) for _, lens in ranks]
    case = make_case(mode, ranks, mesh, jnp.dtype(dtype))
    step = step_of(case, make_backend(mesh), dtype)
    with jax.set_mesh(mesh):
        out, cache = step.run(*step.operands)
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
    np.testing.assert_array_equal(np.asarray(cache, np.float64), case.cache)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.out, rtol=tolerance, atol=tolerance)


def test_layers_share_one_block_table() -> None:
    """Each layer's call makes the table; the compiled step makes it once."""
    mesh = mesh_of(1, 1)
    case = make_case(ForwardMode.DECODE, [Requests([1, 1], [9, 40])], mesh, jnp.float32)
    step = step_of(case, make_backend(mesh), "float32", layers=3)
    with jax.set_mesh(mesh):
        text = step.run.lower(*step.operands).compile().as_text()
    assert text.count(f" -> s32[3,{CONTEXT // PAGE}] {{") == 1  # the computation whose result it is


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=["extend", "decode"])
@pytest.mark.usefixtures("cache_directory")
def test_kernels_on_a_mesh(mode: ForwardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Hopper's devices would run, as far as a machine without one can lower it: one call to write the cache and
    one to attend over it, on a device's own heads and requests."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    mesh = mesh_of(2, 2)
    case = make_case(mode, [Requests([1, 1], [9, 40]), Requests([1], [5])], mesh, jnp.bfloat16)
    backend = make_backend(mesh, "cute")
    assert "cute" in backend.explain(jnp.bfloat16)
    step = step_of(case, backend, "bfloat16")
    with jax.set_mesh(mesh):
        text = step.run.trace(*step.operands).lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "CuteDSLRT" in line]
    assert len(kernels) == 2
    # The cache is written in place.
    assert "output_operand_alias" in kernels[0] and re.search("jax.buffer_donor|tf.aliasing_output", text)
    rows, width = (3 if mode == ForwardMode.DECODE else 5) * HEADS // 2, LATENT + ROPE
    assert f"(tensor<{rows}x{width}xbf16>, tensor<{PAGES + 1}x{PAGE}x{width}xbf16>, " in kernels[1]


def test_what_a_layer_may_not_ask_for() -> None:
    mesh = mesh_of(1, 1)
    rows = jnp.zeros((1, HEADS, LATENT)), jnp.zeros((1, 1, LATENT))
    for other in ({"sliding_window_size": 8}, {"logit_cap": 30.0}):
        with pytest.raises(NotImplementedError, match=next(iter(other))):
            make_backend(mesh)(
                rows[0], rows[1], rows[1], make_layer(**other), None, None, q_rope=rows[0], k_rope=rows[1]
            )
    with pytest.raises(NotImplementedError, match="indexer_key_dim"):
        TsmlaMLATokenToKVPool(
            PAGE, PAGE, jnp.float32, LATENT, ROPE, layer_num=1, mesh=mesh, indexer_key_dim=128, num_indexer_layers=1
        )


def test_pool() -> None:
    mesh = mesh_of(2, 1)
    pool = TsmlaMLATokenToKVPool(2 * PAGES * PAGE, PAGE, jnp.bfloat16, LATENT, ROPE, layer_num=3, mesh=mesh, dp_size=2)
    assert [buffer.shape for buffer in pool.kv_buffer] == [(2 * (PAGES + 1), PAGE, LATENT + ROPE)] * 3
    assert pool.get_kv_size_bytes() == sum(buffer.nbytes for buffer in pool.kv_buffer)
    leaves, treedef = jax.tree.flatten(pool)
    assert isinstance(jax.tree.unflatten(treedef, leaves), TsmlaMLATokenToKVPool) and len(leaves) == 3
    latent, rope = pool.get_kv_buffer(1)
    assert (latent.shape[-1], rope.shape[-1]) == (LATENT, ROPE)


def test_the_server_s_processes_use_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that multiprocessing spawns runs the parent's file under the name __mp_main__."""
    launcher = Path(tsmla_backend.__file__).with_name("launch_server.py")
    monkeypatch.syspath_prepend(launcher.parent)
    monkeypatch.setattr(tp_worker, "ModelRunner", ModelRunner)
    runpy.run_path(str(launcher), run_name="__mp_main__")
    assert tp_worker.ModelRunner.__name__ == TsmlaModelRunner.__name__


class Answers(QueueBackend):
    """Gives the scheduler its requests at once, and ends its loop when all are answered."""

    class AllHere(Exception):
        pass

    def __init__(self) -> None:
        self.requests: list[TokenizedGenerateReqInput] = []
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.expected = 0

    def recv_requests(self) -> list[TokenizedGenerateReqInput]:
        requests, self.requests = self.requests, []
        return requests

    def wait_for_new_requests(self, timeout: float = 0.0) -> None:
        pass

    def send_pyobj(self, result: Any) -> None:
        for rid, reason, tokens, cached in zip(
            result.rids, result.finished_reasons, result.output_ids, result.cached_tokens, strict=True
        ):
            if reason is not None:
                self.tokens[rid], self.cached[rid] = list(tokens), cached
        if len(self.tokens) == self.expected:
            raise self.AllHere


class Server:
    """sglang-jax's scheduler, worker and DeepSeek-V3 model on some CPU devices."""

    def __init__(self, checkpoint: Path, *, backend: str, page_size: int, tp: int = 1, dp: int = 1) -> None:
        arguments = ServerArgs(
            model_path=str(checkpoint), device="cpu", attention_backend=backend, page_size=page_size, dtype="float32",
            skip_tokenizer_init=True, disable_overlap_schedule=True, disable_precompile=True, tp_size=tp, dp_size=dp,
            device_indexes=list(range(tp)), max_running_requests=4, max_total_tokens=1024, context_length=256,
            chunked_prefill_size=64, max_prefill_tokens=64, precompile_bs_paddings=[4], precompile_token_paddings=[64],
            random_seed=1,
        )  # fmt: skip
        self.answers = Answers()
        self.scheduler = Scheduler(arguments, communication_backend=self.answers)

    def generate(self, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
        sampling = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        sampling.normalize(None)
        self.answers.tokens, self.answers.expected = {}, len(prompts)
        self.answers.requests = [
            TokenizedGenerateReqInput(
                rid=name, text="", input_ids=list(ids), sampling_params=sampling, return_logprob=False,
                logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=[],
            )
            for name, ids in prompts.items()
        ]  # fmt: skip
        with pytest.raises(Answers.AllHere):
            self.scheduler.event_loop_normal()
        return self.answers.tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a sparse layer of DeepSeek-V3's kind, whose heads are 128 wide, as sglang-jax's native backend needs
    them."""
    directory = tmp_path_factory.mktemp("checkpoint")
    config = make_checkpoint.make_config
    small = {"num_hidden_layers": 2, "qk_nope_head_dim": 64, "v_head_dim": 64, "hidden_size": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_checkpoint, "make_config", lambda *a, **k: config(*a, **k) | small)
        make_checkpoint.make_checkpoint(directory, model="v3", dtype="float32")
    return directory


PROMPTS = {
    name: np.random.default_rng(length).integers(5, 200, length).tolist()
    for name, length in (("long", 100), ("short", 3), ("middle", 17))
}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    """This project's own engine, which shares no code with sglang-jax's model."""
    config = generate.ModelConfig.from_hf(checkpoint)
    engine = generate.Engine(generate.load_model(checkpoint, config), config)
    return dict(zip(PROMPTS, engine.generate(list(PROMPTS.values()), 12).tokens, strict=True))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_worker, "ModelRunner", ModelRunner)
    tsmla_backend.install()


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 2)])
@pytest.mark.usefixtures("ours")
def test_generation(checkpoint: Path, expected: dict[str, list[int]], tp: int, dp: int) -> None:
    """Prompts in chunks, batches of several requests, and a prompt whose prefix the radix cache holds."""
    server = Server(checkpoint, backend="fa", page_size=16, tp=tp, dp=dp)
    runner = server.scheduler.tp_worker.worker.model_runner
    assert isinstance(runner.token_to_kv_pool, TsmlaMLATokenToKVPool)
    pages = runner.token_to_kv_pool.kv_buffer[0].shape[0]
    assert runner._compute_cell_size() * 16 * pages == runner.token_to_kv_pool.get_kv_size_bytes()
    assert server.generate(PROMPTS, 12) == expected
    longer = PROMPTS["long"] + expected["long"][:4]
    assert server.generate({"longer": longer}, 8)["longer"] == expected["long"][4:12]
    assert server.answers.cached["longer"] == 96  # whole pages of the prompt


def test_the_native_backend_agrees(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    """Expanded attention by sglang-jax's own code. Its masks take the requests' keys to follow each other without a
    gap, which they do with pages of one token."""
    server = Server(checkpoint, backend="native", page_size=1)
    assert server.generate(PROMPTS, 12) == expected
