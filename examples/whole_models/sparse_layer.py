"""The case sparse_layer of `benchmarks.run`: a decode step of a V3.2 attention layer without its projections, ours in
one jax.jit and the engines' kernels in one CUDA graph. A point is a number of requests B and heads H; a request has one
new token and 32,768 keys in pages of 64, and attends to 2,048 of them. A step is rope, the write of the packed latent
(656 bytes) and of the indexer key (132 bytes), quantisation of the indexer's queries (64 heads of 128), their selection
and sparse_mla; both sides begin with the same numbers in buffers of the same layouts.

Times are the GPU's clock over a chain of steps, of 20 less 8 of them, so that what a chain costs as a whole is not in
it: ours one jitted function that updates the donated caches, the peers' one CUDA graph of the fastest top-k and
attention that load, each step on inputs of its own. The GPU is kept busy until a chain has been launched. L2 is not
flushed. Row "step by the host's clock" is the time of a step for a host that waits for each chain; for jax it includes
the passing of a chain's arguments, 7 arrays a step. `same` is the part of the peers' slots that ours has too: their fp8
logits are summed in another order.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import tsmla_bridge
import tsmla_jax
from benchmarks import peers
from benchmarks.floors import LATENT, PAGE, ROPE
from benchmarks.harness import Case, device, ints, least_seconds, randn
from benchmarks.peers import sparse as sparse_peers
from tsmla_jax import sparse
from tsmla_jax.ops.rotation import rotate

KEYS, K = 32768, 2048
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = 192**-0.5
LONG, SHORT, TURNS = 20, 8, 7
ON_HOST = "step by the host's clock"


# ---- the GPU's own clock, of what is launched while the GPU is still busy: the host's time for a launch is not in it

BUSY_SIZE, BUSY_PRODUCTS = 8192, 4  # some 6 ms


def _read_clock(after: Any, clock: Any) -> None:
    """Low 32 bits of the nanoseconds, behind what makes `after`. Inline assembly needs an operand: zeros are it."""
    del after
    word = jax.ShapeDtypeStruct(clock.shape, jnp.int32)
    zeros = jnp.zeros(clock.shape, jnp.int32)
    code = "mov.u32 $0, $1; mov.u32 $0, %globaltimer_lo;"
    (clock[...],) = plgpu.elementwise_inline_asm(
        code, args=[zeros], constraints="=r,r", pack=1, result_shape_dtypes=[word]
    )


@jax.jit
def _clock(after: jax.Array) -> jax.Array:
    """[32] equal nanoseconds, modulo 2^32, at which `after` [32] has been made."""
    shape = jax.ShapeDtypeStruct((32,), jnp.int32)
    return pl.pallas_call(_read_clock, out_shape=shape, compiler_params=plgpu.CompilerParams(num_warps=1))(after)


@jax.jit
def _busy(matrix: jax.Array) -> jax.Array:
    product = matrix
    for _ in range(BUSY_PRODUCTS):
        product = product @ matrix
    return product[0, :32].astype(jnp.float32)


@functools.cache
def _matrix(of_jax: bool) -> Any:
    shape, value = (BUSY_SIZE, BUSY_SIZE), 1 / BUSY_SIZE
    return jnp.full(shape, value, jnp.bfloat16) if of_jax else torch.full(shape, value, dtype=torch.bfloat16).cuda()


def jax_us(run: Callable[[], Any]) -> float:
    """Microseconds of the GPU from start to end of what `run` starts; it returns arrays and waits for nothing."""
    begin = _clock(_busy(_matrix(True)))
    results = run()
    end = _clock(jnp.zeros(32))
    jax.block_until_ready((results, begin, end))
    return ((int(end[0]) - int(begin[0])) % 2**32) / 1e3


def torch_us(run: Callable[[], Any]) -> float:
    """`jax_us` for what runs on torch's current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(BUSY_PRODUCTS):
        _matrix(False) @ _matrix(False)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


# ---- operands


