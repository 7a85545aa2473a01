"""A decode step of a V3.2 attention layer without its projections, ours in one jax.jit and the engines' kernels in one
CUDA graph. A point is a number of requests B and heads H; a request has one new token and 32,768 keys in pages of 64,
and attends to 2,048 of them. A step is rope, the write of the packed latent (656 bytes) and of the indexer key (132
bytes), quantisation of the indexer's queries (64 heads of 128), their selection and sparse_mla; both sides begin with
the same numbers in buffers of the same layouts.

Times are the GPU's clock over a chain of steps, of 20 less 8 of them, so that what a chain costs as a whole is not in
it: ours one jitted function that updates the donated caches, the peers' one CUDA graph, each step on inputs of its own.
The GPU is kept busy until a chain has been launched (gpu_clock.py). L2 is not flushed. The parts are timed likewise,
each alone in a chain of its kind; row "step" is the whole, "parts" the sum of the parts, and "step by the host's clock"
what a step takes a host that waits for each chain: the arguments of a chain, 11 arrays a step, are in it for jax. The
peers' step is that of the fastest top-k and attention among those that load. `same` is the part of the peers' slots
that ours has too: their fp8 logits are summed in another order.
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

import tsmla_bridge
import tsmla_jax
from benchmarks import peers
from benchmarks.cases.gpu_clock import JaxClock, TorchClock
from benchmarks.floors import LATENT, PAGE, ROPE
from benchmarks.harness import Case, device, ints, least_seconds, randn
from tsmla_jax import sparse
from tsmla_jax.ops.rotation import rotate

KEYS, K = 32768, 2048
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = 192**-0.5
LONG, SHORT, TURNS = 20, 8, 7
ON_HOST = "step by the host's clock"
LIBRARIES = ("flashmla", "deep_gemm", "vllm_c")
Chains = tuple[Callable[[], Any], Callable[[], Any]]
"""Functions that start LONG and SHORT steps."""


class LayerStep(NamedTuple):
    """What projections give a step: latent [T, 512], k_rope [T, 64], index_k [T, 128], index_q [T, Hi, 128],
    index_weights [T, Hi], q_latent [T, H, 512] (absorbed) and q_rope [T, H, 64], bfloat16."""

    latent: Any
    k_rope: Any
    index_k: Any
    index_q: Any
    index_weights: Any
    q_latent: Any
    q_rope: Any


class Layer(NamedTuple):
    """What all steps share: the packed caches [P, Z, 656] and [P, Z, 132], block_tables [T, M], seq_lens [T], the slots
    of the new tokens [T], cos and sin of their positions [T, 32] float32, all int32 but those; softmax_scale and k."""

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


# ---- ours: what a part leaves for others is in a dict, the caches "kv" and "keys" among it


def write_kv(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    angles = layer.slot_mapping, layer.cos, layer.sin
    return {"kv": sparse.write_packed_kv_cache(held["kv"], step.latent, step.k_rope, *angles, implementation="cute")}


def write_keys(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    angles = layer.slot_mapping, layer.cos, layer.sin
    return {"keys": sparse.write_indexer_cache(held["keys"], step.index_k, *angles, implementation="cute")}


def quantize(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    angles = layer.cos, layer.sin
    q8, weights = sparse.indexer_quantize(step.index_q, step.index_weights, *angles, implementation="cute")
    return {"q8": q8, "weights": weights}


def indexer_topk(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    where = layer.block_tables, layer.seq_lens, K
    slots, _ = tsmla_jax.indexer_topk(
        held["q8"], held["weights"], held["keys"], *where, return_slots=True, implementation="cute"
    )
    return {"slots": slots}


def rope_q(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    turned = rotate(step.q_rope, layer.cos[:, None], layer.sin[:, None], interleave=True, layout="interleaved")
    return {"q": jnp.concatenate([step.q_latent, turned], axis=-1)}


def sparse_mla(layer: Layer, step: LayerStep, held: dict[str, Any]) -> dict[str, Any]:
    options = {"softmax_scale": SCALE, "latent_dim": LATENT, "implementation": "cute"}
    return {"out": tsmla_jax.sparse_mla(held["q"], held["kv"], held["slots"], **options)}


PARTS = {part.__name__: part for part in (write_kv, write_keys, quantize, indexer_topk, rope_q, sparse_mla)}
CACHES = ("kv", "keys")


class Ours:
    """Our step in jax: its caches, which every chain is given and gives back, and what its parts leave."""

    def __init__(self, layer: Layer, steps: list[LayerStep]) -> None:
        def in_jax(tensors: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.copy(tsmla_bridge.to_jax(x)) if isinstance(x, torch.Tensor) else x, tensors
            )

        arrays = in_jax(layer)
        self.caches, self.layer = {"kv": arrays.kv, "keys": arrays.keys}, arrays._replace(kv=None, keys=None)
        self.steps, self.left = [in_jax(step) for step in steps], [{} for _ in steps]
        for start in self.chains(tuple(PARTS), keep=True)[:1]:
            self.left = [{name: x for name, x in held.items() if name not in CACHES} for held in start()[1]]

    def chains(self, names: tuple[str, ...], *, keep: bool = False) -> Chains:
        """Chains of these parts. No two steps of a chain have the same inputs: XLA would make one of them. They return
        the last part's results, or with `keep` all parts'."""

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(caches: dict[str, Any], layer: Layer, steps: Any, left: Any) -> Any:
            results = []
            for step, held in zip(steps, left, strict=True):
                found: dict[str, Any] = {}
                for name in names:
                    new = PARTS[name](layer, step, held | found | caches)
                    caches = caches | {key: x for key, x in new.items() if key in CACHES}
                    new = {key: x for key, x in new.items() if key not in CACHES}
                    found = found | new if keep or name != names[-1] else found | {"last": new}
                results.append(found if keep else found.get("last"))
            return caches, results

        def start(count: int) -> Any:
            self.caches, results = chain(self.caches, self.layer, self.steps[:count], self.left[:count])
            return self.caches, results

        return functools.partial(start, LONG), functools.partial(start, SHORT)

    def times(self, hear: Callable[[str], None]) -> dict[str, float]:
        clock, times = JaxClock(), {}
        for name in PARTS:
            hear("tsmla")
            times[name] = step_us(clock, *self.chains((name,)))
        whole = self.chains(tuple(PARTS))
        times["step"] = step_us(clock, *whole)
        return times | {ON_HOST: host_step_us(*whole, wait=jax.block_until_ready)}


def step_us(clock: JaxClock | TorchClock, long: Callable[[], Any], short: Callable[[], Any]) -> float:
    """The GPU's microseconds a step."""
    taken = []
    for start in (long, short):
        start()  # compiled, and recorded
        taken.append(statistics.median(clock.microseconds(start) for _ in range(TURNS)))
    return (taken[0] - taken[1]) / (LONG - SHORT)


