"""A decode loop as an inference engine has it, in torch: a paged cache, requests of different lengths, a CUDA graph.

    python examples/torch_engine.py

One MLA layer of DeepSeek's head sizes. The prompts run as one ragged call; then each step writes the new tokens'
latents into the cache and attends over it. On a GPU a step is captured once and replayed: the lengths, the slots and
the token's input change in place, and the host allocates nothing for a step and launches only the graph (copies of the
inputs are for the check at the end). On a CPU the same functions run torch's reference, step by step. Instead of a
model's head, each new token's input is made from the output of the one before. The last lines check the loop against
one expanded attention over all the tokens. Needs `pip install '.[torch]'` in a clone.
"""

from __future__ import annotations

import argparse

import torch

import tsmla_bridge

EMBED, HEADS, LATENT, ROPE, NOPE, VALUE = 256, 8, 512, 64, 128, 128
PAGE_SIZE, STEPS = 64, 70  # enough for each request to reach another page
SCALE = (NOPE + ROPE) ** -0.5


class Layer:
    """The weights, and what is computed around the attention."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * shape[-2] ** -0.5).to(device, dtype)

        self.q, self.kv_a = weight(EMBED, HEADS * (NOPE + ROPE)), weight(EMBED, LATENT + ROPE)
        # The latent is the input of W_UK and W_UV: k = latent @ uk, v = latent @ uv.
        self.uk, self.uv = weight(HEADS, LATENT, NOPE), weight(HEADS, LATENT, VALUE)
        self.o = weight(HEADS * VALUE, EMBED)
        self.angles = 1e4 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, ..., R] at positions [T], pairs side by side."""
        turns = positions.view(-1, *[1] * (x.dim() - 1)) * self.angles
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        both = (even * turns.cos() - odd * turns.sin(), even * turns.sin() + odd * turns.cos())
        return torch.stack(both, -1).flatten(-2).to(x.dtype)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] -> the nope and the rotated rope part, [T, H, 128] and [T, H, 64]."""
        nope, rope = (x @ self.q).view(-1, HEADS, NOPE + ROPE).split((NOPE, ROPE), -1)
        return nope, self.rotated(rope, positions)

    def latents(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] -> what the cache holds of them: latent [T, 512] and rotated rope key [T, 64]."""
        latent, rope = (x @ self.kv_a).split((LATENT, ROPE), -1)
        latent = latent * torch.rsqrt(latent.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return latent, self.rotated(rope, positions)

    def absorbed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The query of mla_decode, [T, H, 576]."""
        nope, rope = self.queries(x, positions)
        return torch.cat((torch.einsum("thn,hln->thl", nope, self.uk), rope), -1)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """The result of mla_decode, [T, H, 512] -> [T, E]."""
        return torch.einsum("thl,hlv->thv", attended, self.uv).flatten(1) @ self.o


def next_input(y: torch.Tensor) -> torch.Tensor:
    """Stands for the rest of a model: from a layer's output to the next token's input, of unit size."""
    return y * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + 1e-6).to(y.dtype)


class Engine:
    """The cache and the state of the requests, all in tensors that a graph may read and write again."""

    def __init__(self, layer: Layer, prompt_lens: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.layer = layer
        pages = [-(-(n + STEPS) // PAGE_SIZE) for n in prompt_lens]
        self.kv_cache = tsmla_bridge.init_cache(sum(pages), page_size=PAGE_SIZE, dtype=dtype, device=device)
        tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for request, count in enumerate(pages):
            tables[request, :count] = torch.arange(sum(pages[:request]), sum(pages[: request + 1]))
        self.block_tables = tables.to(device)
        self.seq_lens = torch.zeros(len(pages), dtype=torch.int32, device=device)
        self.x = torch.zeros(len(pages), EMBED, device=device, dtype=dtype)
        # A step's memory, so that calls of mla_decode allocate nothing; 0 bytes on a CPU.
        size = tsmla_bridge.decode_workspace_size(
            max_batch=len(pages), num_heads=HEADS, page_size=PAGE_SIZE, dtype=dtype, device=device
        )
        self.workspace = tsmla_bridge.Workspace(size, device=device)
        self.attended = torch.empty(len(pages), 1, HEADS, LATENT, device=device, dtype=dtype)

    def write(self, x: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor) -> None:
        """The latents of tokens x [T, E] into their requests' pages."""
        slots = tsmla_bridge.slots(self.block_tables, positions, PAGE_SIZE, requests=requests)
        tsmla_bridge.write_kv_cache(self.kv_cache, *self.layer.latents(x, positions), slots)

    def prompt(self, x: torch.Tensor, lens: list[int]) -> None:
        """All prompts' tokens [T, E] at once; leaves the next token's input."""
        count = torch.tensor(lens, device=x.device)
        ends = count.cumsum(0)
        requests = torch.repeat_interleave(torch.arange(len(lens), device=x.device), count)
        positions = torch.arange(len(x), device=x.device) - (ends - count)[requests]
        self.write(x, requests, positions)
        self.seq_lens.copy_(count)
        attended = tsmla_bridge.mla_decode(
            self.layer.absorbed(x, positions),
            self.kv_cache,
            self.block_tables,
            self.seq_lens,
            softmax_scale=SCALE,
            cu_seqlens_q=torch.cat((ends[:1] * 0, ends)).to(torch.int32),
            max_q_len=max(lens),
        )
        self.x.copy_(next_input(self.layer.output(attended[ends - 1])))

    def step(self) -> None:
        """One token of every request. It reads and writes only the engine's own tensors."""
        positions = self.seq_lens.long()
        self.write(self.x, torch.arange(len(positions), device=positions.device), positions)
        self.seq_lens += 1
        query = self.layer.absorbed(self.x, positions)[:, None]
        tsmla_bridge.mla_decode(
            query,
            self.kv_cache,
            self.block_tables,
            self.seq_lens,
            softmax_scale=SCALE,
            out=self.attended,
            workspace=self.workspace,
        )
        self.x.copy_(next_input(self.layer.output(self.attended[:, 0])))


def captured(engine: Engine) -> torch.cuda.CUDAGraph:
    """A graph of one step. A step runs before the capture, in which nothing may be compiled, and what it changed is
    restored."""
    state = [tensor.clone() for tensor in (engine.x, engine.seq_lens, engine.kv_cache)]
    engine.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.step()
    for tensor, before in zip((engine.x, engine.seq_lens, engine.kv_cache), state, strict=True):
        tensor.copy_(before)
    return graph


def expanded(layer: Layer, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """The layer's output over whole sequences [T, E], by attention with keys and values for every head, in float32."""
    positions = torch.cat([torch.arange(n) for n in lens]).to(x.device)
    nope, rope = layer.queries(x, positions)
    latent, k_rope = layer.latents(x, positions)
    k = torch.cat((torch.einsum("tl,hln->thn", latent, layer.uk), k_rope[:, None].expand(-1, HEADS, -1)), -1)
    v = torch.einsum("tl,hlv->thv", latent, layer.uv)
    cu_seqlens = torch.tensor([0, *lens], device=x.device).cumsum(0, dtype=torch.int32)
    attended = tsmla_bridge.mla_prefill(
        torch.cat((nope, rope), -1).float(),
        k.float(),
        v.float(),
        cu_seqlens_q=cu_seqlens,
        max_q_len=max(lens),
        softmax_scale=SCALE,
        implementation="reference",
    )
    assert isinstance(attended, torch.Tensor)
    return attended.flatten(1) @ layer.o.float()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    layer, lens = Layer(device, dtype), [37, 5, 90]
    engine = Engine(layer, lens, device, dtype)
    prompts = torch.randn(sum(lens), EMBED, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    engine.prompt(prompts, lens)

    replay = captured(engine).replay if on_gpu else engine.step
    inputs = []
    for _ in range(STEPS):
        inputs.append(engine.x.clone())
        replay()

    # Every token's input again, in order; the layer's outputs for them are what each next input was made from.
    tokens = [torch.cat((p, torch.stack(inputs)[:, b])) for b, p in enumerate(prompts.split(lens))]
    totals = [n + STEPS for n in lens]
    wanted = next_input(expanded(layer, torch.cat(tokens), totals)).split(totals)
    made = torch.stack([*inputs[1:], engine.x])
    error = max(float((w[-STEPS:] - made[:, b].float()).norm() / w[-STEPS:].norm()) for b, w in enumerate(wanted))
    how = "replays of a CUDA graph" if on_gpu else "eager steps"
    print(f"{STEPS} {how} on {device}, {len(lens)} requests of {', '.join(map(str, totals))} tokens")
    print(f"relative error against expanded attention: {error:.1e}")
    # Sums of hundreds of products, in another order: some roundings of float32, or of bf16 and its inputs.
    assert error < (3e-2 if on_gpu else 1e-4), error


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
