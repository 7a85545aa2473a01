"""Tokens chosen by a vocabulary that is split over devices are those of one device."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tsmla_jax.generate.mesh import EXPERT_SHARDS, REPLICAS, MeshShape, head_spec, make_mesh
from tsmla_jax.generate.next_tokens import choose_tokens
from tsmla_jax.generate.sampling import NOT_FINITE, Sampling

VOCABULARY, HIDDEN, TEXTS = 24, 8, 6


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("shape", [MeshShape(1, 2, 2), MeshShape(2, 1, 2), MeshShape(1, 2, 1)])
def test_parts_of_the_vocabulary(shape: MeshShape, greedy: bool) -> None:
    """Equal logits in two parts, of which the first token is taken; rows that are not finite in one part or in all."""
    rng = np.random.default_rng(0)
    output = rng.integers(-2, 3, (VOCABULARY, HIDDEN)).astype(np.float32)
    output[[3, 9, 15, 21]] = 4  # the largest of positive rows, once in each part
    x = rng.integers(0, 3, (TEXTS, HIDDEN)).astype(np.float32)
    x[1] = np.nan
    output[20, 0], x[2, 0], x[3:, 0] = 1e38, 10, 0  # infinite: of one text, in one part
    requests, positions = jnp.arange(TEXTS, dtype=jnp.int32), jnp.arange(7, 7 + TEXTS, dtype=jnp.int32)
    sampling = Sampling(np.uint32(1), np.float32(0.7), np.float32(0.9))
    config: Any = SimpleNamespace(vocab_size=VOCABULARY)
    choose = partial(choose_tokens, config=config, mesh=shape, greedy=greedy)
    want = np.asarray(choose(jnp.asarray(output), jnp.asarray(x), requests, positions, sampling))
    mesh = make_mesh(shape)
    assert mesh is not None and head_spec(VOCABULARY, shape.expert_shards) == P(EXPERT_SHARDS)
    specs = P(EXPERT_SHARDS), P(REPLICAS), P(REPLICAS), P(REPLICAS), P()
    run = jax.shard_map(choose, mesh=mesh, in_specs=specs, out_specs=P(REPLICAS), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(output, x, requests, positions, sampling), want)
    assert want[1] == want[2] == NOT_FINITE and (want[3:] >= 0).all()
    if greedy:
        assert jnp.asarray(want[4:]).tolist() == [3, 3]


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    assert head_spec(101, 4) == P() and head_spec(24, 1) == P()
