"""Time one decode step of a V3.2 attention layer without its projections, ours in one jax.jit and the engines' kernels
in one CUDA graph, on one GPU in one run.

    python3 benchmarks/sparse_layer.py --peers DIR --out FILE.json [--points 8,16/...] [--seconds 500]

DIR holds a module `peers_sparse` with `load()`, `deep_gemm_paged`, `flashmla_v32` and `legacy_v32`; layer_peers.py has
the rest of the peers' step, and without DIR ours runs alone. A point is a number of requests B and heads H; a request
has one new token and 32,768 keys in pages of 64, and attends to 2,048 of them. A step is rope, the write of the packed
latent (656 bytes) and of the indexer key (132 bytes), quantisation of the indexer's queries (64 heads of 128), their
selection and sparse_mla; both sides begin with the same numbers in buffers of the same layouts.

Times are the GPU's clock over a chain of steps, of 20 less 8 of them, so that what a chain costs as a whole is not in
it: ours one jitted function that updates the donated caches, the peers' one CUDA graph, each step on inputs of its own.
The GPU is kept busy until a chain has been launched (gpu_clock.py). L2 is not flushed. The parts are timed likewise,
each alone in a chain of its kind; row "step" is the whole, "parts" the sum of the parts, and "step by the host's clock"
what a step takes a host that waits for each chain: the arguments of a chain, 11 arrays a step, are in it for jax. The
peers' step is that of the fastest top-k and attention among those that load. `same` is the part of the peers' slots
that ours has too: their fp8 logits are summed in another order. Rows go to FILE.json.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app
from gpu_clock import JaxClock, TorchClock
from harness import POINTS, Record, least_seconds, load_peers, within_budget

import tsmla_bridge
import tsmla_jax
from tsmla_jax import sparse
from tsmla_jax.ops.rotation import rotate

BATCHES, HEADS = (1, 8, 64), (128, 16)
PAGE, KEYS, K = 64, 32768, 2048
LATENT, ROPE, INDEX_HEADS, INDEX_DIM = 512, 64, 64, 128
SCALE = 192**-0.5
LONG, SHORT = 20, 8
TURNS = 7
ON_HOST = "step by the host's clock"
TOPK, ATTENTION = ("vllm_cooperative", "vllm_persistent", "sgl"), ("flashmla", "legacy")
MOST_COOPERATIVE = 32


class Caches(NamedTuple):
    kv: Any
    keys: Any


class Between(NamedTuple):
    """What one part of a step leaves for a later one."""

    q8: Any
    weights: Any
    slots: Any
    q: Any


# ---- operands, by torch for both sides


def layer_of(batch: int) -> Any:
    """The caches and tables of a point: random packed rows, pages in random order, the new token the last of each."""
    import torch
    from layer_peers import Layer

    pages = batch * (KEYS // PAGE)
    kv, keys = (torch.zeros(pages, PAGE, width, dtype=torch.uint8, device="cuda") for width in (656, 132))
    slots = torch.arange(pages * PAGE, dtype=torch.int32, device="cuda")
    for some in slots.split(1 << 18):
        rows = torch.randn(len(some), LATENT + ROPE + INDEX_DIM, device="cuda").bfloat16()
        latent, rope, index = (x.contiguous() for x in rows.split((LATENT, ROPE, INDEX_DIM), 1))
        tsmla_bridge.write_packed_kv_cache(kv, latent, rope, some)
        tsmla_bridge.write_indexer_cache(keys, index, some)
    tables = torch.randperm(pages, device="cuda").int().view(batch, -1)
    angles = torch.rand(batch, ROPE // 2, device="cuda") * 6.0
    lens = torch.full((batch,), KEYS, dtype=torch.int32, device="cuda")
    last = tables[:, -1] * PAGE + PAGE - 1
    return Layer(kv, keys, tables, lens, last, angles.cos(), angles.sin(), SCALE, K)


def steps_of(batch: int, heads: int) -> list[Any]:
    """The inputs of LONG steps."""
    import torch
    from layer_peers import LayerStep

    shapes = (
        (LATENT,), (ROPE,), (INDEX_DIM,), (INDEX_HEADS, INDEX_DIM), (INDEX_HEADS,), (heads, LATENT), (heads, ROPE)
    )  # fmt: skip
    return [LayerStep(*(torch.randn(batch, *shape, device="cuda").bfloat16() for shape in shapes)) for _ in range(LONG)]


def in_jax(tensors: Any) -> Any:
    """Copies of tensors as jax arrays; numbers as they are."""
    import torch

    return jax.tree.map(lambda x: jnp.copy(tsmla_bridge.to_jax(x)) if isinstance(x, torch.Tensor) else x, tensors)


# ---- ours: each part takes (layer, caches, step, between) and returns (caches, between, results)


def write_kv(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    kv = sparse.write_packed_kv_cache(
        caches.kv, step.latent, step.k_rope, layer.slot_mapping, layer.cos, layer.sin, implementation="cute"
    )
    return caches._replace(kv=kv), between, ()


def write_keys(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    keys = sparse.write_indexer_cache(
        caches.keys, step.index_k, layer.slot_mapping, layer.cos, layer.sin, implementation="cute"
    )
    return caches._replace(keys=keys), between, ()


def quantize(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    q8, weights = sparse.indexer_quantize(step.index_q, step.index_weights, layer.cos, layer.sin, implementation="cute")
    return caches, between._replace(q8=q8, weights=weights), (q8, weights)


def indexer_topk(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    slots, _ = tsmla_jax.indexer_topk(
        between.q8,
        between.weights,
        caches.keys,
        layer.block_tables,
        layer.seq_lens,
        K,
        return_slots=True,
        implementation="cute",
    )
    return caches, between._replace(slots=slots), slots


def rope_q(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    cos, sin = layer.cos[:, None], layer.sin[:, None]
    turned = rotate(step.q_rope, cos, sin, interleave=True, layout="interleaved")
    q = jnp.concatenate([step.q_latent, turned], axis=-1)
    return caches, between._replace(q=q), q


def sparse_mla(layer: Any, caches: Caches, step: Any, between: Between) -> tuple[Caches, Between, Any]:
    out = tsmla_jax.sparse_mla(
        between.q, caches.kv, between.slots, softmax_scale=SCALE, latent_dim=LATENT, implementation="cute"
    )
    return caches, between, out


PARTS = {part.__name__: part for part in (write_kv, write_keys, quantize, indexer_topk, rope_q, sparse_mla)}


def run_parts(
    names: tuple[str, ...], layer: Any, caches: Caches, step: Any, between: Between
) -> tuple[Caches, Between, Any]:
    """The parts of one step in order; the last one's results."""
    results: Any = ()
    for name in names:
        caches, between, results = PARTS[name](layer, caches, step, between)
    return caches, between, results