def host_step_us(long: Callable[[], Any], short: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """The same by the clock of a host that waits for the results of each."""
    long_seconds, short_seconds = (least_seconds(lambda start=start: wait(start()), TURNS) for start in (long, short))
    return (long_seconds - short_seconds) / (LONG - SHORT) * 1e6


# ---- the peers


def graphs(run: Callable[[Any], None], steps: list[LayerStep]) -> Chains:
    """Chains of `run`, a function of the step's inputs, as one CUDA graph each."""

    def graph_of(count: int) -> Any:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(steps[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for step in steps[:count]:
                run(step)
        return graph.replay

    return graph_of(LONG), graph_of(SHORT)


def peer_times(layer: Layer, steps: list[LayerStep], hear: Callable[[str], None]) -> tuple[dict[str, float], str, Any]:
    """The times of the parts and of the whole step, its top-k and attention, and what its last step selects."""
    from benchmarks.peers.layer import PeerLayer

    last, found = steps[-1]._make(x.clone() for x in steps[-1]), {}  # rope works in place
    topk = {"vllm_cooperative": "vllm_c", "vllm_persistent": "vllm_c", "sgl": "sgl"}
    for (name, library), attention in itertools.product(topk.items(), ("flashmla", "legacy")):
        try:
            for needed in (*LIBRARIES, library, attention):
                if (reason := peers.why_not(needed)) is not None:
                    raise ImportError(reason)
                peers.load(needed)
            hear("engines")
            run = PeerLayer(layer, steps[0], name, attention)
            run(steps[0])
            torch.cuda.synchronize()
            found[name, attention] = run
        except Exception as error:
            print(f"{name}, {attention} failed: {type(error).__name__}: {str(error)[:120]}")
    if not found:
        return {}, "", None
    clock = TorchClock()
    wholes = {names: step_us(clock, *graphs(run, steps)) for names, run in found.items()}
    best = min(wholes, key=wholes.__getitem__)
    run = found[best]
    run(last)
    slots = run.slots[:, 0].clone()
    times = {name: step_us(clock, *graphs(part, steps)) for name, part in run.parts.items()}
    on_host = host_step_us(*graphs(run, steps), wait=lambda _: torch.cuda.synchronize())
    return times | {"step": wholes[best], ON_HOST: on_host}, " ".join(best), slots


class SparseLayer(Case):
    points = tuple(itertools.product((1, 8, 64), (128, 16)))
    common: ClassVar = {"page": PAGE, "keys": KEYS, "k": K}
    peers: ClassVar = {"engines": "vllm_c"}

    def rows(self, skipped: set[tuple[str, Any]], hear: Callable[[str], None]) -> list[dict[str, Any]]:
        batch, heads = self.point
        hear("tsmla")
        layer, steps = layer_of(batch), steps_of(batch, heads)
        ours = Ours(layer, steps)
        sides, same = [("tsmla", "", ours.times(hear))], None
        if ("engines", self.point) not in skipped and peers.why_not("vllm_c") is None:
            times, kernels, slots = peer_times(layer, steps, hear)
            if times:
                mine = tsmla_bridge.to_torch(ours.left[-1]["slots"])
                both = [torch.isin(a, b).float().mean() for a, b in zip(slots, mine, strict=True)]
                same = round(float(torch.stack(both).mean()), 4)
                sides.append(("engines", kernels, times))
        found = []
        for peer, kernels, times in sides:
            total = sum(us for part, us in times.items() if part not in ("step", ON_HOST))
            found += [{"b": batch, "h": heads, "peer": peer, "kernels": kernels, "part": part, "us": round(us, 2),
                       "same": same} for part, us in (times | {"parts": total}).items()]  # fmt: skip
        return found
