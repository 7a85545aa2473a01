"""Products of bf16 with f32 inside a kernel, with f32's error instead of the TF32 error of a tensor core alone."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from tsmla_jax.nn.products.triton import dot


def add_products(total: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """total [T, N] plus x [T, K] times the transpose of a weight [N, K], summed over one or more pairs (x, weight).

    x is bf16, so its products with each bf16 piece of a weight are exact within f32's range. The 24 bits of an f32
    weight are split into three pieces, and the products of the smallest are added first. A tensor core truncates when
    it adds to an f32: so it sums only these products, and a rounded addition adds their sum to `total`. A single pair
    with a bf16 weight makes a single product, which the compiler would join with `total` to one long sum: use two.
    """
    products: list[jax.Array] = []
    for x, weight in pairs:
        left, terms = weight, []
        for _ in range(1 if weight.dtype == x.dtype else 3):
            piece = left.astype(x.dtype)
            terms.append(dot(x, piece, trans_b=True))
            left = left - piece.astype(left.dtype)
        products.append(sum(reversed(terms[:-1]), terms[-1]))
    return total + sum(products[1:], products[0])