class Ours:
    """Our step in jax: its caches, which every chain is given and gives back, and what its parts leave."""

    def __init__(self, layer: Any, steps: list[Any]) -> None:
        arrays = in_jax(layer)
        self.caches = Caches(arrays.kv, arrays.keys)
        self.layer = arrays._replace(kv=None, keys=None)
        self.steps = [in_jax(step) for step in steps]
        whole = jax.jit(functools.partial(run_parts, tuple(PARTS)), donate_argnums=1)
        self.betweens = []
        for step in self.steps:
            self.caches, between, _ = whole(self.layer, self.caches, step, Between(None, None, None, None))
            self.betweens.append(between)

    def chains(self, names: tuple[str, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Functions that start LONG and SHORT steps of these parts. No two steps of a chain have the same inputs: XLA
        would make one of them."""

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(caches: Caches, layer: Any, steps: Any, betweens: Any) -> Any:
            results = []
            for step, between in zip(steps, betweens, strict=True):
                caches, _, last = run_parts(names, layer, caches, step, between)
                results.append(last)
            return caches, results

        def start(count: int) -> Any:
            self.caches, results = chain(self.caches, self.layer, self.steps[:count], self.betweens[:count])
            return self.caches, results

        return functools.partial(start, LONG), functools.partial(start, SHORT)

    def times(self) -> dict[str, float]:
        clock = JaxClock()
        times = {name: step_us(clock, *self.chains((name,))) for name in PARTS}
        whole = self.chains(tuple(PARTS))
        times["step"] = step_us(clock, *whole)
        return times | {ON_HOST: host_step_us(*whole, wait=jax.block_until_ready)}


def step_us(clock: JaxClock | TorchClock, long: Callable[[], Any], short: Callable[[], Any]) -> float:
    """The GPU's microseconds a step, of functions that start LONG and SHORT of them."""
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


def graphs(run: Callable[[Any], None], steps: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions that start LONG and SHORT steps of `run`, a function of the step's inputs, as one CUDA graph each."""
    import torch

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


def peer_layers(peers: Any, layer: Any, steps: list[Any]) -> dict[tuple[str, str], Any]:
    """The peers' step with each top-k and attention that runs, after one step."""
    import torch
    from layer_peers import PeerLayer

    found = {}
    for topk, attention in itertools.product(TOPK, ATTENTION):
        if topk == "vllm_cooperative" and len(layer.seq_lens) > MOST_COOPERATIVE:
            continue
        try:
            run = PeerLayer(peers, layer, steps[0], topk, attention)
            run(steps[0])
            torch.cuda.synchronize()
            found[topk, attention] = run
        except Exception as error:
            print(f"{topk}, {attention} failed: {type(error).__name__}: {str(error)[:120]}")
    return found


def peer_times(peers: Any, layer: Any, steps: list[Any]) -> tuple[dict[str, float], str, Any]:
    """The times of the parts and of the whole step, its top-k and attention, and what its last step selects."""
    import torch

    last = steps[-1]._make(x.clone() for x in steps[-1])  # rope works in place
    found = peer_layers(peers, layer, steps)
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


def same_slots(ours: Any, theirs: Any) -> float:
    """The part of the slots [T, K] that both sides have."""
    import torch

    mine = tsmla_bridge.to_torch(ours)
    both = [torch.isin(a, b).float().mean() for a, b in zip(theirs, mine, strict=True)]
    return float(torch.stack(both).mean())


def main(argv: list[str]) -> int:
    del argv
    points = list(itertools.product(BATCHES, HEADS))
    if POINTS.value:
        points = [tuple(map(int, text.split(","))) for text in POINTS.value.split("/")]
    peers, _ = load_peers("peers_sparse")
    record = Record(page=PAGE, keys=KEYS, k=K)
    for batch, heads in within_budget(points):
        layer, steps = layer_of(batch), steps_of(batch, heads)
        ours = Ours(layer, steps)
        rows = [("tsmla", "", ours.times())]
        same = None
        if peers:
            times, kernels, slots = peer_times(peers, layer, steps)
            rows += [("engines", kernels, times)] if times else []
            same = None if slots is None else round(same_slots(ours.betweens[-1].slots, slots), 4)
        for peer, kernels, times in rows:
            parts = sum(us for part, us in times.items() if part not in ("step", ON_HOST))
            for part, us in (times | {"parts": parts}).items():
                record.add(b=batch, h=heads, peer=peer, kernels=kernels, part=part, us=round(us, 2), same=same)
            said = " ".join(f"{part} {us:.1f}" for part, us in times.items())
            print(f"{batch:3d} {heads:4d} {peer} {kernels}: {said}", flush=True)
        if len(rows) == 2:
            print(f"{batch:3d} {heads:4d} ours / theirs {rows[0][2]['step'] / rows[1][2]['step']:.3f}, same {same}")
        del ours, layer, steps
    return 0


if __name__ == "__main__":
    app.run(main)
