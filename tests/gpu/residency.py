"""A program: prefill's gradient with grids of half as many blocks as the GPU has multiprocessors, as many, and twice as
many. Only as many run at a time, so the last grid ends only if none of them waits for one that hasn't started.

    timeout 120 python3 -m tests.gpu.residency --front_end jax --deterministic

It writes a line for each grid when that has ended: the blocks, the bits' digest, and how far the gradients are from
those of the grid that fits.
"""

from __future__ import annotations

import argparse
import hashlib
import json

import numpy as np

TOKENS, HEADS = 4096, 16  # 512 tiles of keys
SCALE = 192**-0.5


def numbers() -> list[np.ndarray]:
    """q, k, v, and the cotangents of out and lse."""
    generator = np.random.default_rng(11)
    shapes = [(TOKENS, HEADS, width) for width in (192, 192, 128, 128)]
    return [generator.normal(size=shape).astype(np.float32) for shape in (*shapes, (TOKENS, HEADS))]


def in_jax(blocks: int, deterministic: bool) -> list[np.ndarray]:
    import jax
    import jax.numpy as jnp

    import tsmla_jax
    from tsmla_jax.ops import device

    device.num_sms = lambda arch: blocks
    *given, dout, dlse = map(jnp.asarray, numbers())
    offsets = jnp.asarray([0, TOKENS], jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = tsmla_jax.mla_prefill(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_q_len=TOKENS, max_kv_len=TOKENS,
            softmax_scale=SCALE, return_lse=True, deterministic=deterministic, implementation="cute",
        )  # fmt: skip
        return out, lse

    arrays = [x.astype(jnp.bfloat16) for x in given]
    gradients = jax.jit(lambda *x: jax.vjp(attend, *x)[1]((dout.astype(jnp.bfloat16), dlse)))(*arrays)
    return [np.asarray(x.astype(jnp.float32)) for x in gradients]


def in_torch(blocks: int, deterministic: bool) -> list[np.ndarray]:
    import torch

    import tsmla_bridge
    from tsmla_bridge.runtime import devices

    devices.num_sms = lambda index: blocks
    *given, dout, dlse = (torch.from_numpy(x).cuda() for x in numbers())
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in given]
    results = tsmla_bridge.mla_prefill(
        *leaves, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_q_len=TOKENS, max_kv_len=TOKENS,
        softmax_scale=SCALE, return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    gradients = torch.autograd.grad(results, leaves, (dout.to(torch.bfloat16), dlse))
    return [x.float().cpu().numpy() for x in gradients]


FRONT_ENDS = {"jax": in_jax, "torch": in_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--front_end", choices=FRONT_ENDS, required=True)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    import torch

    count = torch.cuda.get_device_properties(0).multi_processor_count
    fitting: list[np.ndarray] = []
    for blocks in (count, count // 2, 2 * count):
        found = FRONT_ENDS[args.front_end](blocks, args.deterministic)
        fitting = fitting or found
        digest = hashlib.sha256(b"".join(x.tobytes() for x in found)).hexdigest()
        apart = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, fitting, strict=True))
        print(json.dumps({"blocks": blocks, "digest": digest, "apart": apart}), flush=True)


if __name__ == "__main__":
    main()
