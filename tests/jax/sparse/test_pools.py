"""Pools of keys, as the indexer of GLM-5.3-Flash chooses them: positions, and the choice of transformers' own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.programs import ints
from tsmla_jax import sparse

HIDDEN, RANK, HEADS, WIDTH, POOL, CHOSEN = 32, 24, 16, 24, 4, 3
LENGTHS = (37, 2, 16)


def test_positions_of_pools() -> None:
    got = sparse.expand_pools(ints([[2, 0, -1], [1, -1, -1], [0, 1, 2]]), ints([13, 7, -1]), 4)
    assert got.tolist() == [
        [8, 9, 10, 11, 0, 1, 2, 3, -1, -1, -1, -1, 12, 13, -1],
        [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1] * 15,
    ]
    assert sparse.expand_pools(ints([[1]]), ints([7]), 4, tail=False).tolist() == [[4, 5, 6, 7]]
    assert sparse.expand_pools(ints([[5]]), ints([5]), 1).tolist() == [[5]]
    assert sparse.expand_pools(jnp.zeros((0, 2), jnp.int32), ints([]), 4).shape == (0, 11)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((ints([1]), ints([1]), 4), "pools: got shape"),
        ((ints([[1]]), ints([1, 2]), 4), "positions: got shape"),
        ((jnp.zeros((1, 1)), ints([1]), 4), "pools: got dtype float32"),
        ((ints([[1]]), ints([1]), 0), "pool_size: got 0"),
    ],
)
def test_what_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        sparse.expand_pools(*arguments)


class Theirs(NamedTuple):
    """The weights of transformers' indexer, and of all texts x, the low-rank query, and what the indexer chose."""

    weights: dict[str, np.ndarray]
    x: np.ndarray
    query: np.ndarray
    chosen: np.ndarray


def theirs() -> Theirs:
    torch = pytest.importorskip("torch")
    package = "transformers.models.glm5_next"
    configuration = pytest.importorskip(f"{package}.configuration_glm5_next")
    modeling = pytest.importorskip(f"{package}.modeling_glm5_next")
    config = configuration.Glm5NextTextConfig(
        hidden_size=HIDDEN,
        q_lora_rank=RANK,
        index_n_heads=HEADS,
        index_head_dim=WIDTH,
        index_topk=CHOSEN * POOL,
        index_kpool=POOL,
        num_hidden_layers=4,
    )
    torch.manual_seed(0)
    indexer = modeling.Glm5NextTextIndexer(config, 3)
    for parameter in indexer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    texts = [torch.randn(1, length, HIDDEN) for length in LENGTHS]
    queries = [torch.randn(1, length, RANK) for length in LENGTHS]
    chosen = []
    for x, query in zip(texts, queries, strict=True):
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        chosen.append(indexer(hidden_states=x, q_resid=query, attention_mask=mask, cache=None)[0].numpy())
    weights = {name: value.numpy() for name, value in indexer.state_dict().items()}
    rows = [torch.cat([row[0] for row in of_texts]).numpy() for of_texts in (texts, queries)]
    return Theirs(weights, rows[0], rows[1], np.concatenate(chosen))


def test_the_choice_of_transformers() -> None:
    """Of three texts at once, whose pools lie in pages of a plain cache."""
    given = theirs()
    w = {name: jnp.asarray(value) for name, value in given.weights.items()}
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    positions = ints(np.concatenate([np.arange(length) for length in LENGTHS]).tolist())
    page, pages = 4, 3  # pools of a page, and pages of a text
    tables = np.arange(len(LENGTHS) * pages)[::-1].reshape(-1, pages)

    @jax.jit
    def choose(x: jax.Array, query: jax.Array) -> jax.Array:
        k = x @ w["wk.weight"].T
        k = (k - k.mean(-1, keepdims=True)) * jax.lax.rsqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * w["k_norm.weight"] + w["k_norm.bias"]
        entries, _ = tsmla_jax.compress_kv(
            jnp.stack([k, x @ w["index_kpool_compress_gate"].T], axis=1),
            w["index_kpool_compress_ape"],
            sparse.init_compressor_state(len(LENGTHS), ratio=POOL, channels=WIDTH, overlap=False),
            state_slots=jnp.arange(len(LENGTHS), dtype=jnp.int32),
            seq_lens=ints(list(LENGTHS)),
            cu_seqlens_q=ints(starts.tolist()),
            ratio=POOL,
            overlap=False,
        )
        owners = jnp.maximum(entries.requests, 0)
        slots = sparse.positions_to_slots(entries.positions[:, None], ints(tables.tolist())[owners], page)[:, 0]
        cache = (
            jnp.zeros((tables.size * page, WIDTH))
            .at[jnp.where(slots < 0, tables.size * page, slots)]
            .set(entries.kv, mode="drop")
        )
        scale = HEADS**-0.5 * WIDTH**-0.5
        pools = tsmla_jax.indexer_topk(
            (query @ w["wq_b.weight"].T).reshape(-1, HEADS, WIDTH),
            x @ w["weights_proj.weight"].T * scale,
            cache.reshape(tables.size, page, WIDTH),
            ints(np.repeat(tables, LENGTHS, axis=0).tolist()),
            (positions + 1) // POOL,
            CHOSEN,
        )
        return sparse.expand_pools(pools, positions, POOL)

    got = np.asarray(choose(jnp.asarray(given.x), jnp.asarray(given.query)))
    assert got.shape == given.chosen.shape == (sum(LENGTHS), CHOSEN * POOL + POOL - 1)
    for row, other in zip(got, given.chosen, strict=True):
        assert sorted(row) == sorted(other)
