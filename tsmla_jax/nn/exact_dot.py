"""Products of bf16 with f32 inside a kernel, with the error of f32: where a tensor core alone would have TF32's."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from tsmla_jax.nn.triton import plgpu


def add_products(total: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """total [T, N] plus x [T, K] times the transpose of a weight [N, K], for one pair of them or more.

    x is bf16, and so its products with each bf16 piece of a weight are exact in f32. The 24 bits of an f32 weight are
    those of three pieces; the least come first. A tensor core cuts off what it adds to an f32 and does not round it:
    so it adds these terms alone, and their sum goes to `total` by a rounded addition. That needs two terms: of one, a
    single pair with a bf16 weight, the compiler makes one long sum with `total`.
    """
    products: list[jax.Array] = []
    for x, weight in pairs:
        left, terms = weight, []
        for _ in range(1 if weight.dtype == x.dtype else 3):
            piece = left.astype(x.dtype)
            terms.append(plgpu.dot(x, piece, trans_b=True))
            left = left - piece.astype(left.dtype)
        products.append(sum(reversed(terms[:-1]), terms[-1]))
    return total + sum(products[1:], products[0])
