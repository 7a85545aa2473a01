"""A call of indexer_loss on random arrays, and what it must give, which tests of both front ends share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsmla_jax
from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle

P, Z, DI, HI, H, D, T, K = 5, 4, 16, 3, 2, 24, 7, 9
SCALE = 0.3
Floats = tuple[jax.Array, ...]


class Problem:
    """A call's arrays, NaN in every slot that no token has."""

    def __init__(self, seed: int, dtype: Any = jnp.float32) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = np.asarray([K, 0, 3, K, 1, 5, K])
        self.indices = rng.integers(-1, P * Z - 3, (T, K))
        self.indices[3] = -1  # lengths that select nothing
        for row, length in zip(self.indices, self.lengths, strict=True):
            row[length:] = 10**6  # never used
        self.tables, self.seq_lens, self.offsets = rng.integers(0, P - 1, (2, 4)), [13, 6], [1, 4, 6]
        normal = functools.partial(self._normal, rng)
        self.index_q, self.weights = normal(T, HI, DI, dtype=dtype), normal(T, HI)
        self.q, self.sinks = normal(T, H, D, dtype=dtype), normal(H)
        self.lse = np.asarray(rng.uniform(1, 2, (T, H)), np.float32)
        keys = normal(P * Z, DI, dtype=dtype), normal(P * Z, D, dtype=dtype)
        self.keys = [np.asarray(x) for x in keys]

    @staticmethod
    def _normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def slots(self, which: str) -> list[np.ndarray]:
        """The slots of every token's keys."""
        if which == "selected":
            rows = [row[:length] for row, length in zip(self.indices, self.lengths, strict=True)]
            return [row[row >= 0] for row in rows]
        seen: list[np.ndarray] = [np.zeros(0, int)] * T
        for request, (first, stop) in enumerate(zip(self.offsets[:-1], self.offsets[1:], strict=True)):
            for token in range(first, stop):
                position = np.arange(self.seq_lens[request] - (stop - 1 - token))
                seen[token] = self.tables[request][position // Z] * Z + position % Z
        return seen

    def caches(self, which: str) -> list[jax.Array]:
        """The caches of the indexer's keys and of the attention's."""
        used = np.unique(np.concatenate(self.slots(which)))
        unused = np.setdiff1d(np.arange(P * Z), used)
        found = []
        for keys in self.keys:
            rows = np.array(keys)
            rows[unused] = np.nan
            found.append(jnp.asarray(rows).reshape(P, Z, -1))
        return found

    def where(self, which: str) -> dict[str, Any]:
        """The arguments that say which keys count."""
        if which == "selected":
            return {"indices": ints(self.indices), "lengths": ints(self.lengths)}
        return {
            "block_tables": ints(self.tables),
            "seq_lens": ints(self.seq_lens),
            "cu_seqlens_q": ints(self.offsets),
        }

    def loss(self, which: str, implementation: str | None, *floats: jax.Array, **options: Any) -> jax.Array:
        """The losses, of the indexer's q, weights and cache."""
        given = floats or (self.index_q, self.weights, self.caches(which)[0])
        attention = self.q, self.caches(which)[1], self.lse
        options = {"softmax_scale": SCALE, **self.where(which), **options}
        return tsmla_jax.indexer_loss(*given, *attention, implementation=implementation, **options)  # type: ignore[arg-type]

    def expected(self, which: str, sinks: bool) -> np.ndarray:
        """The losses by loops in float64."""
        index_keys, kv = (x.astype(np.float64) for x in self.keys)
        index_q, weights, q = (np.asarray(x, np.float64) for x in (self.index_q, self.weights, self.q))
        found = np.zeros(T)
        for t, slots in enumerate(self.slots(which)):
            if not len(slots):
                continue
            logits = oracle.indexer_logits(index_q[[t]], weights[[t]], [index_keys[slots]], len(slots))[0]
            total = self.lse[t].astype(np.float64)
            if sinks:
                total = np.logaddexp(total, np.asarray(self.sinks, np.float64))
            p = np.exp(q[t] @ kv[slots].T * SCALE - total[:, None]).sum(0)
            p /= p.sum()
            choice = np.exp(logits - logits.max())
            found[t] = (p * (np.log(p) - np.log(choice / choice.sum()))).sum()
        return found


def floats_of(x: Problem, which: str) -> Floats:
    return x.index_q, x.weights, x.caches(which)[0]