class LayerStep(NamedTuple):
    """The projections' results for a step: latent [T, 512], k_rope [T, 64], index_k [T, 128], index_q [T, Hi, 128],
    index_weights [T, Hi], q_latent [T, H, 512] (absorbed) and q_rope [T, H, 64], bfloat16."""

    latent: Any
    k_rope: Any
    index_k: Any
    index_q: Any
    index_weights: Any
    q_latent: Any
    q_rope: Any


class Layer(NamedTuple):
    """The operands that all steps share: the packed caches uint8 [P, Z, 656] and [P, Z, 132]; block_tables [T, M],
    seq_lens [T] and the slots of the new tokens [T], int32; cos and sin of their positions, float32 [T, 32];
    softmax_scale and k."""

    kv: Any
    keys: Any
    block_tables: Any
    seq_lens: Any
    slot_mapping: Any
    cos: Any
    sin: Any
    softmax_scale: float = SCALE
    k: int = K


def layer_of(batch: int) -> Layer:
    """Random packed rows, pages in random order, the new token the last of each request."""
    pages = batch * (KEYS // PAGE)
    kv, keys = (torch.zeros(pages, PAGE, width, dtype=torch.uint8, device=device()) for width in (656, 132))
    for some in ints(range(pages * PAGE)).split(1 << 18):
        latent, rope, index = (randn(len(some), width) for width in (LATENT, ROPE, INDEX_DIM))
        tsmla_bridge.write_packed_kv_cache(kv, latent, rope, some)
        tsmla_bridge.write_indexer_cache(keys, index, some)
    tables = torch.randperm(pages, device=device()).int().view(batch, -1)
    angles = torch.rand(batch, ROPE // 2, device=device()) * 6.0
    return Layer(kv, keys, tables, ints([KEYS] * batch), tables[:, -1] * PAGE + PAGE - 1, angles.cos(), angles.sin())


def steps_of(batch: int, heads: int) -> list[LayerStep]:
    """The inputs of LONG steps."""
    shapes = ((LATENT,), (ROPE,), (INDEX_DIM,), (INDEX_HEADS, INDEX_DIM), (INDEX_HEADS,), (heads, LATENT),
              (heads, ROPE))  # fmt: skip
    return [LayerStep(*(randn(batch, *shape) for shape in shapes)) for _ in range(LONG)]


def our_step(layer: Layer, caches: tuple[Any, Any], step: LayerStep) -> tuple[tuple[Any, Any], Any, Any]:
    """The caches after a step, the slots that it selects, and its result."""
    cute, angles = {"implementation": "cute"}, (layer.cos, layer.sin)
    written = layer.slot_mapping, *angles
    kv = sparse.write_packed_kv_cache(caches[0], step.latent, step.k_rope, *written, **cute)
    keys = sparse.write_indexer_cache(caches[1], step.index_k, *written, **cute)
    q8, weights = sparse.indexer_quantize(step.index_q, step.index_weights, *angles, **cute)
    where = layer.block_tables, layer.seq_lens, K
    slots, _ = tsmla_jax.indexer_topk(q8, weights, keys, *where, return_slots=True, **cute)
    turned = rotate(step.q_rope, layer.cos[:, None], layer.sin[:, None], interleave=True, layout="interleaved")
    q = jnp.concatenate([step.q_latent, turned], axis=-1)
    out = tsmla_jax.sparse_mla(q, kv, slots, softmax_scale=SCALE, latent_dim=LATENT, **cute)
    return (kv, keys), slots, out


class Ours:
    """Our step in jax: its caches, which every chain is given and gives back, and the slots of the last step."""

    def __init__(self, layer: Layer, steps: list[LayerStep]) -> None:
        def in_jax(tensors: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.copy(tsmla_bridge.to_jax(x)) if isinstance(x, torch.Tensor) else x, tensors
            )

        arrays = in_jax(layer)
        self.caches, self.layer = (arrays.kv, arrays.keys), arrays._replace(kv=None, keys=None)
        self.steps, self.slots = [in_jax(step) for step in steps], None

    def start(self, count: int) -> Any:
        """Start so many steps. No two have the same inputs: XLA would make one of them."""
        self.caches, self.slots, outs = _chain(self.caches, self.layer, self.steps[:count])
        return self.caches, self.slots, outs


@functools.partial(jax.jit, donate_argnums=0)
def _chain(caches: tuple[Any, Any], layer: Layer, steps: list[LayerStep]) -> tuple[Any, Any, list[Any]]:
    outs, slots = [], None
    for step in steps:
        caches, slots, out = our_step(layer, caches, step)
        outs.append(out)
    return caches, slots, outs


def step_us(clock: Callable[..., float], *starts: Callable[[], Any]) -> dict[str, float]:
    """Microseconds a step by the GPU's clock and by the host's, of functions that start SHORT and LONG of them."""

    def wait(started: Any) -> None:
        jax.block_until_ready(started)
        torch.cuda.synchronize()

    taken, waited = [], []
    for start in starts:
        start()  # compiled, and recorded
        taken.append(statistics.median(clock(start) for _ in range(TURNS)))
        waited.append(least_seconds(lambda start=start: wait(start()), TURNS) * 1e6)
    return {part: (long - short) / (LONG - SHORT) for part, (short, long) in (("step", taken), (ON_HOST, waited))}


# ---- the peers


def graph_of(run: Callable[[Any], None], steps: list[LayerStep]) -> Callable[[], None]:
    """A function that starts these steps of `run`, as one CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(steps[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for step in steps:
            run(step)
    return graph.replay


def peer_step(layer: Layer, steps: list[LayerStep], hear: Callable[[str], None]) -> tuple[Any, str, Any] | None:
    """Times of the fastest combination that runs, its top-k and attention, and the slots of the last step."""
    from examples.whole_models.engine_layer import PeerLayer

    last, best = steps[-1]._make(x.clone() for x in steps[-1]), None  # rope works in place
    for topk, attention in itertools.product(("vllm_cooperative", "vllm_persistent", "sgl"), ("flashmla", "legacy")):
        try:
            for needed in ("vllm_c", "deep_gemm", sparse_peers.TOPK[topk], attention):
                if (reason := peers.why_not(needed)) is not None:
                    raise ImportError(reason)
                peers.load(needed)
            hear("engines")
            run = PeerLayer(layer, steps[0], topk, attention)
            us = step_us(torch_us, graph_of(run, steps[:SHORT]), graph_of(run, steps))
            run(last._make(x.clone() for x in last))
        except Exception as error:
            print(f"{topk}, {attention} failed: {type(error).__name__}: {str(error)[:120]}")
            continue
        if best is None or us["step"] < best[0]["step"]:
            best = us, f"{topk} {attention}", run.slots[:, 0].clone()
    return best


class SparseLayer(Case):
    points = tuple(itertools.product((1, 8, 64), (128, 16)))
    common: ClassVar = {"page": PAGE, "keys": KEYS, "k": K}
    patience = 240
    peers: ClassVar = {"engines": "vllm_c"}

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        batch, heads = self.point
        hear("tsmla")
        layer, steps = layer_of(batch), steps_of(batch, heads)
        ours = Ours(layer, steps)
        case: dict[str, Any] = {"b": batch, "h": heads}
        sides = [("tsmla", "", step_us(jax_us, lambda: ours.start(SHORT), lambda: ours.start(LONG)))]
        if ("engines", self.point) not in skipped and (best := peer_step(layer, steps, hear)) is not None:
            us, kernels, slots = best
            both = [torch.isin(a, b).float().mean()
                    for a, b in zip(slots, tsmla_bridge.to_torch(ours.slots), strict=True)]  # fmt: skip
            case["same"] = round(float(torch.stack(both).mean()), 4)
            sides.append(("engines", kernels, us))
        return [case | {"peer": peer, "kernels": kernels, "part": part, "us": round(each, 2)}
                for peer, kernels, us in sides for part, each in us.items()]  # fmt: skip
